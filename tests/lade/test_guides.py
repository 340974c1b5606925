"""The code that quickstart and guides show runs as it stands, on tiny models."""

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

import lade
from ngram_pool import PoolStore
from tests.lade.apps.server.serving import NAME, loaded_model, serving

DOCS = Path(__file__).parents[2] / "docs"
_MADE = re.compile(r"<!-- figures: (?:example|reference|command_line) .*?<!-- end -->", re.DOTALL)

_CALLING = (
    "{% for t in tools or [] %}<tool>{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<call>{{ c.function | tojson }}{% endfor %}{% endfor %}<assistant>"
)


def blocks_of(page: str, section: str | None = None) -> list[str]:
    """Return a page's code in Python, but for examples, which `test_examples.py` runs.

    Args:
        section: the heading whose code is wanted; None for all of the page.
    """
    text = _MADE.sub("", (DOCS / f"{page}.md").read_text())
    if section is not None:
        (text,) = [each for each in re.split("^#+ ", text, flags=re.M) if each.startswith(section)]
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def run(page: str, names: dict[str, Any], *sections: str) -> dict[str, Any]:
    """Run the code of a page, or that of some of its sections."""
    for section in sections or [None]:
        for block in blocks_of(page, section):
            exec(compile(block, page, "exec"), names)
    return names


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return what the guides take as given; what they load is tiny, and what they write is ours."""
    model, tokenizer, _ = loaded = loaded_model()
    tokenizer.pad_token_id = 0
    monkeypatch.setattr(
        transformers.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: loaded_model().model
    )
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: tokenizer)
    small = loaded_model(num_hidden_layers=1)
    monkeypatch.setattr(
        lade.models, "load", lambda name="", **_: small if "135M" in name else loaded
    )
    monkeypatch.chdir(tmp_path)
    ids = torch.tensor([[5, 6, 7, 5, 6]])
    return {
        "lade": lade,
        "model": model,
        "tokenizer": tokenizer,
        "inputs": {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
    }


@pytest.mark.usefixtures("names")
def test_quickstart(capsys: pytest.CaptureFixture[str]) -> None:
    made = run("quickstart", {})
    assert "tokens per forward pass" in capsys.readouterr().out
    assert isinstance(made["pool"], lade.NGramPool)


@pytest.mark.usefixtures("names")
@pytest.mark.parametrize("page", ["index", "../README"])
def test_front_page(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(page, {})
    assert len(capsys.readouterr().out) > 64


def test_a_chat(names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    run("guides/chat", names, "In your own program", "Reuse of the KV cache")
    assert capsys.readouterr().out.endswith(" tokens a second\n")


@pytest.mark.usefixtures("names")
def test_files_of_4_bits() -> None:
    assert run("guides/gguf", {})["model"].can_generate()


@pytest.mark.usefixtures("names")
def test_drafters() -> None:
    made = run("guides/drafters", {})
    assert {*made["output"].stats.sources} == {"pool", "assistant"}


def test_calls_of_tools(names: dict[str, Any]) -> None:
    names["tokenizer"].chat_template = _CALLING
    made = run("guides/grammars", {}, "Tool calls")
    assert made["output"].shape[1] == made["inputs"]["input_ids"].shape[1] + 256


def test_pools(names: dict[str, Any], tmp_path: Path) -> None:
    model, tokenizer = names["model"], names["tokenizer"]
    lade.save_pool(lade.NGramPool(), "work.pool", tokenizer=tokenizer, model=model)
    made = run("guides/pools", {}, "Use a pool", "Many pools: stores")
    assert (tmp_path / "mine.pool").exists()
    made["store"].close()
    with PoolStore("pools") as another, another.open("alice") as pool:
        assert len(pool) >= made["output"].shape[1]


def test_predicted_outputs(names: dict[str, Any]) -> None:
    in_process, _ = blocks_of("guides/grammars", "Predicted outputs")  # the other one asks a server
    exec(compile(in_process, "grammars", "exec"), names)
    assert names["output"].stats.sources["prediction"].num_asked > 0


def test_prewarming(
    names: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    prewarm = partial(lade.prewarm, folder=tmp_path)
    monkeypatch.setattr(lade, "prewarm", lambda model, seconds: prewarm(model, seconds / 600))
    run("guides/pools", names, "Prewarming")
    assert f"contexts in {tmp_path}" in capsys.readouterr().out


def test_rollouts(names: dict[str, Any]) -> None:
    plain = names["model"].generate(**names["inputs"], max_new_tokens=8)
    run("guides/batches", names | {"trainer": SimpleNamespace(model=names["model"])})
    assert torch.equal(names["model"].generate(**names["inputs"], max_new_tokens=8), plain)
    lade.unwrap(names["model"])


def test_streaming(names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    run("guides/sampling", names, "Callbacks")
    assert capsys.readouterr().out.startswith("0 [")


def test_clients(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import openai

    loaded = loaded_model(eos_token_id=93)  # a schema needs a token that ends an answer
    loaded.tokenizer.chat_template = _CALLING
    with serving(loaded, api_keys=["sk-mine"]) as server:
        made = partial(openai.OpenAI, max_retries=0)
        monkeypatch.setattr(
            openai, "OpenAI", lambda base_url, api_key: made(base_url=server.url, api_key=api_key)
        )
        names: dict[str, Any] = {}
        for block in blocks_of("guides/serving", "Ask it"):
            block = block.replace("smollm2-135m-instruct", NAME)
            exec(compile(block, "serving", "exec"), names)
        names["client"].close()
    assert " drafted\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("page", "section"), [("serving", "Corpora"), ("grammars", "Predicted outputs")]
)
def test_what_a_server_is_asked(
    page: str, section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import openai

    lade.NGramPool().save(tmp_path / "a.pool")
    with (
        serving(loaded_model(), corpora={"docs": tmp_path / "a.pool"}) as server,
        openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as client,
    ):
        monkeypatch.setattr(openai, "OpenAI", lambda **_: client)
        asking = blocks_of(f"guides/{page}", section)[-1]
        names = {"client": client, "text": "one two", "question": "one?"}
        exec(compile(asking.replace("smollm2-135m-instruct", NAME), page, "exec"), names)


@pytest.mark.usefixtures("names")
def test_weights_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = loaded_model().model.bfloat16().float()
    monkeypatch.setattr(
        transformers.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: stored
    )
    run("models", {})
    assert stored.lm_head.weight.dtype is torch.bfloat16
