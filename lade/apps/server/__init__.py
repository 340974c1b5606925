"""An OpenAI-compatible server for several users of one model.

`app.py` puts it together and runs it. `routes.py` takes a request through `requests.py`,
`limits.py`, `inference.py` and `answers.py`, in this order.
"""

from importlib.util import find_spec

from lade.errors import MissingExtraError

for _name in ("llguidance", "prometheus_client", "pydantic", "starlette", "uvicorn"):
    if find_spec(_name) is None:  # an error at the start, not at a request
        raise MissingExtraError(_name, "serve")
