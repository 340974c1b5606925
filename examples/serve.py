"""Serve a model that decodes with lade, by transformers' own OpenAI-compatible server.

Usage: python examples/serve.py [FOLDER OR HUB ID] [PORT], and then, for one,
transformers chat MODEL http://localhost:8000
"""

import sys
import threading

from transformers.cli.serve import Serve

import lade
from lade.models import default_model


class LadeServe(Serve):  # type: ignore[misc]
    """`transformers serve`, and its model is wrapped before the first request."""

    def start_server(self) -> None:
        """Called once the model is loaded; all requests share one pool."""
        for loaded in self._model_manager.loaded_models.values():
            lade.wrap(loaded.model)
        super().start_server()


def main(name: str | None = None, port: str = "8000") -> None:
    server = LadeServe(name or str(default_model()), port=int(port), non_blocking=True)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        server.kill_server()


if __name__ == "__main__":
    main(*sys.argv[1:])
