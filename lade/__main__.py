"""`python -m lade` is the command line, as `lade` is."""

from lade.cli import main

if __name__ == "__main__":
    main()
