"""Models whose weights are spread: over devices and the disk, or brought in layer by layer.

Without a second device this is accelerate's offloading: a layer's weights come from the disk or the
host for each forward and are `meta` in between, so that `model.device` may be no device at all.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from transformers import AutoModelForCausalLM

from tests.grids import thinned
from tests.lade.both import THREE, both
from tests.lade.tiny import tiny_model

# transformers 5.15 warns that the prompt is not on `meta`.
pytestmark = pytest.mark.filterwarnings("ignore:You are calling .generate:UserWarning")

PARTS = [
    "model.embed_tokens",
    "model.layers.0",
    "model.layers.1",
    "model.layers.2",
    "model.norm",
    "model.rotary_emb",
    "lm_head",
]
ON_DISK = [["model.layers.1"], ["model.embed_tokens", "model.layers.0"], PARTS[:-1]]


def on_disk(parts: list[str], folder: Path) -> Any:
    """Load a tiny model, with some parts on the disk and the others on the CPU."""
    tiny_model("llama").save_pretrained(folder / "model")
    device_map = {part: "disk" if part in parts else "cpu" for part in PARTS}
    model = AutoModelForCausalLM.from_pretrained(
        folder / "model",
        dtype=torch.float64,
        device_map=device_map,
        offload_folder=folder / "offload",
    )
    assert model.hf_device_map == device_map
    return model


def compare(model: Any) -> None:
    """Compare one row, greedy, and a padded batch, sampled, with plain `generate`."""
    expected, got = both(model, THREE[:1, 2:], do_sample=False, eos_token_id=None)
    assert got.sequences.device == expected.sequences.device
    assert got.stats.mean_accepted_tokens > 1.2
    both(model, THREE, eos_token_id=None)


@pytest.mark.parametrize("parts", thinned(ON_DISK, ON_DISK[0]))
def test_a_model_with_layers_on_the_disk_answers_as_plainly(
    parts: list[str], tmp_path: Path
) -> None:
    compare(on_disk(parts, tmp_path))


@pytest.mark.parametrize("place", thinned(["cpu", "disk"], "cpu"))
def test_a_model_offloaded_as_a_whole_answers_as_plainly(place: str, tmp_path: Path) -> None:
    """No weight has a device between forwards, and there is no `hf_device_map` to tell."""
    model = tiny_model("llama")
    cpu = torch.device("cpu")
    if place == "cpu":
        model = cpu_offload(model, execution_device=cpu)
    else:
        model = disk_offload(model, str(tmp_path), execution_device=cpu)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    compare(model)
