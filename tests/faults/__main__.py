"""Plant faults: `python -m tests.faults`."""

import sys

from tests.faults.run import main

if __name__ == "__main__":
    sys.exit(main())
