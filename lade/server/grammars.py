"""JSON schemas that answers keep to the letter; what they force is drafted for free."""

import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import llguidance
import llguidance.hf
import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor

from lade.drafting.grammar import ForcedTokens
from lade.models.loading import LoadedModel
from lade.server.checking import LIMITS, what_is_wrong
from lade.server.errors import ApiError

_MAX_CHARS = 2**16  # also with what references lead to in their place
_MAX_KNOWN = 1024
# Without free blanks, which a model may write until its answer is full.
_FORM: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Grammars:
    """Makes grammars of schemas. Its methods may be called from threads."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        ends = loaded.model.generation_config.eos_token_id
        self._ends: list[int] = [ends] if isinstance(ends, int) else list(ends or ())
        self._lock = threading.Lock()
        self._tokens: llguidance.LLTokenizer | None = None
        self._known: dict[tuple[str, str], None] = {}  # tenants, and grammars without a fault

    def made(self, schema: Mapping[str, Any], tenant: str = "") -> llguidance.LLMatcher:
        """Return the grammar of a JSON schema, at its begin.

        Args:
            schema: of the answer.
            tenant: who asks; "" for nobody in particular, of whom nothing is kept.

        Raises:
            ApiError: it is too long or takes too much, or is not one that grammars keep.
        """
        text = _written(_told_apart(schema, schema))
        if not self._ends:
            raise refusal("expected no schema, for the model has no token that ends an answer")
        if "x-guidance" in schema:  # which would loosen what is kept
            raise refusal("expected a schema without x-guidance")
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(text, overrides=_FORM)
        except ValueError as error:  # it is too deep
            raise refusal(f"expected a JSON schema that can be read: {error}"[:300]) from None
        if (tenant, grammar) not in self._known and (wrong := what_is_wrong(grammar)):
            raise refusal(f"expected a JSON schema that can be kept: {wrong}"[:300])
        with self._lock:
            if tenant:
                self._known[tenant, grammar] = None
            if len(self._known) > _MAX_KNOWN:
                del self._known[next(iter(self._known))]
        return llguidance.LLMatcher(self.tokens(), grammar, log_level=0, limits=LIMITS)

    def tokens(self) -> llguidance.LLTokenizer:
        """Return what knows the bytes of every token."""
        with self._lock:
            if self._tokens is None:
                model, tokenizer, _ = self._loaded
                size = model.config.get_text_config(decoder=True).vocab_size
                ends: Any = self._ends or None
                self._tokens = llguidance.hf.from_tokenizer(tokenizer, size, ends)
            return self._tokens


class Kept(LogitsProcessor, ForcedTokens):  # type: ignore[misc]
    """Has one answer keep its grammar, which it advances."""

    def __init__(self, grammar: llguidance.LLMatcher, num_prompt_tokens: int) -> None:
        self._grammar = grammar
        self._num_seen = num_prompt_tokens

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Allow what may follow; called once for each emitted token, with one row."""
        self._grammar.consume_tokens(input_ids[0, self._num_seen :].tolist())
        self._num_seen = input_ids.shape[1]
        bits = np.frombuffer(self._grammar.compute_bitmask(), np.uint8)
        if self._grammar.is_error():
            raise refusal(f"the answer's schema takes too much: {self._grammar.get_error()}"[:300])
        allowed = torch.from_numpy(np.unpackbits(bits, bitorder="little")).bool()
        allowed = allowed[: scores.shape[-1]].to(scores.device)
        return scores.masked_fill(~allowed, -torch.inf)

    def forced_tokens(self, row: int, committed: Sequence[int], max_tokens: int) -> list[int]:
        """Return what must follow, as most tokenizers would write it."""
        ahead = self._grammar.deep_copy()
        ahead.consume_tokens([*committed[self._num_seen :]])
        return ahead.compute_ff_tokens()[:max_tokens]


def _written(schema: Any) -> str:
    """Return a schema as JSON, of which no more is written than may be taken."""
    pieces, num_chars = [], 0
    for piece in json.JSONEncoder().iterencode(schema):
        pieces.append(piece)
        num_chars += len(piece)
        if num_chars > _MAX_CHARS:
            raise refusal(f"expected a schema of at most {_MAX_CHARS} characters, got more")
    return "".join(pieces)


def _told_apart(part: Any, root: Any) -> Any:
    """Return a schema with what branches of each `oneOf` refer to in the place of references.

    Only so are branches found to exclude each other by a constant, as in tagged unions.
    """
    if isinstance(part, list):
        return [_told_apart(each, root) for each in part]
    if not isinstance(part, dict):
        return part
    values = ("const", "enum", "default", "examples")  # which are no schemas
    found = {name: p if name in values else _told_apart(p, root) for name, p in part.items()}
    if isinstance(found.get("oneOf"), list):
        found["oneOf"] = [_resolved(each, root) for each in found["oneOf"]]
    return found


def _resolved(branch: Any, root: Any) -> Any:
    """Return what a branch refers to within the schema; else the branch."""
    if not (isinstance(branch, dict) and [*branch] == ["$ref"]):
        return branch
    found = root
    for step in str(branch["$ref"]).removeprefix("#/").split("/"):
        name = step.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, dict) else None
    return branch if found is None else found


def refusal(message: str) -> ApiError:
    """Return what a client is told whose schema is not taken."""
    return ApiError(400, message, param="response_format")
