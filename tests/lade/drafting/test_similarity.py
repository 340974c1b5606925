"""Codes of tokens: their cosines are those of the input embeddings."""

import numpy as np
import torch

import lade
from lade.drafting.similarity import token_codes
from ngram_pool._kernels import UNIT_PRODUCT
from tests.lade.tiny import tiny_model


def test_cosines_of_codes_are_those_of_embeddings_less_their_mean() -> None:
    model = tiny_model("llama")
    weight = torch.randn(model.get_input_embeddings().weight.shape)
    weight[5] = weight[3] + 0.3 * weight[5]
    model.get_input_embeddings().weight.data = weight
    codes = token_codes(model)
    assert codes is not None
    products = codes.astype(np.int64) @ codes.T / UNIT_PRODUCT
    apart = weight - weight.mean(0)
    apart /= apart.norm(dim=1, keepdim=True)
    expected = (apart @ apart.T).numpy()
    assert products[3, 5] > 0.85
    assert np.abs(products - expected).std() < 0.12
    for same in (model.to(torch.bfloat16), lade.models.pack(model)):
        found = token_codes(same)
        assert found is not None
        assert np.abs(found.astype(int) - codes).max() <= 2


def test_embeddings_that_cannot_be_read_give_no_codes() -> None:
    class Own(torch.nn.Embedding):
        """Of the user's."""

    model = tiny_model("llama")
    weight = model.get_input_embeddings().weight
    model.set_input_embeddings(Own(*weight.shape))
    assert token_codes(model) is None
    assert token_codes(tiny_model("llama").to("meta")) is None
