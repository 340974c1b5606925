"""Agreement on drafts: processes that run one model together must verify the same ones."""

from collections.abc import Mapping
from typing import Any

import torch.distributed

from lade.compat import Model, mesh_of
from ngram_pool import Draft


class Ranks:
    """The processes of a tensor-parallel model, which all use the first one's drafts.

    Pools may differ between processes, and measured costs always do.
    """

    def __init__(self, mesh: Any) -> None:
        is_named = "tp" in (mesh.mesh_dim_names or ())
        self._group = (mesh["tp"] if is_named else mesh).get_group()
        self._first = torch.distributed.get_global_rank(self._group, 0)

    @classmethod
    def of(cls, model: Model) -> "Ranks | None":
        """Return the processes that share a model; None if this one runs it alone."""
        mesh = mesh_of(model)
        return None if mesh is None else cls(mesh)

    def agree(self, drafts: Mapping[int, Draft]) -> dict[int, Draft]:
        """Return the first process's drafts by row; every process must call this at every step."""
        agreed = [dict(drafts)]
        torch.distributed.broadcast_object_list(agreed, src=self._first, group=self._group)
        return agreed[0]
