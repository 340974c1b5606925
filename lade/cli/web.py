"""`lade chat --web`: serve the page until Ctrl-C."""

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lade.chat.learning import IdleLearner
from lade.chat.web import Page
from lade.chat.web_sessions import Setup, no_rest
from lade.cli.generate import check_verification
from lade.cli.loading import console, note
from lade.cli.pool import open_pools
from lade.config import Config
from lade.hosts import is_local
from lade.models.loading import LoadedModel, encode

if TYPE_CHECKING:
    from lade.chat.settings import Settings
    from lade.drafting.drafter import Drafter


def run(
    loaded: LoadedModel,
    settings: "Settings",
    config: Config,
    system: str | None,
    pool_paths: Sequence[Path],
    learns: bool,
    host: str,
    port: int | None,
    share: bool,
    password: str | None,
    drafter: "Drafter | None" = None,
) -> None:
    """Serve the page; its address is printed to standard output."""
    hello = encode(loaded.tokenizer, "Hi", loaded.model.device)
    check_verification(loaded.model, hello, config, drafter)
    learns = learns and config.verification != "plain"
    rest = IdleLearner(loaded.model, note).pause if learns else no_rest
    with open_pools(loaded, pool_paths, None) as (_, *layers):
        page = Page(Setup(loaded, settings, config, system, layers, drafter), rest)
        try:
            password = password or os.environ.get("LADE_PASSWORD") or None
            print(page.launch(host, port, share, password), flush=True)
            if password is None and (share or not is_local(host)):
                note("whoever reaches this address can use the model; --password keeps others off")
            console.print("[dim]Ctrl-C ends it.[/dim]")
            _until_interrupted()
        except KeyboardInterrupt:
            console.print("[dim]Closing …[/dim]")
        finally:
            page.close()


def _until_interrupted() -> None:
    """Wait for Ctrl-C.

    Raises:
        KeyboardInterrupt: it came.
    """
    threading.Event().wait()
