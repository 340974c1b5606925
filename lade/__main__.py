"""Run the command line, `lade`, as `python -m lade`."""

from lade.apps.cli import main

if __name__ == "__main__":
    main()
