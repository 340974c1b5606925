"""Weights in the blocks of a GGUF file, as parameters that refuse to be changed."""

from typing import Any

from torch import Tensor, nn

from lade.errors import UserError


def refuse(*args: Any, **kwargs: Any) -> Any:
    """Raise what code gets that would save or change weights in blocks."""
    raise UserError(
        "the weights of this model are blocks in a GGUF file, which can be neither saved, resized "
        "nor merged with adapters; load it with a dtype, such as float32, for that"
    )


class Blocks(nn.Parameter):
    """A weight in blocks. What merges adapters asks for its `data`, which raises."""

    data = property(refuse, Tensor.data.__set__)  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[int, Any]) -> "Blocks":
        return memo.setdefault(id(self), Blocks(self.detach().clone(), self.requires_grad))  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Blocks, (self.detach(), self.requires_grad)
