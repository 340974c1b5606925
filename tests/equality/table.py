"""The factors of a call, and the case of one value of each.

A value is a fragment of a `Case`: options of `generate`, what lade is given, how the prompt is.
"""

from collections.abc import Iterator
from random import Random
from typing import Any

from tests.equality.pairs import Row, all_pairs
from tests.fuzz.cases import Case, Rows
from tests.fuzz.parts import PACKED
from tests.support.tiny import VOCAB_SIZE

#: Every kind of attention, position, cache and state that docs/models.md tells apart.
FAMILIES = (
    *("llama", "qwen3", "olmo2", "phi3", "deepseek_v3", "mixtral"),  # rotary positions
    *("gpt2", "opt", "gpt_neox", "bloom", "mpt"),  # learned positions, ALiBi
    *("mistral", "gemma2", "gemma3_text", "cohere2", "gpt_oss", "llama4_text"),  # windows, chunks
    *("mamba2", "rwkv", "jamba", "qwen3_next", "lfm2"),  # states, alone or between layers
    *("gpt_neo", "bert", "openai-gpt", "ctrl"),  # masks of their own, no cache
)
#: In float32 their forwards may be lade's own compiled ones.
SINGLES = ("llama float32", "gemma2 float32", "qwen3 float32")
FILES = PACKED[::15]  # of both, weights in blocks of a file

_STATES = ("mamba2", "rwkv", "jamba", "qwen3_next")  # no token can be taken back from it
_DRAFTS = {
    "a new pool": {},
    "a pool of the answer": {"pool": "pool_of(answer)"},
    "always wrong": {"drafter": f"ScriptDrafter(answer, {VOCAB_SIZE}, 0.0, 1)"},
    "often right": {"drafter": f"ScriptDrafter(answer, {VOCAB_SIZE}, 0.7, 2)"},
    "always right": {"drafter": f"ScriptDrafter(answer, {VOCAB_SIZE}, 1.0, 3)"},
    "a prediction": {"prediction": "predicted(answer, 'right', 4)"},
    "an edited prediction": {"prediction": "predicted(answer, 'replaced', 5)"},
    "an assistant": {"drafter": f"AssistantModel(fuzz_model('llama', 0, {VOCAB_SIZE}))"},
    "first layers": {"drafter": "FirstLayers(1)"},
    "all of these": {
        "drafter": f"Merged([CallPool(), FirstLayers(1), "
        f"AssistantModel(fuzz_model('llama', 1, {VOCAB_SIZE}), length=3)])"
    },
    "a kept prefix": {"pool": "pool_of(answer)"},
}
_METHODS = {
    "as found": "",
    "chain": "verification='chain', ",
    "plain": "verification='plain', ",
    "static": "execution='static', ",
}
_PROMPTS = (
    *("short", "one token", "longer than windows", "padded", "holes", "embeddings", "positions"),
    *("batch", "padded batch", "samples", "earlier turn"),
)
_OF_ONE = ("short", "one token", "longer than windows")
_CHOICES = {
    "greedy": {"do_sample": "False"},
    "sampled": {"do_sample": "True"},
    "hot": {"do_sample": "True", "temperature": "1.4", "top_k": "0"},
    "top": {"do_sample": "True", "temperature": "0.8", "top_k": "9", "top_p": "0.8"},
    "typical": {"do_sample": "True", "typical_p": "0.7", "renormalize_logits": "True"},
    "cut": {"do_sample": "True", "min_p": "0.05", "epsilon_cutoff": "0.01", "eta_cutoff": "0.02"},
}
_PROCESSORS = {
    "none": {},
    "repetition": {"repetition_penalty": "1.3", "no_repeat_ngram_size": "3"},
    "tokens": {"bad_words_ids": "[[7], [5, 6]]", "suppress_tokens": "[9]"},
    "biases": {"sequence_bias": "{(5, 6): 2.5, (8,): -1.5}", "begin_suppress_tokens": "[5]"},
    "ends": {"min_new_tokens": "4", "forced_eos_token_id": "96"},
    "decay": {"exponential_decay_length_penalty": "(3, 1.2)", "remove_invalid_values": "True"},
    "allowed": {"prefix_allowed_tokens_fn": f"AllowedTokens([1, 2, 7, 30], {VOCAB_SIZE})"},
    "watermark": {"watermarking_config": "WatermarkingConfig(bias=2.0, greenlist_ratio=0.4)"},
    "synthid": {
        "watermarking_config": "SynthIDTextWatermarkingConfig(ngram_len=3, keys=[7, 9], "
        "sampling_table_size=64)"
    },
    "guidance": {"guidance_scale": "1.6"},
    "own": {"logits_processor": "LogitsProcessorList([LastTokenProcessor(log, 2.0)])"},
    "counting": {"logits_processor": "LogitsProcessorList([CallsProcessor(log)])"},
    "drawing": {"logits_processor": "LogitsProcessorList([RandomProcessor(log, 0.5)])"},
    "in place": {"logits_processor": "LogitsProcessorList([InPlaceProcessor(log, 6)])"},
}
# What only a call can have; the other options may stand in a config.
_OF_CALLS = {
    *("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn"),
    *("watermarking_config", "tokenizer", "streamer"),
}
_STOPS = {
    "length": {},
    "a token": {"eos_token_id": "11"},
    "many tokens": {"eos_token_id": repr([*range(3, 90, 6)])},
    "strings": {"stop_strings": "['(', '$%', 'A']", "tokenizer": "fuzz_tokenizer()"},
    "own": {"stopping_criteria": "StoppingCriteriaList([StopAtToken(log, [12, 40, 70])])"},
    "counting": {"stopping_criteria": "StoppingCriteriaList([StopAfterCalls(log, 6)])"},
    "scores": {"stopping_criteria": "StoppingCriteriaList([StopAtScore(log, 0.3)])"},
}
_OUTPUTS = {
    "tokens": {},
    "parts": {"return_dict_in_generate": "True"},
    "scores": {"output_scores": "True", "output_logits": "True", "return_dict_in_generate": "True"},
    "states": {"output_hidden_states": "True", "return_dict_in_generate": "True"},
    "followed plainly": {"return_dict_in_generate": "True"},
    "followed": {"return_dict_in_generate": "True"},
}
FACTORS: dict[str, tuple[str, ...]] = {
    "model": (*FAMILIES, *SINGLES, *FILES),
    "way": ("generate", "custom_generate", "wrap", "batcher", "itself"),
    "drafts": (*_DRAFTS,),
    "method": (*_METHODS,),
    "prompt": _PROMPTS,
    "choice": (*_CHOICES,),
    "processors": (*_PROCESSORS,),
    "stop": (*_STOPS,),
    "output": (*_OUTPUTS,),
    "stream": ("no", "yes"),
    "settings": ("call", "config", "model"),  # where options stand
}


def cases(seed: int = 0) -> Iterator[tuple[Row, Case]]:
    """Return a table in which any two values meet, by model."""
    rows = all_pairs(FACTORS, fits, seed)
    rows.sort(key=lambda row: FACTORS["model"].index(row["model"]))
    for number, row in enumerate(rows):
        yield row, case_of(row, Random(f"{seed}/{number}"))


def fits(row: Row) -> bool:
    """Tell whether a combination, of some of the factors, is one that lade and `generate` take."""

    def has(factor: str, *values: str) -> bool:
        return row.get(factor) in values

    def lacks(factor: str, *values: str) -> bool:
        return factor in row and row[factor] not in values

    impossible = (
        has("way", "itself") and lacks("model", *FILES),
        # A wrapped model has no drafter, and transformers hands a function of ours less than all.
        has("way", "wrap") and "drafter" in _DRAFTS.get(row.get("drafts", ""), {}),
        has("way", "custom_generate") and (has("stream", "yes") or has("stop", "strings")),
        # A batcher's calls are of one prompt of tokens, and draw from generators of their own.
        has("way", "batcher") and lacks("prompt", *_OF_ONE),
        has("way", "batcher") and has("processors", "drawing"),
        has("drafts", "a kept prefix") and lacks("output", "tokens"),
        has("method", "chain") and has("model", *_STATES),
        # Refused by name: a cache that cannot go back.
        has("drafts", "first layers", "all of these") and has("model", "rwkv"),
        # `generate` draws for samples alone, and takes no other input with these.
        has("prompt", "samples") and has("choice", "greedy"),
        # Plain eager attention in float64 makes NaN of padding, which no static memory takes.
        has("method", "static")
        and has("prompt", "padded", "padded batch")
        and has("model", "gemma2"),
        has("prompt", "embeddings") and has("processors", "guidance", "watermark", "biases"),
    )
    return not any(impossible)


def case_of(row: Row, rng: Random) -> Case:
    """Return the case of one value of each factor."""
    name, _, dtype = row["model"].partition(" ")
    settings = {"max_new_tokens": str(rng.randint(9, 24)), **_CHOICES[row["choice"]]}
    if row["method"] == "static":
        settings["disable_compile"] = "True"  # it takes half a minute
    options: dict[str, str] = {}
    for more in (_PROCESSORS[row["processors"]], _STOPS[row["stop"]], _OUTPUTS[row["output"]]):
        for option, value in more.items():
            (options if option in _OF_CALLS else settings)[option] = value
    if row["stream"] == "yes":
        options["streamer"] = "Recorder(log)"
    if row["prompt"] == "samples":
        settings["num_return_sequences"] = "2"
    places: dict[str, dict[str, str]] = {"call": {}, "config": {}, "model": {}}
    places[row["settings"]] = settings
    config = _METHODS[row["method"]]
    if row["drafts"] == "a kept prefix":
        config += "reuses_prefix=True, "
    return Case(
        {"architecture": name, "seed": 0, "attention": None, "dtype": dtype or "float64"},
        rng.randrange(10**6),
        **_prompt(row["prompt"], rng),
        options=places["call"] | options,
        config=places["config"],
        model_config=places["model"],
        door=row["way"],
        lade=_DRAFTS[row["drafts"]]
        | {"config": f"lade.Config({config}max_draft_tokens=8, strict_drafter=True)"},
        num_calls=2 if row["drafts"] == "a kept prefix" else 1,
        follow_up={"followed": "lade", "followed plainly": "plain"}.get(row["output"], ""),
    )


def _prompt(kind: str, rng: Random) -> dict[str, Any]:
    """Return the fields of a case that give the prompt."""
    num_rows = 3 if "batch" in kind else 1
    length = {"one token": 1, "longer than windows": 26}.get(kind, rng.randint(5, 11))
    rows = tuple(_repeating(length, rng) for _ in range(num_rows))
    mask: Rows | None = tuple((1,) * length for _ in rows)
    fields: dict[str, Any] = {}
    if "padded" in kind:
        pads = [rng.randint(1, length - 2) if row else 2 for row in range(num_rows)]
        rows = tuple((0,) * n + row[n:] for n, row in zip(pads, rows, strict=True))
        mask = tuple((0,) * n + (1,) * (length - n) for n in pads)
    elif kind == "holes":
        mask = ((1, 1, 0, 1, 0, *(1,) * (length - 5)),)
    elif kind == "positions":
        fields["positions"] = (tuple(range(3, 3 + length)),)
    elif kind == "earlier turn":
        fields["earlier"] = (_repeating(4, rng),)
    elif kind == "embeddings":
        fields["form"] = "embeds"
    return {"rows": rows, "mask": mask, **fields}


def _repeating(length: int, rng: Random) -> tuple[int, ...]:
    """Return a text in which a short pattern repeats; 0 is padding."""
    pattern = [rng.randint(2, VOCAB_SIZE - 2) for _ in range(rng.randint(2, 4))]
    return tuple((pattern * length)[:length])
