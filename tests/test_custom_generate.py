"""`examples/custom_generate` is a decoding method that transformers loads from a folder."""

import importlib.util
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, StoppingCriteriaList, TextStreamer, pipeline

import lade
from tests.lade.tiny import byte_tokenizer, tiny_model

FOLDER = Path(__file__).parents[1] / "examples" / "custom_generate"
PROMPT = torch.tensor([[40, 41, 42, 40, 41]])
BY_NAME = {"custom_generate": str(FOLDER), "trust_remote_code": True}

pytestmark = pytest.mark.usefixtures("own_remote_code")


def tiny() -> Any:
    return tiny_model(vocab_size=94, eos_token_id=None)  # the printable characters of ASCII


class Recorder:
    def __init__(self) -> None:
        self.put_ids: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.put_ids += value.flatten().tolist()

    def end(self) -> None:
        self.put_ids.append(-1)


def test_text_is_that_of_plain_generate_and_streamer_and_stop_strings_arrive() -> None:
    model, tokenizer = tiny(), byte_tokenizer()
    mask = {"attention_mask": torch.ones_like(PROMPT), "streamer": None, "stop_strings": None}
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 30}
    for given in ({"inputs": PROMPT}, {"input_ids": PROMPT}, {"input_ids": PROMPT, **mask}):
        plain = model.generate(**given, **options)
        assert model.generate(**given, **options, **BY_NAME).equal(plain)
    stop, streamer = tokenizer.decode(plain[0, 12:14]), Recorder()
    options |= {"streamer": streamer, "stop_strings": [stop], "tokenizer": tokenizer}
    stopped = model.generate(PROMPT, **options)
    assert stopped.shape[1] <= 14
    assert model.generate(PROMPT, **options, **BY_NAME).equal(stopped)
    assert streamer.put_ids == 2 * [*stopped[0].tolist(), -1]  # once from each of the two


def test_arguments_of_lade_arrive() -> None:
    pool = lade.NGramPool()
    output = tiny().generate(
        PROMPT,
        pool=pool,
        config=lade.Config(max_draft_tokens=0),
        do_sample=False,
        max_new_tokens=10,
        return_dict_in_generate=True,
        **BY_NAME,
    )
    assert len(pool) >= 14
    assert output.stats.mean_accepted_tokens == 1  # nothing was drafted


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="trust_remote_code"):
        tiny().generate(PROMPT, custom_generate=str(FOLDER), trust_remote_code=False)
    monkeypatch.setitem(sys.modules, "lade", None)
    path = FOLDER / "custom_generate" / "generate.py"
    spec = importlib.util.spec_from_file_location("generate_without_lade", path)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ImportError, match="pip install lade-decoding"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_a_model_folder_can_bring_lade_along(tmp_path: Path) -> None:
    folder, tokenizer = tmp_path / "tiny", byte_tokenizer()
    tiny().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    shutil.copytree(FOLDER / "custom_generate", folder / "custom_generate")
    plain = AutoModelForCausalLM.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 20}
    expected = plain.generate(PROMPT, **options)
    assert model.generate(PROMPT, None, None, StoppingCriteriaList(), **options).equal(expected)
    assert model.generate(input_ids=PROMPT, **options).equal(expected)
    assert hasattr(model, "_lade_profiles")  # lade has measured it
    assert not hasattr(plain, "_lade_profiles")
    write = pipeline("text-generation", model=str(folder), trust_remote_code=True)
    (said,) = write("hello", streamer=TextStreamer(tokenizer), **options)
    inputs = tokenizer("hello", return_tensors="pt")
    assert said["generated_text"] == tokenizer.decode(plain.generate(**inputs, **options)[0])
    assert hasattr(write.model, "_lade_profiles")
