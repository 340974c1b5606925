"""An OpenAI-compatible server for several users of one model, on transformers' own serving code.

`app.py` puts it together and runs it. `gate.py` is what a request meets first; `upstream.py` is
all that touches transformers' handlers; `inference.py` is one answer, on the thread of the model.
"""
