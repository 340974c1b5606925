"""Chats: a conversation with a model, and what shows it in a terminal.

`conversation.py` knows nothing of how it is shown; start there.
"""
