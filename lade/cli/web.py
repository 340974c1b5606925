"""`lade chat --web`: serve the page until Ctrl-C."""

import os
import threading
from typing import TYPE_CHECKING

from lade.chat.web import Page
from lade.chat.web_sessions import Setup
from lade.cli.loading import console, note
from lade.hosts import is_local
from lade.models.loading import LoadedModel

if TYPE_CHECKING:
    from lade.chat.settings import Settings
    from lade.cli.options import LearningOptions, PageOptions
    from lade.drafting.drafter import Drafter


def run(
    loaded: LoadedModel,
    settings: "Settings",
    system: str | None,
    drafting: "LearningOptions",
    drafter: "Drafter | None",
    options: "PageOptions",
) -> None:
    """Serve the page; its address is printed to standard output."""
    host = options.host or "127.0.0.1"
    password = options.password or os.environ.get("LADE_PASSWORD") or None
    with drafting.open_pools(loaded) as (_, *layers):
        console.print("[dim]Checking how the model verifies drafts …[/dim]")
        page = Page(Setup(loaded, settings, drafting.config, system, layers, drafter))
        try:
            print(page.launch(host, options.port, options.share, password), flush=True)
            if password is None and (options.share or not is_local(host)):
                note("whoever reaches this address can use the model; --password keeps others off")
            console.print("[dim]Ctrl-C ends it.[/dim]")
            _until_interrupted()
        except KeyboardInterrupt:
            console.print("[dim]Closing …[/dim]")
        finally:
            page.close()


def _until_interrupted() -> None:
    """Wait for the `KeyboardInterrupt` of Ctrl-C."""
    threading.Event().wait()
