"""JSON schemas, compiled for the model's tokens; what they force is drafted for free."""

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from lade.models.loading import LoadedModel
from lade.server.compiling import CompilerProcess, SchemaError
from lade.server.schemas import check_schema, refusal

_CACHE_BYTES = 2**26
_MAX_SCHEMA_CHARS = 2**16


class Grammars:
    """Compiles schemas. What is kept of one tenant is found by no other.

    Its methods may be called from threads.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        ends = loaded.model.generation_config.eos_token_id
        self._ends: list[int] = [ends] if isinstance(ends, int) else list(ends or ())
        self._lock = threading.Lock()
        self._tokens: Any = None
        self._process: CompilerProcess | None = None
        self._token_bytes: list[bytes] = []
        self._kept: OrderedDict[tuple[str, str], tuple[Any, int]] = OrderedDict()

    def checked(self, schema: Mapping[str, Any]) -> str:
        """Return a schema as JSON.

        Raises:
            ApiError: it is too long, or not one that grammars keep.
        """
        text = json.dumps(schema)
        if len(text) > _MAX_SCHEMA_CHARS:
            raise refusal(
                f"expected a schema of at most {_MAX_SCHEMA_CHARS} characters, got {len(text)}"
            )
        if not self._ends:
            raise refusal("expected no schema, for the model has no token that ends an answer")
        check_schema(schema)
        return text

    def compiled(self, tenant: str, schema: str) -> Any:
        """Return the grammar of a JSON schema; may wait for others.

        Args:
            tenant: who asks; "" for nobody in particular, of whom nothing is kept.
            schema: as `checked` returns it.

        Raises:
            ApiError: it cannot be compiled, or not in time.
        """
        import xgrammar

        with self._lock:
            if (found := self._kept.get((tenant, schema))) is not None:
                self._kept.move_to_end((tenant, schema))
                return found[0]
            self._make_tokens()
            if self._process is None:
                self._process = CompilerProcess(self._tokens.serialize_json())
            process = self._process
        try:
            made = process.compile(schema)
        except SchemaError as error:
            raise refusal(f"expected a JSON schema that xgrammar knows: {error}") from None
        grammar = xgrammar.CompiledGrammar.deserialize_json(made, self._tokens)
        if tenant:
            with self._lock:
                self._kept[tenant, schema] = grammar, len(made) + len(schema)
                while sum(num_bytes for _, num_bytes in self._kept.values()) > _CACHE_BYTES:
                    self._kept.popitem(last=False)
        return grammar

    def token_bytes(self) -> list[bytes]:
        """Return the bytes of every token."""
        with self._lock:
            self._make_tokens()
            if not self._token_bytes:
                self._token_bytes = self._tokens.decoded_vocab  # made anew each time
            return self._token_bytes

    def close(self) -> None:
        """End the process that compiles."""
        if self._process is not None:
            self._process.close()

    def _make_tokens(self) -> None:
        if self._tokens is None:
            import xgrammar

            model, tokenizer, _ = self._loaded
            self._tokens = xgrammar.TokenizerInfo.from_huggingface(
                tokenizer,
                vocab_size=model.config.get_text_config(decoder=True).vocab_size,
                stop_token_ids=self._ends or [0],  # it wants one; without, nothing is compiled
            )
