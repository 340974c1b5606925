"""Tokenizers of GGUF files: made by transformers, with exactly the file's tokens."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, pre_tokenizers
from transformers import CONFIG_MAPPING, TOKENIZER_MAPPING, PreTrainedTokenizerFast

from lade.errors import UserError
from lade.models.converted import architecture_of
from lade.models.gguf import header_of

# Kinds of tokens that are whole in any text.
_CONTROL, _USER_DEFINED = 3, 4
_TEMPLATE = "tokenizer.chat_template."
# Keys that are read, by transformers or here, or change no token.
_PARTS = "model pre tokens scores merges token_type token_type_count add_space_prefix"
_PARTS += " add_bos_token add_eos_token add_sep_token"  # only encoders have separators
_KEYS = {f"tokenizer.ggml.{part}" for part in _PARTS.split()}
_KEYS |= {"tokenizer.chat_template", "tokenizer.chat_templates", "tokenizer.huggingface.json"}
# Where texts are cut before bytes are merged: by names, expressions that are found in what those
# before left.
_PRE, _BLANKS, _DIGIT = "tokenizer.ggml.pre", r"\s*[\r\n]+|\s+(?!\S)|\s+", r"\p{N}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SHORT, _FIRST = "(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"[^\r\n\p{L}\p{N}]?"
_LLAMA3 = rf"{_SHORT}|{_FIRST}\p{{L}}+|%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_GPT4O = f"{_FIRST}{_UPPER}*{_LOWER}+%s|{_FIRST}{_UPPER}+{_LOWER}*%s|%s"
_GPT4O += rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"
_DEEPSEEK = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", _DIGIT)
# Of these, a piece that is a token is one whatever the merges, and BOS comes first unless told.
_WHOLE = "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 tekken"
_CUTS = {
    "gpt-2 phi-2 mpt olmo jais exaone4 trillion granite-docling mellum a.x-4.0 gigachat": (_GPT2,),
    "smollm starcoder refact command-r codeshell exaone minerva-7b": (_DIGIT, _GPT2),
    f"{_WHOLE[:-7]} dbrx smaug-bpe glm4 chatglm-bpe": (_LLAMA3 % r"\p{N}{1,3}",),
    "qwen2 deepseek-r1-qwen stablelm2 hunyuan megrez kormo": (_LLAMA3 % _DIGIT,),
    "gpt-4o llama4": (_GPT4O % (f"{_SHORT}?", f"{_SHORT}?", r"\p{N}{1,3}"),),
    "tekken": (_GPT4O % ("", "", _DIGIT),),
    "deepseek-coder": _DEEPSEEK,
}


def load_gguf_tokenizer(path: Path) -> Any:
    """Return the tokenizer of a file; `AutoTokenizer` would read all tokens twice.

    Raises:
        UserError: the file is damaged, has no tokenizer, or one that is not read.
    """
    settings = header_of(path).settings
    tokens = settings.get("tokenizer.ggml.tokens") or ()
    num_tokens = len(tokens)
    if not tokens:
        raise UserError(f"expected a tokenizer, got no tokenizer in {path}; put one beside it")
    if len({*tokens}) < num_tokens:
        raise UserError(f"{path} has a token twice; put a tokenizer beside it")
    for key, each in settings.items():
        is_read = (
            each is False or key in _KEYS or key.endswith("_token_id") or key.startswith(_TEMPLATE)
        )
        if key.startswith("tokenizer.") and not is_read:
            raise UserError(f"{path} has {key!r}, which is not read; put a tokenizer beside it")
        is_number = key.startswith("tokenizer.") and key.endswith("_token_id")
        if is_number and not (type(each) is int and 0 <= each < num_tokens):
            raise UserError(f"{path} has {each!r} as {key!r}, and {num_tokens:,} tokens")
    made = architecture_of(path, settings)
    kind = TOKENIZER_MAPPING.get(CONFIG_MAPPING[made.types[0]], PreTrainedTokenizerFast)
    if not issubclass(kind, PreTrainedTokenizerFast):  # of a package that may be missing
        kind = PreTrainedTokenizerFast
    tokenizer = kind.from_pretrained(path.parent, gguf_file=path.name)
    if settings.get("tokenizer.ggml.model") == "gpt2":
        _cut(path, settings, tokenizer)
    tokenizer = _spelled(tokenizer, settings)
    _check_spaces(path, settings, tokenizer)
    named = {
        key.removeprefix(_TEMPLATE): each
        for key, each in settings.items()
        if key.startswith(_TEMPLATE)
    }
    if named:
        usual = {"default": tokenizer.chat_template} if tokenizer.chat_template else {}
        tokenizer.chat_template = usual | named
    return tokenizer


def _cut(path: Path, settings: dict[str, Any], tokenizer: Any) -> None:
    """Let a tokenizer of bytes cut texts as the file says; releases of transformers know few."""
    name, backend = settings.get(_PRE), tokenizer.backend_tokenizer
    found = [cuts for names, cuts in _CUTS.items() if name in names.split()]
    if not found:
        raise UserError(
            f"{path} has {name!r} as {_PRE!r}, which is not read; put a tokenizer beside it"
        )
    splits = [pre_tokenizers.Split(Regex(each), "isolated") for each in found[0]]
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, in_bytes])
    if name in _WHOLE.split():
        backend.model.ignore_merges = True
        if tokenizer.bos_token_id is not None:
            tokenizer.add_bos_token = settings.get("tokenizer.ggml.add_bos_token", True)


def _spelled(tokenizer: Any, settings: dict[str, Any]) -> Any:
    """Return a tokenizer with exactly the tokens of a file, each with its number.

    The one that transformers makes of bytes cannot spell some control tokens, and classes add
    tokens of their own, beyond the model's table.
    """
    tokens, kinds = settings["tokenizer.ggml.tokens"], settings.get("tokenizer.ggml.token_type", ())
    state, whole = json.loads(tokenizer.backend_tokenizer.to_str()), dict[str, Any]()
    if settings.get("tokenizer.ggml.model") == "gpt2":
        for number, (token, kind) in enumerate(zip(tokens, kinds, strict=False)):
            if kind in (_CONTROL, _USER_DEFINED):
                flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
                whole[token] = {
                    "content": token,
                    "id": number,
                    "special": kind == _CONTROL,
                    **flags,
                }
    added = {each["content"]: each for each in state["added_tokens"]}
    kept = {token: each for token, each in added.items() if each["id"] < len(tokens)}
    lost = {token: each for token, each in whole.items() if token not in kept}
    if len(kept) == len(added) and not lost:
        return tokenizer
    vocabulary = state["model"]["vocab"]
    if lost:
        numbers = {each["id"] for each in lost.values()}
        vocabulary = {token: each for token, each in vocabulary.items() if each not in numbers}
        state["model"]["vocab"] = vocabulary | {token: each["id"] for token, each in lost.items()}
    state["added_tokens"] = sorted((kept | lost).values(), key=lambda each: each["id"])
    if state["model"].get("unk_token") not in vocabulary:
        state["model"]["unk_token"] = None
    state["post_processor"] = None  # made anew, of these
    options: dict[str, Any] = {
        name: getattr(tokenizer, name, False) for name in ("add_bos_token", "add_eos_token")
    }
    for field, name in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
        at = settings.get(f"tokenizer.ggml.{name}_token_id")
        options[f"{field}_token"] = None if at is None else tokens[at]
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)),
        chat_template=tokenizer.chat_template,
        **options,
    )


def _check_spaces(path: Path, settings: dict[str, Any], tokenizer: Any) -> None:
    """Refuse a tokenizer that puts a space before a text where the file's does not."""
    key, kind = "tokenizer.ggml.add_space_prefix", settings.get("tokenizer.ggml.model")
    first = tokenizer.tokenize("a")[:1]
    if key in settings and bool(settings[key]) != any(each[0] in "▁Ġ" for each in first):
        raise UserError(f"{path} has {key!r}, which transformers does not read for {kind}")
