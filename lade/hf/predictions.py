"""What an answer will probably be, as the argument `prediction`: text, or ids of tokens."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from lade.drafting.drafter import Drafter

Predicted = str | Sequence[int] | Tensor


def predicted_ids(prediction: Predicted, tokenizer: Any = None) -> tuple[int, ...]:
    """Return the ids of an argument `prediction`.

    Args:
        prediction: text, or ids [num_tokens].
        tokenizer: of text; None if there is none.

    Raises:
        TypeError: it is neither, or ids are not integers.
        ValueError: it is text, and there is no tokenizer; ids are not [num_tokens], or no ids.
    """
    if isinstance(prediction, str):
        if tokenizer is None:
            raise ValueError(
                "expected tokenizer= beside a prediction of text, got none; inside of "
                "custom_generate=lade.decode, which transformers gives none, pass token ids"
            )
        encoded = tokenizer(prediction, add_special_tokens=False)["input_ids"]
        return tuple(map(int, encoded))
    if isinstance(prediction, Tensor):
        prediction = prediction.tolist()
    if not isinstance(prediction, Sequence | np.ndarray) or isinstance(prediction, bytes):
        raise TypeError(f"expected prediction to be text or token ids, got {prediction!r}")
    ids = np.asarray(prediction)
    if ids.ndim != 1:
        raise ValueError(
            f"expected a prediction of token ids [num_tokens], the same for all rows, got the "
            f"shape {list(ids.shape)}"
        )
    if len(ids) and ids.dtype.kind not in "iu":
        raise TypeError(f"expected token ids as the prediction, got values of {ids.dtype}")
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) <= np.iinfo(np.int32).max:
        raise ValueError("expected a prediction of token ids from 0 to 2**31 - 1")
    return tuple(ids.tolist())


def beside_prediction(drafter: Drafter | None, prediction: Predicted) -> Drafter:
    """Return what drafts by a prediction and by what a call drafts by otherwise."""
    from lade.drafters.merged import CallPool, Merged
    from lade.drafters.prediction import Prediction

    return Merged(
        [CallPool() if drafter is None else drafter, Prediction(predicted_ids(prediction))]
    )
