"""Serve a model that decodes with lade, by transformers' own OpenAI-compatible server.

Usage: python examples/serve.py [FOLDER OR HUB ID] [PORT] [share], then for example transformers
chat MODEL http://localhost:8000. Requests are private; `share` lets later answers profit from all.
"""

import sys
import threading

from transformers.cli.serve import Serve

import lade
from lade.models import default_model


class LadeServe(Serve):  # type: ignore[misc]
    """`transformers serve` with the model wrapped before the first request."""

    shares_text = False

    def start_server(self) -> None:
        """Wrap the model, which is loaded by now, and start the server."""
        for loaded in self._model_manager.loaded_models.values():
            lade.wrap(loaded.model, shares_text=self.shares_text)
        super().start_server()


def main(name: str | None = None, port: str = "8000", share: str = "") -> None:
    LadeServe.shares_text = share == "share"
    server = LadeServe(name or str(default_model()), port=int(port), non_blocking=True)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        server.kill_server()


if __name__ == "__main__":
    main(*sys.argv[1:])
