"""Chats in the shapes that data sets and logs have, as messages of roles and texts."""

from collections.abc import Sequence
from typing import Any

Message = dict[str, str]  # role and content, as chat templates take them

_ROLES = {
    **dict.fromkeys(("user", "human", "prompter", "customer"), "user"),
    **dict.fromkeys(("assistant", "gpt", "bot", "model", "ai", "chatgpt"), "assistant"),
    "system": "system",
    "tool": "tool",
}
# What a single exchange is called.
_ASKED = ("prompt", "question", "instruction", "query")
_ANSWERED = ("response", "completion", "answer", "output")


def chat_of(entry: Any) -> list[Message] | None:
    """Return the messages of a JSON value; None if it is no chat.

    Understood are `messages` (role, content), `conversations` as in ShareGPT (from, value), `turns`
    (messages, or texts of the user), and pairs of `prompt` and `response`, also under other names.
    """
    if not isinstance(entry, dict):
        return None
    for name in ("messages", "conversations", "conversation", "turns"):
        if isinstance(entry.get(name), list):
            return _messages(entry[name])
    asked = next((entry[name] for name in _ASKED if entry.get(name)), None)
    answered = next((entry[name] for name in _ANSWERED if entry.get(name)), None)
    if asked is None or answered is None:
        return None
    if isinstance(entry.get("input"), str) and entry["input"] and isinstance(asked, str):
        asked = f"{asked}\n\n{entry['input']}"  # as in Alpaca: what the instruction is about
    before = asked if isinstance(asked, list) else [{"role": "user", "content": asked}]
    after = answered if isinstance(answered, list) else [{"role": "assistant", "content": answered}]
    return _messages([*before, *after])


def _messages(entries: Sequence[Any]) -> list[Message] | None:
    """Return entries as messages; None if one cannot be read as such, or there is none."""
    messages = []
    for entry in entries:
        if isinstance(entry, str):
            entry = {"role": "user", "content": entry}
        if not isinstance(entry, dict):
            return None
        role = _ROLES.get(str(entry.get("role", entry.get("from", entry.get("speaker")))).lower())
        content = _text(entry.get("content", entry.get("value", entry.get("text"))))
        if role is None or content is None:
            return None
        messages.append({"role": role, "content": content})
    return messages or None


def _text(content: Any) -> str | None:
    """Return the text of a content, which may be a list of parts with images among them."""
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        return "\n".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else None
