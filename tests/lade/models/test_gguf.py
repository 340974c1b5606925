"""GGUF files as they are: the numbers and texts of the same model made whole, and nothing else."""

import struct
from contextlib import suppress
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma4Config

import lade
from lade.errors import UserError
from lade.models import gguf as file
from lade.models import load
from lade.models.gguf_tokenizer import load_gguf_tokenizer
from tests.grids import thinned
from tests.lade.models.gguf_files import ARCHITECTURES, write
from tests.lade.tiny import byte_tokenizer

TEXT = torch.tensor([[5, 6, 7, 8, 9, 10] * 5 + [5, 6, 7]])
GIVEN: dict[str, Any] = {
    "attention_mask": torch.ones_like(TEXT),
    "do_sample": False,
    "max_new_tokens": 24,
    "pad_token_id": 0,
}


@pytest.mark.parametrize("family", thinned(ARCHITECTURES, "llama", "gemma4_text", "gpt_neox"))
def test_texts_are_those_of_the_model_made_whole(family: str, tmp_path: Path) -> None:
    whole = write(tmp_path, family, "Q8_0", "Q4_1")
    model = file.load_gguf(tmp_path / "model.gguf")
    with torch.no_grad():
        assert torch.allclose(model(TEXT).logits, whole(TEXT).logits, atol=1e-4)
    expected: Tensor = whole.generate(TEXT, **GIVEN)
    assert torch.equal(model.generate(TEXT, **GIVEN), expected)
    assert torch.equal(lade.generate(model, TEXT, **GIVEN), expected)
    again = file.load_gguf(tmp_path / "model.gguf", dtype=torch.float32)
    for name, each in again.named_parameters():
        assert torch.equal(each, whole.get_parameter(name)), name


def rope(kind: str = "default", **entries: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 3e4, **entries}


SMALL = dict[str, Any](hidden_size=64, intermediate_size=64, num_attention_heads=2, head_dim=64)
SMALL |= {"query_pre_attn_scalar": 64, "sliding_window": 16, "layer_types": None}
LLAMA3 = partial(rope, "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LONG = {
    "short_factor": [1.0 + i / 10 for i in range(32)],
    "long_factor": [1.0 + i for i in range(32)],
}
CONTEXT = {"original_max_position_embeddings": 512}
YARN = partial(rope, "yarn", factor=4.0, **CONTEXT)
BETAS = {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.25}
LAYERS = {"full_attention": rope("linear", factor=8.0), "sliding_attention": rope(rope_theta=1e4)}
MULTIPLIERS = {"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "logits_scaling": 2.0}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}
#: Of configs, what a file alone tells in keys or tensors of its own.
TOLD: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 3": ("llama", {"rope_parameters": LLAMA3(original_max_position_embeddings=8192)}),
    "other factors": ("arcee", {"rope_parameters": LLAMA3(**CONTEXT)}),
    "linear": ("llama", {"rope_parameters": rope("linear", factor=4.0)}),
    "yarn": ("qwen2", {"rope_parameters": YARN()}),
    "all of yarn": ("qwen3", {"rope_parameters": YARN(**BETAS)}),
    "long": ("phi3", {"rope_parameters": rope("longrope", **LONG, **CONTEXT), **CONTEXT}),
    "part": ("phi3", {"rope_parameters": rope(partial_rotary_factor=0.75)}),
    "whole": ("nemotron", {"rope_parameters": rope(partial_rotary_factor=1.0)}),
    "small part": ("stablelm", {"rope_parameters": rope(partial_rotary_factor=0.5)}),
    "theta": ("starcoder2", {"rope_parameters": rope()}),
    "window": ("phi3", {"sliding_window": 16}),
    "heads": ("llama", {"head_dim": 128}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "clipped": ("olmo", {"clip_qkv": 0.5}),
    "in turn": ("gpt_neox", {"use_parallel_residual": False}),
    "multipliers": ("granite", {"residual_multiplier": 0.5, **MULTIPLIERS}),
    "caps": ("gemma2", {**SMALL, **CAPS, "num_hidden_layers": 26}),
    "Gemma 2": ("gemma2", {**SMALL, "query_pre_attn_scalar": 32, "num_hidden_layers": 46}),
    "Gemma 3": ("gemma3_text", {**SMALL, "rope_parameters": LAYERS, "num_hidden_layers": 34}),
    "SmolLM3": ("smollm3", {**SMALL, "num_hidden_layers": 36}),
}


@pytest.mark.parametrize("name", thinned(TOLD, "Llama 3", "yarn", "multipliers"))
def test_a_file_alone_is_the_model_that_it_was_made_of(name: str, tmp_path: Path) -> None:
    family, options = TOLD[name]
    whole = write(tmp_path, family, max_position_embeddings=2048, **options)
    text = torch.randint(3, 250, (1, 1500), generator=torch.Generator().manual_seed(1))
    for is_alone in (True, False):
        (tmp_path / "config.json").unlink(missing_ok=True)
        if not is_alone:
            whole.config.save_pretrained(tmp_path)
        model = file.load_gguf(tmp_path / "model.gguf")
        for num in (60, 1500):
            with torch.no_grad():
                got, expected = model(text[:, :num]).logits, whole(text[:, :num]).logits
            assert torch.allclose(got, expected, atol=1e-3 * float(expected.std())), num


@pytest.mark.parametrize(
    ("family", "keys", "said"),
    [
        ("llama", {"llama.swin_norm": True}, "'swin_norm', which is not read; put config"),
        ("llama", {"clip.has_vision_encoder": True}, "has 'clip.has_vision_encoder'"),
        ("glm4", {"glm4.rope.dimension_sections": [1]}, "has 'glm4.rope.dimension_sections'"),
        ("granite", {"granite.rope.scaling.finetuned": False}, "expected True as 'rope.scaling"),
        (
            "llama",
            {"tokenizer.ggml.eot_token_id": 260},
            "has 260 as 'tokenizer.ggml.eot_token_id', a",
        ),
        (
            "qwen2",
            {"qwen2.attention.layer_norm_rms_epsilon": None},
            "not tell qwen2.attention.layer",
        ),
        ("granite", {"granite.residual_scale": None}, "does not tell granite.residual_scale"),
        ("phi3", {"phi3.attention.sliding_window": None}, "tell phi3.attention.sliding_window"),
        ("gpt_neox", {"gptneox.attention.head_count_kv": 2}, "_heads=2, and no GPTNeoXConfig has"),
        ("llama", {"llama.attention.value_length": 32}, "has 64 and 32 as 'attention.value_l"),
        ("llama", {"llama.rope.dimension_count": 32}, "expected 32 turned numbers of a head"),
        ("llama", {"llama.rope.scaling.type": "su"}, "scales angles as 'su', with keys or"),
        ("llama", {"rope_factors_long.weight": np.ones(32, np.float32)}, "as 'none', with"),
        ("qwen2", {"rope_freqs.weight": np.ones(16, np.float32)}, "as 'none', with keys or tens"),
        ("olmo2", {"olmo2.attention.sliding_window": 8}, "'attention.sliding_window', which"),
        ("llama", {"tokenizer.ggml.precompiled_charsmap": [1]}, "'tokenizer.ggml.precompiled_char"),
        ("llama", {"tokenizer.ggml.add_space_prefix": True}, "'tokenizer.ggml.add_space_prefix'"),
        ("llama", {"tokenizer.ggml.tokens": None}, "no tokenizer in"),
        (
            "llama",
            {"tokenizer.ggml.tokens": ["a"] * 260},
            "has a token twice; put a tokenizer besi",
        ),
        ("llama", {"tokenizer.ggml.pre": "viking"}, "has 'viking' as 'tokenizer.ggml.pre', which"),
        ("llama", {"tokenizer.ggml.pre": None}, "has None as 'tokenizer.ggml.pre', which"),
        ("llama", {"split.count": 2}, "join the parts with llama-gguf-split --merge"),
        ("mixtral", {"llama.expert_used_count": 9}, "expected 1 to 4 experts of a token"),
        ("gemma4_text", {}, "does not tell all of the config of gemma4"),
    ],
)
def test_what_is_not_read_is_named(
    family: str, keys: dict[str, Any], said: str, tmp_path: Path
) -> None:
    write(tmp_path, family, keys=keys)
    (tmp_path / "config.json").unlink(missing_ok=True)
    with pytest.raises(UserError) as caught:
        load(str(tmp_path / "model.gguf"))
    assert said in str(caught.value)


def test_keys_that_change_no_text_are_not_in_the_way(tmp_path: Path) -> None:
    names = ("general.x", "quantize.imatrix.file", "someone.said", "llama.tensor_data_layout")
    flags = {f"tokenizer.ggml.{name}": False for name in ("add_sep_token", "new_flag")}
    keys = {**dict.fromkeys(names, "x"), **flags, "llama.expert_count": 0}
    whole = write(tmp_path, keys=keys)
    model = load(str(tmp_path / "model.gguf")).model
    assert torch.equal(lade.generate(model, TEXT, **GIVEN), whole.generate(TEXT, **GIVEN))


def test_a_config_beside_a_file_must_fit_it(tmp_path: Path) -> None:
    told = TOLD["Llama 3"][1]
    config, path = write(tmp_path, "llama", **told).config, tmp_path / "config.json"
    for old, new, said in (
        ("llama3", "default", "has 'rope_freqs.weight', and its config.json scales no angles"),
        ("llama", "helium", "expected a config.json of llama or mixtral or mistral beside"),
    ):
        config.save_pretrained(tmp_path)
        path.write_text(path.read_text().replace(f'_type": "{old}"', f'_type": "{new}"'))
        with pytest.raises(UserError, match=said):
            file.load_gguf(tmp_path / "model.gguf")


def test_a_config_beside_a_file_may_be_of_images_too(tmp_path: Path) -> None:
    whole = write(tmp_path, "gemma4_text")
    Gemma4Config(text_config=whole.config.to_dict()).save_pretrained(tmp_path)
    model = file.load_gguf(tmp_path / "model.gguf")
    assert type(model) is type(whole)
    assert torch.equal(lade.generate(model, TEXT, **GIVEN), whole.generate(TEXT, **GIVEN))


def test_experts_of_other_shapes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header_of, reshaped = file.header_of, dict[str, tuple[int, ...]]()

    def forged(path: Path) -> Any:
        header = header_of(path)
        for name, shape in reshaped.items():
            header.tensors[name] = header.tensors[name]._replace(shape=shape)
        return header

    monkeypatch.setattr(file, "header_of", forged)
    for family, part, *shapes in (
        ("qwen3_moe", "ffn_gate_exps.weight", (1024, 256), (2**18,), (2, 2, 256, 256)),
        ("qwen3_moe", "ffn_down_exps.weight", (4, 128, 512)),
        ("gpt_oss", "ffn_gate_exps.bias", (1024,)),
        ("gpt_oss", "ffn_down_exps.bias", (2, 512), (1024,)),
    ):
        write(tmp_path, family)
        for reshaped[f"blk.0.{part}"] in shapes:
            with pytest.raises(UserError, match=r"^expected .*ffn_gate_exps"):
                file.load_gguf(tmp_path / "model.gguf")
        reshaped.clear()


def test_experts_in_float32_run_by_torch(tmp_path: Path) -> None:
    whole = write(tmp_path, "qwen3_moe", "Q8_0", "F32")
    model = file.load_gguf(tmp_path / "model.gguf")
    assert torch.equal(lade.generate(model, TEXT, **GIVEN), whole.generate(TEXT, **GIVEN))
    assert "a format that jobs do not read" in str(lade.probe(model).why_by_torch)


def test_weights_are_the_files_own_bytes(tmp_path: Path) -> None:
    write(tmp_path, "llama", "Q8_0", "F32", tie_word_embeddings=True)
    model = file.load_gguf(tmp_path / "model.gguf")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.model.embed_tokens.weight.dtype is torch.uint8
    sizes = {
        weight.untyped_storage().nbytes()
        for name, weight in model.named_parameters()
        if weight.dim() == 2 and not name.endswith(("q_proj.weight", "k_proj.weight"))
    }
    assert sizes == {(tmp_path / "model.gguf").stat().st_size}
    assert model.dtype is torch.float32


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_file_is_a_model_by_its_name_or_that_of_its_folder(
    is_folder: bool, tmp_path: Path
) -> None:
    whole = write(tmp_path, "llama")
    byte_tokenizer().save_pretrained(tmp_path)
    model, tokenizer, name = load(str(tmp_path if is_folder else tmp_path / "model.gguf"))
    assert (name, len(tokenizer)) == (str(tmp_path / ("" if is_folder else "model.gguf")), 256)
    assert torch.equal(lade.generate(model, TEXT, **GIVEN), whole.generate(TEXT, **GIVEN))
    assert "PackedLinear" in str(model)
    made_whole = load(name, dtype="bfloat16").model
    assert made_whole.dtype is torch.bfloat16
    assert "PackedLinear" not in str(made_whole)
    (tmp_path / "generation_config.json").write_text('{"max_new_tokens": 7, "pad_token_id": 3}')
    assert load(name).model.generation_config.max_new_tokens == 7
    (tmp_path / "other.gguf").write_bytes(b"")
    if is_folder:
        with pytest.raises(UserError, match=r"got model\.gguf, other\.gguf$"):
            load(name)


@pytest.mark.parametrize("family", thinned(["llama", "qwen2", "phi3", "starcoder2"], "qwen2"))
def test_a_files_tokenizer_is_the_one_that_transformers_reads(family: str, tmp_path: Path) -> None:
    write(tmp_path, family)
    made = load_gguf_tokenizer(tmp_path / "model.gguf")
    expected = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    assert len(made) == 260  # theirs has more, beyond the model's table
    for text in ("abcd", "an ab\n<3> c", " <|endoftext|>"):
        assert made.decode(made(text).input_ids) == text
        assert "<" in text or made(text).input_ids == expected(text).input_ids
    assert made.tokenize("abcd")[-2:] == ["ab", "cd"]


@pytest.mark.parametrize(
    ("pre", "cut"),
    {
        "gpt-2": "It|'s|ĠIT|'|S|Ġ12345|:|Ċ|Ċ|7",
        "smollm": "It|'s|ĠIT|'|S|Ġ|1|2|3|4|5|:|ĊĊ|7",
        "llama-bpe": "It|'s|ĠIT|'S|Ġ|123|45|:ĊĊ|7",
        "qwen2": "It|'s|ĠIT|'S|Ġ|1|2|3|4|5|:ĊĊ|7",
        "gpt-4o": "It's|ĠIT'S|Ġ|123|45|:ĊĊ|7",
        "tekken": "It|'s|ĠIT|'S|Ġ|1|2|3|4|5|:ĊĊ|7",
        "deepseek-coder": "It|'|s|ĠIT|'|S|Ġ|1|2|3|4|5|:|Ċ|Ċ|7",
    }.items(),
)
def test_texts_are_cut_as_the_file_says(pre: str, cut: str, tmp_path: Path) -> None:
    """As llama.cpp does; pieces that are tokens need no merge in two of its kinds."""
    keys = {"tokenizer.ggml.pre": pre, "tokenizer.ggml.merges": ["a b"]}  # none of "cd"
    bos = write(tmp_path, keys=keys).config.bos_token_id
    tokenizer = load_gguf_tokenizer(tmp_path / "model.gguf")
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("It's IT'S 12345:\n\n7")
    assert [piece for piece, _ in pieces] == cut.split("|")
    is_whole = pre in ("llama-bpe", "tekken")
    assert tokenizer("cd").input_ids == [bos, 257] if is_whole else [*b"CD"]


def test_control_tokens_are_spelled_as_the_file_does(tmp_path: Path) -> None:
    """A tokenizer of bytes has no such letters, and would cut these tokens into pieces."""
    user, bos = "<\uff5cUser\uff5c>", "<\uff5cbegin\u2581of\u2581sentence\uff5c>"
    tokens = [*byte_tokenizer().convert_ids_to_tokens(range(256)), "ab", user, "\u65e5", bos]
    keys = dict[str, Any](tokens=tokens, token_type=[1] * 257 + [3, 4, 3], merges=["a b"])
    keys |= {"bos_token_id": 259, "eot_token_id": 257, "eom_token_id": 258, "add_bos_token": True}
    keys = {f"tokenizer.ggml.{name}": each for name, each in keys.items()}
    keys |= {f"tokenizer.chat_template{name}": f"{{{{ 'x{name}' }}}}" for name in ("", ".rag")}
    write(tmp_path, keys=keys)
    model, tokenizer, _ = load(str(tmp_path / "model.gguf"))
    assert tokenizer(f"{user}ab\u65e5").input_ids == [259, 257, 256, 258]
    assert tokenizer.decode([257, 256, 258], skip_special_tokens=True) == "ab\u65e5"
    assert model.generation_config.eos_token_id == [model.config.eos_token_id, 257, 258]
    assert (tokenizer.bos_token_id, max(tokenizer.get_vocab().values())) == (259, 259)
    render = partial(tokenizer.apply_chat_template, [{"role": "user"}], tokenize=False)
    assert (render(), render(chat_template="rag")) == ("x", "x.rag")


def test_what_cannot_be_done_with_blocks_says_so(tmp_path: Path) -> None:
    whole = write(tmp_path, "llama")
    model = file.load_gguf(tmp_path / "model.gguf")
    layer, table = model.model.layers[0].mlp.up_proj, model.model.embed_tokens

    def merge(_: str) -> None:  # as PEFT does
        layer.weight.data += torch.ones(layer.out_features, layer.in_features)

    def merge_safely(_: str) -> None:
        table.weight.data.clone()

    saving = model.save_pretrained, model.resize_token_embeddings
    for refused in (*saving, merge, merge_safely):
        with pytest.raises(UserError, match=r"neither saved, resized nor merged .* load it"):
            refused(str(tmp_path))
    assert torch.equal(deepcopy(model).generate(TEXT, **GIVEN), whole.generate(TEXT, **GIVEN))
    load(str(tmp_path / "model.gguf"), dtype="float32").model.save_pretrained(tmp_path / "saved")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(saved.generate(TEXT, **GIVEN), whole.generate(TEXT, **GIVEN))


# --- damaged files --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("whole")
    write(folder, "llama", "Q8_0", "Q4_1", num_hidden_layers=2)
    return (folder / "model.gguf").read_bytes()


def damaged(rng: np.random.Generator, whole: bytes) -> bytes:
    """Cut a file off, or overwrite some words of its settings and tensors' places."""
    made = bytearray(whole)
    first, lists = whole.index(b"blk.0.ffn_norm") + 200, whole.index(b"tokenizer.ggml.tokens")
    if rng.random() < 0.2:
        return bytes(made[: rng.integers(len(made))])
    for _ in range(rng.integers(1, 4)):
        start, stop = (4, lists) if rng.random() < 0.5 else (first - 1500, first)
        at, size = int(rng.integers(start, stop)), int(rng.choice([1, 4, 8]))
        values = (0, 1, 2**31, 2**63 - 1, 2**64 - 1, *rng.integers([256, 2**16]).tolist())
        word = values[rng.integers(len(values))]
        made[at : at + size] = struct.pack("<Q", word)[:size]
    return bytes(made)


@pytest.mark.parametrize("num", thinned([60, 2000], 60))
def test_damaged_files_are_refused_or_hold_a_model(
    num: int, whole_file: bytes, tmp_path: Path
) -> None:
    path, num_refused = tmp_path / "damaged.gguf", 0
    for seed in range(num):
        path.write_bytes(damaged(np.random.default_rng(seed), whole_file))
        with suppress(UserError), torch.no_grad():
            file.load_gguf(path)(TEXT)
            num_refused -= 1
        num_refused += 1
    assert num / 3 < num_refused < num


def forged(tmp_path: Path, change: Any) -> str:
    """Return why a file is refused, whose tensors were described otherwise."""
    write(tmp_path, "llama", "Q8_0")
    path = tmp_path / "model.gguf"
    made = bytearray(path.read_bytes())
    place = made.index(b"blk.1.ffn_up.weight") + len("blk.1.ffn_up.weight")
    change(made, place)
    path.write_bytes(made)
    with pytest.raises(UserError) as caught:
        load(str(path))
    assert str(path) in str(caught.value)
    return str(caught.value)


def put(kind: str, at: int, value: int) -> Any:
    return lambda made, place: struct.pack_into(f"<{kind}", made, place + at, value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (put("I", 0, 2**31), "'blk.1.ffn_up.weight' has 2,147,483,648 dimensions"),
        (put("Q", 4, 2**40), "'blk.1.ffn_up.weight' of shape [512, 1099511627776] has"),
        (put("Q", 4, 250), "'blk.1.ffn_up.weight' of shape [512, 250] has"),
        (put("Q", 12, 0), "'blk.1.ffn_up.weight' of shape [0, 256] has"),
        (put("Q", 12, 511), "'blk.1.ffn_up.weight' of shape [512, 256]"),
        (put("I", 20, 10), "'blk.1.ffn_up.weight' is of GGML's type Q2_K, and F32, F16, Q4_0"),
        (put("I", 20, 99), "'blk.1.ffn_up.weight' is of GGML's type 99, and F32, F16"),
        (put("Q", 24, 2**62), "'blk.1.ffn_up.weight' of shape [512, 256] has 139,264 bytes from"),
        (put("Q", 24, 17), "'blk.1.ffn_up.weight' of shape [512, 256] has"),
        (lambda made, place: made.__delitem__(slice(-100, None)), "bytes from"),
        (lambda made, place: made.__delitem__(slice(place - 3, None)), "ends beyond the file"),
        (lambda made, place: made.clear(), "of 0 bytes"),
        (lambda made, place: struct.pack_into("<I", made, 4, 1), "version 2 or 3"),
        (lambda made, place: struct.pack_into("<Q", made, 8, 2**40), "1,099,511,627,776 tensors"),
        (lambda made, place: struct.pack_into("<4s", made, place - 6, b"wuig"), "no parameter for"),
        (
            lambda made, place: struct.pack_into("<I", made, made.index(b"block_count") + 15, 9),
            "expected 9 layers",
        ),
    ],
)
def test_forged_files_are_refused_by_what_is_wrong(change: Any, said: str, tmp_path: Path) -> None:
    assert said in forged(tmp_path, change)
