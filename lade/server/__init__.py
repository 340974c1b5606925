"""An OpenAI-compatible server for several users of one model.

`app.py` puts it together and runs it; `routes.py` is what a request meets, and reads top to bottom
as what becomes of it: `requests.py`, `limits.py`, `inference.py`, `answers.py`.
"""
