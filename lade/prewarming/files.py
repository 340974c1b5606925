"""Files in the user's cache: where they are."""

from pathlib import Path


def cache_folder(name: str) -> Path:
    """Return a folder in the user's cache; it need not exist."""
    from platformdirs import user_cache_path  # here, as only files need it

    return user_cache_path("lade", appauthor=False) / name
