"""Models that see images: after the prefill an answer is text, with positions of its own kinds.

Tiny models with random weights and random pixels; the image tokens are put by hand, so that no
processor is needed.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

import lade
from tests.grids import thinned
from tests.lade.both import EIGHT, same_as_generate
from tests.lade.tiny import COMMON, IS_NEWEST

IMAGE_TOKEN_ID = 90
_BEGIN, _END = 91, 92  # of an image
_TOKENS_PER_IMAGE = 4  # 8 x 8 pixels in patches of 4 x 4; of Qwen 16 x 16, merged by fours

_TEXT: dict[str, Any] = {**COMMON, "head_dim": 8, "tie_word_embeddings": False}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_CONFIGS: dict[str, dict[str, Any]] = {
    "llava": {
        "text_config": {"model_type": "llama", **_TEXT},
        "vision_config": {"model_type": "clip_vision_model", **_VISION},
        "image_token_index": IMAGE_TOKEN_ID,
        "vision_feature_layer": -1,
        "image_seq_length": _TOKENS_PER_IMAGE,
    },
    # `position_ids` [4, rows, num_tokens]: of the text, and of time, height and width in an image.
    "qwen2_vl": {
        "text_config": {**_TEXT, "rope_parameters": _MROPE},
        "image_token_id": IMAGE_TOKEN_ID,
        "video_token_id": 93,
        "vision_start_token_id": _BEGIN,
        "vision_end_token_id": _END,
        "vision_config": {
            "depth": 2,
            "embed_dim": 16,
            "hidden_size": 32,
            "num_heads": 2,
            "mlp_ratio": 2,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    },
    # The tokens of an image see each other in both directions; two layers have a window of 6.
    "gemma3": {
        "text_config": {
            **_TEXT,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        "vision_config": _VISION,
        "image_token_id": IMAGE_TOKEN_ID,
        "boi_token_id": _BEGIN,
        "eoi_token_id": _END,
        "mm_tokens_per_image": _TOKENS_PER_IMAGE,
        "tie_word_embeddings": False,
    },
    # The whole prompt sees itself in both directions, and positions start at 1.
    "paligemma": {
        "text_config": {"model_type": "gemma", **_TEXT},
        "vision_config": {"model_type": "siglip_vision_model", **_VISION},
        "image_token_id": IMAGE_TOKEN_ID,
        "projection_dim": 32,
        "tie_word_embeddings": False,
    },
    # Layers 1 and 3 attend to the images, whose keys the cache holds, and not to the text.
    "mllama": {
        "text_config": {**_TEXT, "num_hidden_layers": 4, "cross_attention_layers": [1, 3]},
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_global_layers": 1,
            "attention_heads": 2,
            "image_size": 8,
            "patch_size": 4,
            "max_num_tiles": 2,
            "intermediate_layers_indices": [0],
            "vision_output_dim": 32,
            "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
        },
        "image_token_index": IMAGE_TOKEN_ID,
    },
}
FAMILIES = [name for name in _CONFIGS if name != "mllama"]
QUICK = ("gemma3", "qwen2_vl")  # which attend to an image both ways, and count it in positions


def tiny_vlm(
    name: str, num_images: Sequence[int] = (1,), seed: int = 0, attention: str = "sdpa"
) -> tuple[Any, dict[str, Any]]:
    """Return a model in float64 and what its processor would make of a prompt.

    Args:
        name: one of `FAMILIES` or "mllama".
        num_images: in each row; rows with fewer are padded on the left.
        seed: of the weights and the pixels.
        attention: the attention implementation.
    """
    torch.manual_seed(seed)  # for what has one dimension, as the biases
    config = CONFIG_MAPPING[name](**_CONFIGS[name])
    model = AutoModelForImageTextToText.from_config(
        config, attn_implementation=attention, dtype=torch.float64
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight_name, weight in model.named_parameters():
            if weight.dim() >= 2:
                gain = 1.5 * weight[0].numel() ** -0.5
                noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
                weight.copy_(gain * noise)
            elif weight_name.endswith("gate"):  # of the layers that see images in mllama: 0 is shut
                weight.fill_(0.7)
    model.generation_config.pad_token_id = 0
    return model.eval(), _inputs(name, num_images, generator)


def _inputs(name: str, num_images: Sequence[int], generator: torch.Generator) -> dict[str, Any]:
    prompts = [_prompt(name, count) for count in num_images]
    length = max(map(len, prompts))
    ids = torch.tensor([[0] * (length - len(prompt)) + prompt for prompt in prompts])
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    is_image = ids == IMAGE_TOKEN_ID
    total = sum(num_images)

    def pixels(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    if name.startswith("qwen"):
        inputs["pixel_values"] = pixels(total * 16, 3 * 2 * 4 * 4)
        inputs["image_grid_thw"] = torch.tensor([[1, 4, 4]] * total)
        inputs["mm_token_type_ids"] = is_image.int()
    elif name == "mllama":
        rows, most, tiles = len(num_images), max(num_images), 2
        inputs["pixel_values"] = pixels(rows, most, tiles, 3, 8, 8)
        inputs["aspect_ratio_ids"] = torch.full((rows, most), 2)
        inputs["aspect_ratio_mask"] = torch.ones((rows, most, tiles), dtype=torch.int64)
        # A token sees the images before it; one that is missing in a row is seen by none.
        seen = is_image.cumsum(dim=1)[:, :, None] > torch.arange(most)
        inputs["cross_attention_mask"] = seen[..., None].expand(-1, -1, -1, tiles).long()
    else:
        inputs["pixel_values"] = pixels(total, 3, 8, 8)
    if name in ("gemma3", "paligemma"):
        inputs["token_type_ids"] = (is_image & (name == "gemma3")).long()
    return inputs


def _prompt(name: str, num_images: int) -> list[int]:
    if name == "paligemma":
        return [*[IMAGE_TOKEN_ID] * _TOKENS_PER_IMAGE * num_images, 5, 6, 7, 5, 6]
    image = [_BEGIN, *[IMAGE_TOKEN_ID] * _TOKENS_PER_IMAGE, _END]
    if name == "mllama":
        image = [IMAGE_TOKEN_ID]
    return [5, 6, 7, *[*image, 8, 9] * num_images, 5, 6, 7, 5, 6]


def compare(model: Any, inputs: dict[str, Any], **options: Any) -> None:
    """Compare lade with plain `generate`, random state included, and see that drafts helped."""
    options = {"accept": 0.7, "config": EIGHT, "do_sample": True, **options}
    is_batch = len(inputs["input_ids"]) > 1  # which is plain
    _, got = same_as_generate(model, **inputs, may_fail=is_batch, **options)
    assert (got.stats.mean_accepted_tokens > 1.2) != is_batch


@pytest.mark.filterwarnings("ignore:lade falls back:lade.PlainDecodingWarning")  # batches
@pytest.mark.parametrize("name", thinned(FAMILIES, *QUICK))
@pytest.mark.parametrize("num_images", thinned([(1,), (2,), (2, 1)], (2,)))
def test_an_answer_to_images_is_the_plain_one(name: str, num_images: tuple[int, ...]) -> None:
    model, inputs = tiny_vlm(name, num_images)
    compare(model, inputs, do_sample=False, eos_token_id=None)
    compare(model, inputs, temperature=0.7, top_k=20, repetition_penalty=1.2, seed=3)


@pytest.mark.parametrize("name", thinned(FAMILIES, "gemma3"))
def test_another_image_in_the_same_text_has_its_own_answer(name: str) -> None:
    """The pool sees tokens and no pixels: it drafts the answer to the first image."""
    model, inputs = tiny_vlm(name)
    others = {**inputs, "pixel_values": inputs["pixel_values"].flip(-1)}
    options: dict[str, Any] = {"pool": lade.NGramPool(), "config": EIGHT, "eos_token_id": None}
    answers = set()
    for images in (inputs, others, inputs):
        _, got = same_as_generate(model, **images, **options)
        answers.add(tuple(got.sequences[0].tolist()))
    assert len(answers) == 2
    assert got.stats.mean_accepted_tokens > 1.2  # the third answer is the first one


@pytest.mark.filterwarnings("ignore")  # lade's, and one of transformers 5.15 about itself
@pytest.mark.parametrize(("num_images", "do_sample"), [((1,), True), ((2,), False), ((2, 1), True)])
def test_layers_that_attend_to_images_alone_change_no_answer(
    num_images: tuple[int, ...], do_sample: bool
) -> None:
    """Mllama may be sped up, or fall back to plain decoding with a warning."""
    model, inputs = tiny_vlm("mllama", num_images)
    same_as_generate(model, **inputs, config=EIGHT, do_sample=do_sample, eos_token_id=None)


@pytest.mark.parametrize("name", thinned(FAMILIES, "qwen2_vl"))
def test_images_and_texts_beside_each_other_have_their_own_answers(name: str) -> None:
    """Some models keep in their modules how positions were counted; calls run in turns."""
    model, _ = tiny_vlm(name)
    calls = [tiny_vlm(name, (count,), seed)[1] for seed, count in enumerate((1, 2, 1))]
    generator = torch.Generator().manual_seed(1)
    calls += [{"input_ids": torch.tensor([[5, 6, 7, 5, 6, 7, 5]])}] * 2
    calls += [{"input_ids": torch.randint(2, 90, (1, 300), generator=generator)}]
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": None}
    expected = [model.generate(**call, **options).tolist() for call in calls]
    with warnings.catch_warnings(), lade.Batcher(model, config=EIGHT) as batcher:
        if not IS_NEWEST:  # Qwen2-VL keeps positions in its modules there, and falls back
            warnings.simplefilter("ignore", lade.VerificationWarning)
        requests = [batcher.submit(**call, **options) for call in calls * 2]
        assert [request.result().tolist() for request in requests] == expected * 2
    assert [model.generate(**call, **options).tolist() for call in calls] == expected
