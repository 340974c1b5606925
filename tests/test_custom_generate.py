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
VOCAB_SIZE = 94  # the printable characters of ASCII
PROMPT = torch.tensor([[40, 41, 42, 40, 41]])


pytestmark = pytest.mark.usefixtures("own_remote_code")


def both(model: Any, *args: Any, **options: Any) -> tuple[Any, Any]:
    """Return what the model generates by itself and through the folder."""
    options = {"do_sample": False, "max_new_tokens": 30, **options}
    plain = model.generate(*args, **options)
    by_name = {"custom_generate": str(FOLDER), "trust_remote_code": True}
    return plain, model.generate(*args, **options, **by_name)


class Recorder:
    def __init__(self) -> None:
        self.put_ids: list[int] = []
        self.num_ends = 0

    def put(self, value: torch.Tensor) -> None:
        self.put_ids += value.flatten().tolist()

    def end(self) -> None:
        self.num_ends += 1


def tiny() -> Any:
    return tiny_model(vocab_size=VOCAB_SIZE, eos_token_id=None)


def test_text_is_that_of_plain_generate_however_the_prompt_is_given() -> None:
    model = tiny()
    for plain, ours in (
        both(model, PROMPT),
        both(model, inputs=PROMPT),
        both(model, input_ids=PROMPT),
    ):
        assert ours.equal(plain)
    mask = torch.ones_like(PROMPT)
    plain, ours = both(
        model, input_ids=PROMPT, attention_mask=mask, streamer=None, stop_strings=None
    )
    assert ours.equal(plain)


def test_streamer_and_stop_strings_arrive() -> None:
    model, tokenizer = tiny(), byte_tokenizer()
    (text,) = model.generate(PROMPT, do_sample=False, max_new_tokens=30).tolist()
    stop = tokenizer.decode(text[12:14])
    streamer = Recorder()
    plain, ours = both(model, PROMPT, streamer=streamer, stop_strings=[stop], tokenizer=tokenizer)
    assert ours.equal(plain)
    assert ours.shape[1] <= 14
    assert streamer.put_ids == 2 * ours[0].tolist()  # once from each of the two
    assert streamer.num_ends == 2


def test_arguments_of_lade_arrive() -> None:
    pool = lade.NGramPool()
    steps: list[Any] = []
    output = tiny().generate(
        PROMPT,
        custom_generate=str(FOLDER),
        trust_remote_code=True,
        pool=pool,
        config=lade.Config(max_draft_tokens=0),
        on_step=steps.append,
        do_sample=False,
        max_new_tokens=10,
        return_dict_in_generate=True,
    )
    assert len(pool) >= 14
    assert len(steps) == 10  # nothing was drafted
    assert output.stats.mean_accepted_tokens == 1


def test_code_is_not_run_without_trust() -> None:
    with pytest.raises(ValueError, match="trust_remote_code"):
        tiny().generate(PROMPT, custom_generate=str(FOLDER), trust_remote_code=False)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lade", None)
    path = FOLDER / "custom_generate" / "generate.py"
    spec = importlib.util.spec_from_file_location("generate_without_lade", path)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ImportError, match="pip install lade-decoding"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_a_model_folder_can_bring_lade_along(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    tiny().save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    shutil.copytree(FOLDER / "custom_generate", folder / "custom_generate")
    plain = AutoModelForCausalLM.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 20}
    expected = plain.generate(PROMPT, **options)
    assert model.generate(PROMPT, **options).equal(expected)  # by place
    assert model.generate(input_ids=PROMPT, **options).equal(expected)
    assert model.generate(PROMPT, None, None, StoppingCriteriaList(), **options).equal(expected)
    assert hasattr(model, "_lade_profiles")  # lade has measured it
    assert not hasattr(plain, "_lade_profiles")

    write = pipeline("text-generation", model=str(folder), trust_remote_code=True)
    (said,) = write("hello", streamer=TextStreamer(tokenizer), **options)
    inputs = tokenizer("hello", return_tensors="pt")
    assert said["generated_text"] == tokenizer.decode(plain.generate(**inputs, **options)[0])
    assert hasattr(write.model, "_lade_profiles")
