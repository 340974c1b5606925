"""Pools of users: their names, the folder that keeps them, corpora by name."""

import hashlib
import json
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from lade.apps.server.access import KeyOwner
from lade.apps.server.errors import ApiError
from lade.apps.server.options import ServerOptions
from lade.apps.server.requests import Asked
from lade.hf.pool_files import fingerprint_of_tokenizer, load_pool
from lade.hf.pools import AnyPool, Pools
from lade.models.loading import LoadedModel
from lade.prewarming.fingerprint import fingerprint_of
from ngram_pool import PoolStore


class UserPools:
    """A pool for each user, layers for all requests, and corpora that requests choose.

    Pools of another tokenizer have a folder of their own.

    Raises:
        OSError, ngram_pool.PoolFileError: a folder or a layer cannot be used.
    """

    def __init__(self, loaded: LoadedModel, options: ServerOptions) -> None:
        self._shares, self._is_for_one = options.shares_pool, options.is_for_one
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

        def read(path: Path) -> AnyPool:
            return load_pool(path, tokenizer=tokenizer, model=model, read_only=True)

        self._layers = [*map(read, dict.fromkeys(path.resolve() for path in options.layers))]
        self._corpora = {name: read(path) for name, path in options.corpora.items()}

    def of(self, owner: KeyOwner, asked: Asked) -> tuple[Pools | None, str]:
        """Return the pools of a request, and the name of its user's pool and kept prefixes.

        The name is "", and the pool ends with the request, if the request names no user on a server
        of several users, or if its key is `alone`.

        Raises:
            ApiError: a corpus does not exist, or the key may not use it.
        """
        chosen = [*dict.fromkeys(asked.pools or ())]
        for name in chosen:
            is_allowed = owner.corpora is None or name in owner.corpora
            if not is_allowed or name not in self._corpora:  # the error does not say which
                message = f"expected pools that this key may draft from, got {name!r}"
                raise ApiError(404, message, param="pools", code="pool_not_found")
        layers = [*map(self._corpora.__getitem__, chosen), *self._layers]
        key, user, salt = owner.key, asked.user, asked.cache_salt
        knows_who = self._shares or self._is_for_one or key
        is_nobody = not knows_who and user is None and salt is None
        if is_nobody or owner.is_alone:
            return layers or None, ""
        who = json.dumps([key, user, salt]).encode()
        name = "shared" if self._shares else hashlib.sha256(who).hexdigest()  # hides who it is
        return [self.store.named(name), *layers], name

    def close(self) -> None:
        """Save all pools, or remove them if they are in a temporary folder."""
        with self._stack:
            self.store.close()
