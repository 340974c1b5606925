"""`python -m tests.stress`."""

import sys

from tests.stress.run import main

if __name__ == "__main__":
    sys.exit(main())
