"""The command line: `lade generate`, `lade demo`, `lade bench`, `lade support`.

`app.py` defines commands and options; heavy imports happen inside the commands.
"""

import sys

from lade.errors import LadeError, MissingExtraError


def main() -> None:
    """Run the command line; errors of use and of the machine print one line, not a traceback."""
    try:
        try:
            from lade.cli.app import app
        except ModuleNotFoundError as error:
            raise MissingExtraError(error.name or "typer", "cli") from None
        app()
    except (LadeError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
