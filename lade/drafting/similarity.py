"""Codes of tokens, by which a pool finds tokens that are used alike: words of other case, say.

Cosines of input embeddings tell it. A random projection keeps them to about a tenth.

Source: Achlioptas, "Database-friendly random projections" (PODS 2001).
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lade.compat import Model, unwrapped
from lade.compat.attempts import Attempt
from ngram_pool._kernels import CODE_SIZE

_CHUNK = 2**12  # tokens at once
# Of more numbers, a part tells as much: 128,000 tokens of 4,096 numbers took 4.3 s of a core, and
# a quarter of them, as here, 1.2.
_ENOUGH = 1024
_MODULES = ("torch.", "transformers.", "lade.")  # whose look-ups leave no trace


@torch.no_grad()
def token_codes(model: Model) -> NDArray[np.int8] | None:
    """Return a code for each token, int8 [vocab_size, CODE_SIZE], for `NGramPool.open_sequence`.

    Returns:
        None if the embeddings are not in memory, or a class that is not known looks them up.
    """
    embedding: Any = unwrapped(model).get_input_embeddings()
    weight: Any = getattr(embedding, "weight", None)
    kind = type(embedding)
    is_known = kind.__module__.startswith(_MODULES) and "forward" not in vars(embedding)
    if not is_known or type(getattr(weight, "data", None)) is not Tensor or weight.is_meta:
        return None
    num, device = len(weight), weight.device

    def states_of(ids: Tensor) -> Tensor:
        states: Tensor = kind.forward(embedding, ids)
        return states[:, :: states.shape[1] // _ENOUGH or 1].float()

    with Attempt():
        mean = states_of(torch.arange(0, num, num // _CHUNK + 1, device=device)).mean(0)
        noise = torch.Generator().manual_seed(0)
        signs = torch.randint(0, 2, (len(mean), CODE_SIZE), generator=noise, device="cpu")
        projection = (2.0 * signs - 1.0).to(device, torch.float32)
        codes = np.empty((num, CODE_SIZE), np.int8)
        for start in range(0, num, _CHUNK):
            ids = torch.arange(start, min(num, start + _CHUNK), device=device)
            states = (states_of(ids) - mean) @ projection
            states *= 127.0 / states.norm(dim=1, keepdim=True).clamp_min(1e-9)
            codes[start : start + _CHUNK] = states.round().to(torch.int8).cpu().numpy()
        return codes
    return None
