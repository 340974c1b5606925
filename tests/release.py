"""What a tag must agree with before it is published: `python -m tests.release TAG SOURCE`.

It needs the standard library alone, and is run by `make check-release`.
"""

import re
import sys
import tomllib
from collections.abc import Iterator
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[1]
_VERSION = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)
_ENTRY = re.compile(r"^## \[([^\]]+)\](?: - (\S+))?$", re.MULTILINE)


def faults(tag: str, source: str, root: Path = ROOT) -> Iterator[str]:
    """Yield what stands against publishing a tag.

    Args:
        tag: its name, the version after a "v".
        source: the address of the repository that it is in.
        root: the folder of the project.
    """
    found = _VERSION.search((root / "lade" / "_version.py").read_text(encoding="utf-8"))
    version = found[1] if found else None
    if tag != f"v{version}":
        yield f"expected the tag v{version}, the version in lade/_version.py; got {tag!r}"
    dates = dict(_ENTRY.findall((root / "CHANGELOG.md").read_text(encoding="utf-8")))
    if not _is_date(dates.get(version or "", "")):
        yield f"expected a dated entry for {version} in CHANGELOG.md; it has {', '.join(dates)}"
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    if project["urls"]["Source"] != source:
        yield (
            f"expected the address {source} as Source of [project.urls], got "
            f"{project['urls']['Source']}"
        )


def _is_date(text: str) -> bool:
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True


def main() -> None:
    """Print what stands against publishing, and exit with 1 where anything does."""
    if len(sys.argv) != 3:
        sys.exit("expected: python -m tests.release TAG SOURCE")
    _, tag, source = sys.argv
    if against := list(faults(tag, source)):
        sys.exit("\n".join(against))


if __name__ == "__main__":
    main()
