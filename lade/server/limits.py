"""How long prompts and answers may be, and the options of a call that follow from a request."""

from collections.abc import Iterator
from typing import Any

from lade.compat import Model
from lade.server.errors import ApiError
from lade.server.exchange import Exchange
from lade.server.options import ServerOptions

# Texts are looked at in pieces, so that one of megabytes is refused for its beginning.
_PIECE_CHARS, _MOST_BY_CUTS = 2**15, 64


class RequestLimits:
    """Limits on prompts and answers.

    Args:
        model: its positions are a limit, too.
        options: of the server.
    """

    def __init__(self, model: Model, options: ServerOptions) -> None:
        text = model.config.get_text_config(decoder=True)
        self._num_positions: int | None = getattr(text, "max_position_embeddings", None)
        limits = options.max_prompt_tokens, self._num_positions and self._num_positions - 1
        self._max_prompt_tokens = min((each for each in limits if each is not None), default=None)
        self._max_new_tokens = options.max_new_tokens

    def apply(self, exchange: Exchange, options: Any) -> None:
        """Check a prompt's length; set the options of its call, a GenerationConfig.

        Raises:
            ApiError: the prompt is empty, or leaves no room for its answer.
        """
        asked, num_prompt = exchange.asked, exchange.num_prompt_tokens
        if num_prompt == 0:
            raise ApiError(400, "expected a prompt of one token or more, got none")
        self._check_length(num_prompt)
        room = self._max_new_tokens
        if self._num_positions is not None:
            room = min(room, self._num_positions - num_prompt)
        if asked.max_new_tokens is not None and asked.max_new_tokens > room:
            raise ApiError(
                400,
                f"expected an answer of at most {room} tokens after a prompt of {num_prompt}, "
                f"got {asked.max_new_tokens}",
                param="max_output_tokens" if asked.endpoint == "responses" else "max_tokens",
                code="context_length_exceeded",
            )
        wanted = options.max_new_tokens if asked.max_new_tokens is None else asked.max_new_tokens
        options.max_new_tokens = min(wanted, room)
        options.max_length = None
        exchange.most_tokens = num_prompt + options.max_new_tokens
        if asked.temperature is not None:
            options.do_sample = asked.temperature > 0
            options.temperature = asked.temperature or None
        elif asked.top_p is not None:
            options.do_sample = True
        if asked.top_p is not None:
            options.top_p = asked.top_p
        for name, value in asked.sampling.items():
            setattr(options, name, value)

    def predicted_ids(self, tokenizer: Any, text: str) -> list[int]:
        """Return the tokens of a prediction, which may have as many as a prompt.

        Raises:
            ApiError: it is too long.
        """
        self.check_texts(tokenizer, text, "prediction")
        ids: list[int] = tokenizer._tokenizer.encode(text, add_special_tokens=False).ids
        self._check_length(len(ids), "prediction")
        return ids

    def check_texts(self, tokenizer: Any, message: Any, what: str = "prompt") -> None:
        """Refuse texts of many more tokens than a prompt may have, without making them all.

        Args:
            tokenizer: of the model.
            message: texts, in lists and dicts of any depth.
            what: the texts are.

        Raises:
            ApiError: they are too long.
        """
        if self._max_prompt_tokens is None:
            return
        num_tokens = 0
        for text in _texts(message):
            for begin in range(0, len(text), _PIECE_CHARS):
                piece = text[begin : begin + _PIECE_CHARS]
                encoded = tokenizer._tokenizer.encode(piece, add_special_tokens=False)
                # A cut may make tokens of one: never as many.
                num_tokens += max(len(encoded.ids) - _MOST_BY_CUTS, 0)
                self._check_length(num_tokens, what)

    def _check_length(self, num_tokens: int, what: str = "prompt") -> None:
        most = self._max_prompt_tokens
        if most is not None and num_tokens > most:
            raise ApiError(
                400,
                f"expected a {what} of at most {most} tokens, got {num_tokens}",
                param=None if what == "prompt" else what,
                code="context_length_exceeded",
            )


def _texts(message: Any) -> Iterator[str]:
    if isinstance(message, str):
        yield message
    elif isinstance(message, dict | list | tuple):
        for part in message.values() if isinstance(message, dict) else message:
            yield from _texts(part)
