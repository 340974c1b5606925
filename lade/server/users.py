"""Who asks, and whose pool that is: API keys, names of pools, the folder that keeps them."""

import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from filelock import FileLock

from lade.hf.pools import AnyPool, Pools
from lade.models.loading import LoadedModel
from lade.pools import fingerprint_of_tokenizer, load_pool
from lade.prewarming.fingerprint import fingerprint_of
from lade.server.errors import ApiError
from lade.server.options import ServerOptions
from ngram_pool import PoolStore
from ngram_pool.writing import write_whole

SHARED = "shared"
_SECRET_BYTES = 32


class ApiKeys:
    """The keys that open the server; without any, it is open.

    Only digests are kept, and all are compared at each request: time tells nothing of a key.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self.replace(keys)

    def replace(self, keys: Sequence[str]) -> None:
        """Take other keys from now on; what is under way is ended for nobody."""
        self._digests = [_digest(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def identify(self, headers: Mapping[str, str]) -> str:
        """Return the key of a request, "" where none is needed.

        Raises:
            ApiError: it has none, or one that is not known.
        """
        if not self._digests:
            return ""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        digest = _digest(key.strip())
        is_known = [hmac.compare_digest(digest, known) for known in self._digests]
        if scheme.lower() != "bearer" or not any(is_known):
            raise ApiError(
                401, "expected a valid API key: Authorization: Bearer KEY", code="invalid_api_key"
            )
        return key.strip()


class UserPools:
    """A pool for each user, and the layers that all draft from.

    Args:
        loaded: the model; pools of other tokenizers are kept apart from its own.
        options: of the server.

    Raises:
        OSError, ngram_pool.PoolFileError: a folder or a layer cannot be used.
    """

    def __init__(self, loaded: LoadedModel, options: ServerOptions) -> None:
        self._shares = options.shares_pool
        self._stack = ExitStack()
        folder = options.pools
        if folder is None:
            made = TemporaryDirectory(prefix="lade-pools-", ignore_cleanup_errors=True)
            folder = Path(self._stack.enter_context(made))
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        tokenizer, model = loaded.tokenizer, loaded.model
        fingerprint = fingerprint_of_tokenizer(tokenizer)
        self.store = PoolStore(
            folder / fingerprint,
            options.pool_memory_bytes,
            options.pool_disk_bytes,
            options.save_every_sec if options.pools else float("inf"),
            tokenizer=fingerprint,
            model=fingerprint_of(model) or "",
        )
        self._secret = _secret_in(folder)
        self._layers: list[AnyPool] = [
            load_pool(path, tokenizer=tokenizer, model=model, read_only=True)
            for path in dict.fromkeys(path.resolve() for path in options.layers)
        ]

    def of(self, key: str, user: str | None, salt: str | None) -> tuple[Pools | None, str]:
        """Return the pools of a request, and the name that what is kept of it is found by.

        A request that says nothing of who asks has a pool of its own, which ends with it, and the
        name "": nothing is kept of it.
        """
        if not self._shares and not key and user is None and salt is None:
            return self._layers or None, ""
        name = SHARED if self._shares else self.name_of(key, user, salt)
        return [self.store.named(name), *self._layers], name

    def name_of(self, key: str, user: str | None, salt: str | None) -> str:
        """Return the name of a user's pool, which tells nothing of who it is."""
        who = json.dumps([key, user, salt]).encode()
        return hmac.new(self._secret, who, hashlib.sha256).hexdigest()

    def close(self) -> None:
        """Save all pools, or remove them if nobody asked to keep them."""
        with self._stack:
            self.store.close()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _secret_in(folder: Path) -> bytes:
    """Return the secret that names of pools are hashed with; made once for a folder."""
    path = folder / "secret"
    with FileLock(folder / "secret.lock", mode=0o600):
        if not path.exists():
            write_whole(path, secrets.token_bytes(_SECRET_BYTES))
        found = path.read_bytes()
    if len(found) != _SECRET_BYTES:
        raise OSError(f"expected {_SECRET_BYTES} bytes in {path}, got {len(found)}")
    return found
