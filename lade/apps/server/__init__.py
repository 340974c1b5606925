"""An OpenAI-compatible server for several users of one model.

`app.py` puts it together and runs it. `routes.py` takes a request through `requests.py`,
`limits.py`, `inference.py` and `answers.py`, in this order.
"""

from importlib import metadata

from packaging.version import Version

from lade.errors import MissingExtraError

#: The packages of the extra `serve`, and the oldest release of each.
NEEDED = {"llguidance": "1.7", "prometheus-client": "0.20", "pydantic": "2.10"}
NEEDED |= {"starlette": "0.40", "uvicorn": "0.30"}

for _name, _least in NEEDED.items():  # an error at the start, not at a request
    try:
        _found = metadata.version(_name)
    except metadata.PackageNotFoundError:
        raise MissingExtraError(_name, "serve") from None
    if Version(_found) < Version(_least):
        raise MissingExtraError(_name, "serve", f"{_least} or newer, but {_found} is installed")
