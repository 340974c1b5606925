"""An OpenAI-compatible server for several users of one model.

`app.py` puts it together and runs it. `routes.py` takes a request through `requests.py`,
`limits.py`, `inference.py` and `answers.py`, in this order.
"""
