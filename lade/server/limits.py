"""How long prompts, answers and drafts may be, and a call's options that follow from a request."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from lade.compat import Model
from lade.config import Config
from lade.server.errors import ApiError
from lade.server.exchange import Asked, Exchange
from lade.server.options import ServerOptions

# Texts are looked at in pieces, so that megabytes are refused for their beginning.
_PIECE_CHARS = 2**15
# They may be made into more tokens than a prompt by so much before they are refused for that: cuts
# add some, and templates leave parts of a conversation out.
_SLACK = 2
# Draft tokens of a step that a request may ask for where the server sets no number: others wait
# for its steps.
_MOST_DRAFT_TOKENS = 64
# The same where all steps have one width, which depends on the number from this one on.
_MOST_OF_STABLE_TEXT = 7


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
        num_tokens, text = 0, "".join(_texts(message))
        for begin in range(0, len(text), _PIECE_CHARS):
            piece = text[begin : begin + _PIECE_CHARS]
            # A batch, for which the tokenizer lets other threads go on.
            (encoded,) = tokenizer._tokenizer.encode_batch_fast([piece], add_special_tokens=False)
            num_tokens += len(encoded.ids)
            if num_tokens > _SLACK * self._max_prompt_tokens:
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


def config_for(asked: Asked, config: Config) -> Config:
    """Return the config of a request's call.

    Args:
        asked: the request.
        config: of the server.

    Raises:
        ApiError: fields contradict each other, or more is asked for than the server allows.
    """
    most, wanted = config.max_draft_tokens, asked.max_draft_tokens
    if config.stable_text and (most is not None or config.lookahead is not None):
        # Near-ties depend on the width of steps, which these would change.
        for name, is_asked in (
            ("speculation", not asked.speculates),
            ("max_draft_tokens", wanted is not None),
        ):
            if is_asked:
                raise ApiError(400, f"expected no {name}: the texts are kept stable", param=name)
    if not asked.speculates:
        config = replace(config, lookahead=None)
        for name in ("prediction", "max_draft_tokens", "pools"):
            if getattr(asked, name) is not None:
                raise ApiError(400, f"expected no {name}, as nothing is drafted", param=name)
        wanted = 0
    if wanted is None:
        return config
    if most is None:
        most = _MOST_OF_STABLE_TEXT if config.stable_text else _MOST_DRAFT_TOKENS
    if wanted > most:
        raise ApiError(
            400,
            f"expected max_draft_tokens of at most {most}, got {wanted}",
            param="max_draft_tokens",
        )
    return replace(config, max_draft_tokens=wanted, step_costs=None)


def _texts(message: Any) -> Iterator[str]:
    """Yield all texts in lists and dicts, names of fields included."""
    if isinstance(message, str):
        yield message
    elif isinstance(message, dict):
        for name, part in message.items():
            yield name
            yield from _texts(part)
    elif isinstance(message, list | tuple):
        for part in message:
            yield from _texts(part)
