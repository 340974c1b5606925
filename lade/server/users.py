"""Whose pool is drafted from: names of pools, the folder that keeps them, corpora."""

import hashlib
import hmac
import json
import secrets
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from filelock import FileLock

from lade.hf.pools import AnyPool, Pools
from lade.models.loading import LoadedModel
from lade.pools import fingerprint_of_tokenizer, load_pool
from lade.prewarming.fingerprint import fingerprint_of
from lade.server.corpora import Corpora
from lade.server.exchange import Asked
from lade.server.keys import KeyOwner
from lade.server.options import ServerOptions
from ngram_pool import PoolStore
from ngram_pool.writing import write_whole

SHARED = "shared"
_SECRET_BYTES = 32


class UserPools:
    """A pool for each user, the layers that all draft from, and those that requests choose.

    Args:
        loaded: the model; pools of other tokenizers are kept apart from its own.
        options: of the server.

    Raises:
        OSError, ngram_pool.PoolFileError: a folder or a layer cannot be used.
        ValueError: a corpus has no proper name.
    """

    def __init__(self, loaded: LoadedModel, options: ServerOptions) -> None:
        self.corpora = Corpora(loaded.tokenizer, options.corpora, options.corpora_bytes)
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

    def of(self, owner: KeyOwner, asked: Asked) -> tuple[Pools | None, str]:
        """Return the pools of a request, and the name that what is kept of it is found by.

        A request that says nothing of who asks, and one of a key that is alone, has a pool of its
        own, which ends with it, and the name "": nothing is kept of it.

        Raises:
            ApiError: it names a corpus that it may not draft from, or that there is not.
        """
        layers = [*self.corpora.of(asked.pools or (), owner), *self._layers]
        key, user, salt = owner.key, asked.user, asked.salt
        is_nobody = not self._shares and not key and user is None and salt is None
        if is_nobody or owner.is_alone:
            return layers or None, ""
        name = SHARED if self._shares else self.name_of(key, user, salt)
        return [self.store.named(name), *layers], name

    def name_of(self, key: str, user: str | None, salt: str | None) -> str:
        """Return the name of a user's pool, which tells nothing of who it is."""
        who = json.dumps([key, user, salt]).encode()
        return hmac.new(self._secret, who, hashlib.sha256).hexdigest()

    def close(self) -> None:
        """Save all pools, or remove them if nobody asked to keep them."""
        with self._stack:
            self.store.close()


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
