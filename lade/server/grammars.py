"""JSON schemas, compiled for the model's tokens; what they force is drafted for free."""

import threading
from typing import Any

from lade.models.loading import LoadedModel
from lade.server.errors import ApiError

_CACHE_BYTES = 2**26
_MAX_SCHEMA_CHARS = 2**16


class Grammars:
    """Compiles schemas, each once while it is in use. Its methods may be called from threads."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        ends = loaded.model.generation_config.eos_token_id
        self._ends: list[int] = [ends] if isinstance(ends, int) else list(ends or ())
        self._lock = threading.Lock()
        self._compiler: Any = None
        self._tokens: Any = None
        self._pieces: list[bytes] = []

    def compiled(self, schema: str) -> Any:
        """Return the grammar of a JSON schema.

        Raises:
            ApiError: it is none, or too long.
        """
        if len(schema) > _MAX_SCHEMA_CHARS:
            raise ApiError(
                400,
                f"expected a schema of at most {_MAX_SCHEMA_CHARS} characters, got {len(schema)}",
                param="response_format",
            )
        if not self._ends:
            raise ApiError(
                400,
                "expected no schema, for the model has no token that ends an answer",
                param="response_format",
            )
        with self._lock:
            compiler = self._made()
        try:
            # Without this, a model may write blanks until its answer is full.
            return compiler.compile_json_schema(schema, any_whitespace=False)
        except (RuntimeError, ValueError) as error:  # of its C++ code, or text that it cannot take
            raise ApiError(
                400,
                f"expected a JSON schema that xgrammar knows: {str(error)[:300]}",
                param="response_format",
            ) from None

    def pieces(self) -> list[bytes]:
        """Return the bytes of every token."""
        with self._lock:
            self._made()
            if not self._pieces:
                self._pieces = self._tokens.decoded_vocab  # made anew each time
            return self._pieces

    def _made(self) -> Any:
        if self._compiler is None:
            import xgrammar

            model, tokenizer, _ = self._loaded
            self._tokens = xgrammar.TokenizerInfo.from_huggingface(
                tokenizer,
                vocab_size=model.config.get_text_config(decoder=True).vocab_size,
                stop_token_ids=self._ends or [0],  # it wants one; without, nothing is compiled
            )
            self._compiler = xgrammar.GrammarCompiler(
                self._tokens, max_threads=1, cache_limit_bytes=_CACHE_BYTES
            )
        return self._compiler
