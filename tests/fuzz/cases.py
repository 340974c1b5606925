"""Draw a case: a model, prompts, options of `generate`, and what lade is given beside them.

A case holds Python expressions over the names of `parts.py`; each run evaluates them anew, so that
no processor, streamer or cache serves twice. Case i of a seed depends on these two numbers alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from transformers import GenerationMixin

from tests.fuzz.inside import CACHE, CACHE_NAMES, VERIFICATIONS
from tests.fuzz.parts import ARCHITECTURES, FAMILIES, FLOAT32_ONLY, class_of, inputs_of
from tests.support.tiny import VOCAB_SIZE

Rows = tuple[tuple[int, ...], ...]
_LIST = "logits_processor"

# Older releases of transformers run the chunks of the whole prompt again, cached or not.
_CHUNKS_AFTER_A_CACHE = "prefill_ids" in GenerationMixin._prefill.__code__.co_varnames

NUM_MODELS = 3  # of each family and attention; each has its own sizes
SHARE_OF_FAMILIES = 0.45  # of all cases; the others are of any architecture
SHARE_OF_TINY_VOCABULARIES = 0.1  # of the families'
# Of what happens to the model before; a copy of it is checked anew, which takes long for some
# architectures.
SHARE_WITH_EVENTS = {"families": 0.32, "architectures": 0.05}
SHARE_OF_MODELS = 0.5  # of the drafters, those that are models
SHARE_WITH_PREDICTIONS = 0.5
SHARE_WITHOUT_LADE = 0.2  # of models of a file, whose own `generate` is held against one made whole
PREDICTIONS = ("right", "end", "inserted", "deleted", "replaced", "shuffled", "foreign")
SHARE_OF_MORE = 0.2  # with what lade is seldom given


@dataclass(frozen=True)
class Case:
    """One call of `generate`, as data that can be run, printed and made smaller."""

    model: dict[str, Any]  # what parts.model_of takes
    seed: int  # of torch's random state before each call
    rows: Rows  # the prompt, padding included
    form: str = "place"  # place, input_ids, inputs, embeds, both, none: how the prompt is given
    mask: Rows | None = None
    positions: Rows | None = None
    token_types: Rows | None = None
    earlier: Rows | None = None  # the prompt of an earlier turn, whose cache is handed over
    whole: bool = True  # with an earlier turn: is the prompt the whole text or the new part
    negative: tuple[int, ...] | None = None  # negative prompt of row 0; row i has each token + i
    negative_mask: bool = False
    options: dict[str, str] = field(default_factory=dict)  # of the call
    config: dict[str, str] = field(default_factory=dict)  # of the call's GenerationConfig
    model_config: dict[str, str] = field(default_factory=dict)  # of model.generation_config
    door: str = "generate"  # generate, wrap, custom_generate, batcher, itself
    lade: dict[str, str] = field(default_factory=dict)  # pool, drafter, config
    num_calls: int = 1  # of lade with the same pool, each compared
    follow_up: str = ""  # plain, lade: who goes on from the cache that was returned
    events: tuple[str, ...] = ()  # on a copy of the model, before anything that is compared
    profile: dict[str, str] = field(default_factory=dict)  # fields of what lade knows of the model

    @property
    def is_private(self) -> bool:
        """Tell whether the model of the case is a copy."""
        return bool(self.events)

    @property
    def may_fail(self) -> bool:
        """Tell whether forwards that verify drafts are made to fail in the middle of a call."""
        return any(event.startswith("failing") for event in self.events)

    @property
    def dtype(self) -> str:
        """Return the lowest precision that the model is in at any time."""
        if any("float32" in event for event in self.events):
            return "float32"
        name: str = self.model.get("dtype", "float64")
        return name

    @property
    def architecture(self) -> str:
        """Return the name of the architecture; an empty one for the families of `parts.py`."""
        name: str = self.model.get("architecture", "")
        return name

    @property
    def vocab_size(self) -> int:
        """Return how many tokens the model has."""
        size: int = self.model.get("vocab_size", VOCAB_SIZE)
        return size

    def arguments(self) -> dict[str, str]:
        """Return every argument of `generate` but a prompt by place, as expressions."""
        given: dict[str, str] = {}
        ids = f"torch.tensor({_lists(self.rows)})"
        if self.earlier is not None and self.whole:
            ids = f"torch.cat([earlier.sequences, {ids}], 1)"
        names = {"place": "inputs", "input_ids": "input_ids", "inputs": "inputs", "both": "inputs"}
        if self.form in names:
            given[names[self.form]] = ids
        if self.form in ("embeds", "both"):
            given["inputs_embeds"] = f"model.get_input_embeddings()({ids}) * 0.9"
        if self.earlier is not None:
            given[cache_name(self.model)] = f"deepcopy(earlier.{CACHE})"
        if self.mask is not None:
            mask = f"torch.tensor({_lists(self.mask)})"
            if self.earlier is not None:
                # The cache holds every token of the earlier turn but the last.
                held = "earlier.sequences" if self.whole else "earlier.sequences[:, 1:]"
                mask = f"torch.cat([torch.ones_like({held}), {mask}], 1)"
            given["attention_mask"] = mask
        if self.positions is not None:
            given["position_ids"] = f"torch.tensor({_lists(self.positions)})"
        if self.token_types is not None:
            given["token_type_ids"] = f"torch.tensor({_lists(self.token_types)})"
        if self.negative is not None:
            num_rows = len(self.rows) * int(self.setting("num_return_sequences") or 1)
            rows = tuple(
                tuple((token + i) % self.vocab_size for token in self.negative)
                for i in range(num_rows)
            )
            given["negative_prompt_ids"] = f"torch.tensor({_lists(rows)})"
            if self.negative_mask:
                ones = tuple((int(i % 2 == 0), *(1,) * (len(r) - 1)) for i, r in enumerate(rows))
                given["negative_prompt_attention_mask"] = f"torch.tensor({_lists(ones)})"
        if self.config:
            inner = ", ".join(f"{name}={value}" for name, value in self.config.items())
            given["generation_config"] = f"GenerationConfig({inner})"
        return given | self.options

    def earlier_turn(self) -> str | None:
        """Return the expression for the earlier turn, or None."""
        if self.earlier is None:
            return None
        ids = f"torch.tensor({_lists(self.earlier)})"
        return (
            f"model.generate({ids}, attention_mask=torch.ones_like({ids}), max_new_tokens=4, "
            "do_sample=False, return_dict_in_generate=True)"
        )

    def setting(self, name: str) -> str | None:
        """Return the expression for an option, wherever it is set."""
        for place in (self.options, self.config, self.model_config):
            if name in place:
                return place[name]
        return None


def cache_name(model: dict[str, Any]) -> str:
    """Return under which name a model takes a cache."""
    if "architecture" not in model:
        return CACHE
    takes = inputs_of(model["architecture"])
    return next((name for name in CACHE_NAMES if name in takes), CACHE)


def _lists(rows: Rows) -> str:
    return repr([list(row) for row in rows])


# --- drawing --------------------------------------------------------------------------------


class _Hand:
    """Draws small values for one case."""

    def __init__(self, rng: Random, vocab_size: int, length: int, num_new: int) -> None:
        self.rng = rng
        self.vocab_size = vocab_size
        self.length = length
        self.num_new = num_new

    def number(self, low: float, high: float) -> float:
        return round(self.rng.uniform(low, high), 3)

    def whole(self, low: int, high: int) -> int:
        return self.rng.randint(low, high)

    def token(self) -> int:
        return self.rng.randrange(self.vocab_size)

    def tokens(self, most: int, least: int = 1) -> list[int]:
        return [self.token() for _ in range(self.rng.randint(least, most))]

    def some_tokens(self, most: int) -> list[int]:
        return sorted(set(self.tokens(most * max(1, self.vocab_size // 24))))


def _sequence_bias(hand: _Hand) -> Any:
    grams = {tuple(hand.tokens(3)): hand.number(-4, 4) for _ in range(hand.whole(1, 3))}
    if hand.rng.random() < 0.5:
        return grams
    return [[list(gram), bias] for gram, bias in grams.items()]


def _watermark(hand: _Hand) -> str:
    if hand.rng.random() < 0.5:
        schemes = [("lefthash", 1), ("selfhash", 1), ("selfhash", 3)]
        # transformers' selfhash looks at the 40 best tokens, be there as many or not.
        scheme, width = hand.rng.choice(schemes if hand.vocab_size >= 40 else schemes[:1])
        bias, ratio = hand.number(1, 4), hand.number(0.2, 0.6)
        return (
            f"WatermarkingConfig(bias={bias}, greenlist_ratio={ratio}, seeding_scheme={scheme!r}, "
            f"context_width={width})"
        )
    keys = [hand.whole(1, 999) for _ in range(hand.whole(1, 4))]
    return (
        f"SynthIDTextWatermarkingConfig(ngram_len={hand.whole(2, 4)}, keys={keys}, "
        f"context_history_size={hand.whole(2, 20)}, sampling_table_size=64, "
        f"skip_first_ngram_calls={hand.rng.random() < 0.3})"
    )


def _processors(hand: _Hand) -> str:
    kinds = [
        f"StatelessProcessor(log, {hand.whole(0, 99)})",
        f"LastTokenProcessor(log, {hand.number(-3, 3)})",
        "CallsProcessor(log)",
        f"RandomProcessor(log, {hand.number(0, 1)})",
        f"InPlaceProcessor(log, {hand.token()})",
    ]
    chosen = hand.rng.sample(kinds, hand.rng.choice([1, 1, 2, 3]))
    return f"LogitsProcessorList([{', '.join(chosen)}])"


def _criteria(hand: _Hand) -> str:
    kinds = [
        f"StopAtToken(log, {hand.some_tokens(3)})",
        f"StopAfterCalls(log, {hand.whole(1, 10)})",
        f"StopAtScore(log, {hand.number(0.3, 0.99)})",
    ]
    chosen = hand.rng.sample(kinds, hand.rng.choice([1, 1, 2]))
    return f"StoppingCriteriaList([{', '.join(chosen)}])"


def _allowed(hand: _Hand) -> str:
    steps = sorted({hand.token() for _ in range(hand.whole(1, 6))})
    return f"AllowedTokens({steps}, {hand.vocab_size})"


def _stop_strings(hand: _Hand) -> Any:
    # The tokenizer's first ids are the signs from "!" on.
    strings = ["".join(chr(33 + t) for t in hand.tokens(2)) for _ in range(hand.whole(1, 2))]
    return strings[0] if len(strings) == 1 and hand.rng.random() < 0.5 else strings


def _repeated_ngram(hand: _Hand) -> int:
    return hand.rng.choice([1, 2, 2, 3, 3, 4])


# Options that a GenerationConfig can hold: how often, and how the value is drawn.
_CONFIG_OPTIONS: dict[str, tuple[float, Callable[[_Hand], Any]]] = {
    "temperature": (0.35, lambda hand: hand.number(0.2, 1.6)),
    "top_k": (0.2, lambda hand: hand.whole(0, hand.vocab_size + 3)),
    "top_p": (0.2, lambda hand: hand.number(0.3, 1.0)),
    "min_p": (0.08, lambda hand: hand.number(0.01, 0.3)),
    "typical_p": (0.06, lambda hand: hand.number(0.2, 0.95)),
    "epsilon_cutoff": (0.06, lambda hand: hand.number(0.001, 0.1)),
    "eta_cutoff": (0.06, lambda hand: hand.number(0.001, 0.1)),
    "top_h": (0.05, lambda hand: hand.number(0.1, 0.9)),
    "renormalize_logits": (0.06, lambda hand: True),
    "repetition_penalty": (0.12, lambda hand: hand.number(0.7, 1.6)),
    "no_repeat_ngram_size": (0.08, _repeated_ngram),
    "encoder_repetition_penalty": (0.05, lambda hand: hand.number(0.7, 1.6)),
    "encoder_no_repeat_ngram_size": (0.05, _repeated_ngram),
    "bad_words_ids": (0.06, lambda hand: [hand.tokens(3) for _ in range(hand.whole(1, 3))]),
    "sequence_bias": (0.06, _sequence_bias),
    "min_length": (0.08, lambda hand: hand.length + hand.whole(1, 8)),
    "min_new_tokens": (0.08, lambda hand: hand.whole(1, 8)),
    "forced_bos_token_id": (0.03, _Hand.token),
    "forced_eos_token_id": (0.05, _Hand.token),
    "exponential_decay_length_penalty": (
        0.05,
        lambda hand: (hand.whole(0, 6), 1 + hand.number(0, 1)),
    ),
    "suppress_tokens": (0.06, lambda hand: hand.some_tokens(4)),
    "begin_suppress_tokens": (0.06, lambda hand: hand.some_tokens(4)),
    "remove_invalid_values": (0.05, lambda hand: True),
    "guidance_scale": (0.06, lambda hand: hand.number(0.5, 3)),
    "prefill_chunk_size": (0.06, lambda hand: hand.whole(1, 5)),
    "output_scores": (0.12, lambda hand: True),
    "output_logits": (0.12, lambda hand: True),
    "output_hidden_states": (0.08, lambda hand: True),
    "output_attentions": (0.08, lambda hand: True),
    "use_cache": (0.04, lambda hand: False),
    "cache_implementation": (0.05, lambda hand: hand.rng.choice(["static", "static", "dynamic"])),
    "num_beams": (0.005, lambda hand: 2),
}
# Those that only the call can have; all are expressions.
_CALL_OPTIONS: dict[str, tuple[float, Callable[[_Hand], str]]] = {
    "watermarking_config": (0.06, _watermark),
    "logits_processor": (0.15, _processors),
    "stopping_criteria": (0.12, _criteria),
    "prefix_allowed_tokens_fn": (0.06, _allowed),
    "streamer": (0.2, lambda hand: "Recorder(log)"),
}


def draw_case(seed: int, index: int, architectures: Sequence[str] | None = None) -> Case:
    """Draw case `index` of `seed`.

    Args:
        seed: of a run.
        index: of the case.
        architectures: draw the model from these alone; if none are in it, from the families.
    """
    rng = Random(f"{seed}/{index}")
    model = _draw_model(rng, architectures)
    long = [16, 20, 24, 30] if "architecture" in model else []  # windows are of 8 tokens there
    length = rng.choice([1, 2, 3, *range(2, 13), *long])
    num_new = rng.choice([1, 2, *range(3, 25)])
    hand = _Hand(rng, model.get("vocab_size", VOCAB_SIZE), length, num_new)
    case = Case(model=model, seed=rng.randrange(10**6), rows=())
    case = _draw_prompt(case, hand)
    settings, options = _draw_options(case, hand)
    # Without a mask, `generate` takes padding for masked.
    padding = {"0", *([] if case.mask else [settings.get("pad_token_id", "0")])}
    if _is_eager(model) and any(str(row[0]) in padding for row in case.mask or case.rows):
        # In float64, plain eager attention turns a query that sees nothing into NaN.
        case = replace(case, model={**model, "dtype": "float32"})
    case = _draw_places(case, rng, settings, options)
    if "guidance_scale" in settings and rng.random() < 0.6:
        case = replace(case, negative=tuple(hand.tokens(5)), negative_mask=rng.random() < 0.3)
    case = _draw_more(_draw_lade(case, hand), hand)
    share = SHARE_WITH_EVENTS["architectures" if case.architecture else "families"]
    return _draw_what_happens(case, hand) if rng.random() < share else case


def _is_eager(model: dict[str, Any]) -> bool:
    if model["attention"] is not None or "architecture" not in model:
        return bool(model["attention"] == "eager")
    return not class_of(model["architecture"])._supports_sdpa


def _draw_model(rng: Random, architectures: Sequence[str] | None) -> dict[str, Any]:
    if architectures is None and rng.random() >= SHARE_OF_FAMILIES:
        architectures = ARCHITECTURES
    if architectures:
        name, _, dtype = rng.choice(architectures).partition(" ")
        attention = None if "+" in dtype else rng.choice([None, None, None, "eager"])
        dtype = "float32" if name in FLOAT32_ONLY else dtype or "float64"
        return {"architecture": name, "seed": 0, "attention": attention, "dtype": dtype}
    number = rng.randrange(NUM_MODELS)
    is_tiny = rng.random() < SHARE_OF_TINY_VOCABULARIES
    return {
        "family": rng.choice(FAMILIES),
        "seed": number,
        "vocab_size": ((2, 3, 5) if is_tiny else (12, 19, 40))[number],
        "hidden_size": (16, 32, 16)[number],
        "sharpness": (1.0, 2.0, 6.0)[number],
        "attention": rng.choice(["sdpa", "sdpa", "eager"]),
    }


def _draw_prompt(case: Case, hand: _Hand) -> Case:
    rng = hand.rng
    num_rows = 1 if rng.random() < 0.5 else rng.randint(2, 5)
    rows = tuple(_repetitive(hand, hand.length) for _ in range(num_rows))
    form = rng.choices(
        ["place", "input_ids", "inputs", "embeds", "both", "none"], [50, 30, 12, 4, 3, 1]
    )[0]
    mask: Rows | None = tuple((1,) * hand.length for _ in rows)
    positions = None
    kind = rng.random()
    if kind < 0.2:
        mask = None
    elif (kind < 0.55 and num_rows > 1) or kind < 0.3:
        pads = [rng.randint(0, hand.length - 1) for _ in rows]
        rows = tuple((0,) * n + row[n:] for n, row in zip(pads, rows, strict=True))
        mask = tuple((0,) * n + (1,) * (hand.length - n) for n in pads)
        if rng.random() < 0.1:  # plain generate infers it from the padding token
            mask = None
    elif kind < 0.65:
        mask = tuple(_with_holes(rng, hand.length) for _ in rows)
    if rng.random() < 0.1:
        offset = rng.randint(0, 5)
        positions = tuple(tuple(range(offset, offset + hand.length)) for _ in rows)
    takes = inputs_of(case.architecture) if case.architecture else frozenset({"position_ids"})
    if "position_ids" not in takes:
        positions = None
    token_types = None
    is_plain = form in ("place", "input_ids", "inputs")
    if form == "none":
        rows, mask, positions = rows[:1], None, None
    elif is_plain and "token_type_ids" in takes and rng.random() < 0.3:
        token_types = tuple(tuple(hand.whole(0, 1) for _ in row) for row in rows)
    elif is_plain and positions is None and rng.random() < 0.08:
        earlier_length = rng.randint(1, 6)
        case = replace(
            case,
            earlier=tuple(_repetitive(hand, earlier_length) for _ in rows),
            whole=mask is None or rng.random() < 0.6,
        )
    return replace(
        case, rows=rows, form=form, mask=mask, positions=positions, token_types=token_types
    )


def _repetitive(hand: _Hand, length: int) -> tuple[int, ...]:
    """Return a text of the tokens from 1 on (0 is padding) in which a short pattern repeats."""
    pattern = [hand.whole(1, max(1, hand.vocab_size - 2)) for _ in range(hand.whole(1, 4))]
    return tuple((pattern * length)[:length])


def _with_holes(rng: Random, length: int) -> tuple[int, ...]:
    mask = [int(rng.random() < 0.7) for _ in range(length)]
    if rng.random() < 0.9:
        mask[-1] = 1
    if not any(mask):
        mask[rng.randrange(length)] = 1
    return tuple(mask)


def _draw_options(case: Case, hand: _Hand) -> tuple[dict[str, str], dict[str, str]]:
    """Return what a GenerationConfig can hold, and what only the call can."""
    rng = hand.rng
    settings: dict[str, str] = {"do_sample": repr(rng.random() < 0.5)}
    options: dict[str, str] = {}
    if rng.random() < 0.7:
        settings["return_dict_in_generate"] = "True"
    length = {"max_new_tokens": hand.num_new, "max_length": hand.length + hand.num_new}
    if case.earlier is not None:
        length["max_length"] += len(case.earlier[0]) + 4
    for name in rng.choices([["max_new_tokens"], ["max_length"], [*length], []], [70, 25, 2, 3])[0]:
        settings[name] = repr(length[name])
    eos = rng.random()
    if eos < 0.25:
        settings["eos_token_id"] = repr(hand.token())
    elif eos < 0.4:
        settings["eos_token_id"] = repr(hand.some_tokens(4))
    if rng.random() < 0.1:
        settings["pad_token_id"] = repr(hand.token())
    density = rng.choice([0.0, 0.5, 1.0, 1.0, 2.0])  # some cases are bare, some are crowded
    for name, (chance, draw) in _CONFIG_OPTIONS.items():
        if rng.random() < chance * density:
            settings[name] = repr(draw(hand))
    for name, (chance, draw_call) in _CALL_OPTIONS.items():
        if rng.random() < chance * density:
            options[name] = draw_call(hand)
    if rng.random() < 0.06 * density:
        options["tokenizer"] = "fuzz_tokenizer()"
        options["stop_strings"] = repr(_stop_strings(hand))
    if (settings["do_sample"] == "True" and rng.random() < 0.12) or rng.random() < 0.002:
        settings["num_return_sequences"] = repr(rng.randint(2, 3))
    _mend(case, settings, options, rng)
    return settings, options


def _mend(case: Case, settings: dict[str, str], options: dict[str, str], rng: Random) -> None:
    """Take most combinations away that plain `generate` refuses or that mean nothing."""
    if rng.random() < 0.03:
        return
    if case.model["attention"] != "eager":
        settings.pop("output_attentions", None)
    if case.form == "embeds":
        for name in ("guidance_scale", "begin_suppress_tokens", "watermarking_config"):
            settings.pop(name, None)
            options.pop(name, None)
        if "max_length" in settings and "max_new_tokens" not in settings:
            settings["max_new_tokens"] = settings.pop("max_length")
    if case.form in ("embeds", "both", "none"):
        settings.pop("prefill_chunk_size", None)
    if case.earlier is not None:
        settings.pop("num_return_sequences", None)  # `generate` does not repeat a cache
        settings.pop("cache_implementation", None)
        if not _CHUNKS_AFTER_A_CACHE:
            settings.pop("prefill_chunk_size", None)
    if "num_beams" in settings:
        options.pop("streamer", None)
    if "use_cache" in settings:
        settings.pop("prefill_chunk_size", None)
        settings.pop("cache_implementation", None)
    if settings.get("no_repeat_ngram_size") == "1":
        settings["no_repeat_ngram_size"] = "2"


def _draw_places(
    case: Case, rng: Random, settings: dict[str, str], options: dict[str, str]
) -> Case:
    """Spread the settings over the call, its GenerationConfig and the model's."""
    kind = rng.random()
    places: list[dict[str, str]] = [{}, {}, {}]
    shares = (1.0, 0.0, 0.0) if kind < 0.7 else (0.2, 0.8, 0.0) if kind < 0.88 else (0.3, 0.3, 0.4)
    for name, value in settings.items():
        rng.choices(places, shares)[0][name] = value
    on_call, config, model_config = places
    if "stop_strings" in options and config and rng.random() < 0.5:
        config["stop_strings"] = options.pop("stop_strings")
    none = rng.random()
    if "eos_token_id" not in settings and none < 0.15:
        model_config["eos_token_id"] = "None"
        for place in places:
            place.pop("exponential_decay_length_penalty", None)
    elif "pad_token_id" not in settings and none < 0.2:
        model_config["pad_token_id"] = "None"
    return replace(case, options=on_call | options, config=config, model_config=model_config)


def _draw_lade(case: Case, hand: _Hand) -> Case:
    rng = hand.rng
    door = rng.choices(["generate", "wrap", "custom_generate"], [60, 20, 20])[0]
    if door == "custom_generate" and {"streamer", "tokenizer"} & case.options.keys():
        door = "generate"  # transformers drops these two on the way to a custom function
    if "+" in case.model.get("dtype", "") and rng.random() < SHARE_WITHOUT_LADE:
        door = "itself"
    sizes: dict[str, Any] = {"max_draft_tokens": rng.choice([0, 1, 2, 4, 8, 8, 16, 25])}
    if rng.random() < (0.25 if case.architecture else 0.12):
        sizes["verification"] = rng.choice(VERIFICATIONS)
    given = {}
    pools = {
        "answer": "pool_of(answer)",
        "garbage": f"pool_of(random_texts({rng.randrange(99)}, {hand.vocab_size}, 400))",
        # Of a model with more tokens: it may cost time, and may not do harm.
        "foreign": f"pool_of(random_texts({rng.randrange(99)}, {3 * hand.vocab_size}, 400))",
        "small": f"pool_of(answer, capacity_tokens={rng.randint(3, 40)})",
        "used": f"used_pool(model, {[list(_repetitive(hand, 5)) for _ in range(2)]})",
        "shared": f"used_pool(fuzz_model('llama', 5, vocab_size=57), {[hand.tokens(6)]})",
    }
    kind = rng.choices(["fresh", *pools, "drafter"], [20, 20, 10, 2, 10, 4, 2, 32])[0]
    if kind == "drafter" and door != "wrap":
        accept = rng.choice([0.0, 0.5, 0.9, 1.0])
        given["drafter"] = (
            f"ScriptDrafter(answer, {hand.vocab_size}, {accept}, {rng.randrange(99)})"
        )
        if rng.random() < SHARE_OF_MODELS:
            given["drafter"] = _draw_models(case, hand)
    else:
        if rng.random() < 0.3:
            sizes["max_candidates"] = rng.randint(1, 4)
        if kind in pools:
            given["pool"] = pools[kind]
        elif rng.random() < 0.3:
            given["pool"] = f"lade.NGramPool(1000, max_ngram_size={rng.randint(1, 7)})"
    values = ", ".join(f"{name}={value!r}" for name, value in sizes.items())
    given["config"] = f"lade.Config({values}, strict_drafter=True)"
    of_prediction = Random(f"{case.seed} {case.rows} prediction")  # other draws stay what they were
    if of_prediction.random() < SHARE_WITH_PREDICTIONS:
        how = of_prediction.choice(PREDICTIONS)
        given["prediction"] = f"predicted(answer, {how!r}, {of_prediction.randrange(99)})"
    again = "pool" in given and rng.random() < 0.1
    returned = case.setting("return_dict_in_generate") == "True"
    follow_up = rng.choice(["plain", "lade"]) if returned and rng.random() < 0.15 else ""
    return replace(case, door=door, lade=given, num_calls=1 + again, follow_up=follow_up)


def _draw_models(case: Case, hand: _Hand) -> str:
    """Return an expression for a drafter that is a model, or of several parts."""
    rng = hand.rng
    options = f"length={rng.choice([None, None, 1, 3, 6])!r}"
    family, seed = rng.choice(FAMILIES), rng.randrange(NUM_MODELS)
    assistant = f"AssistantModel(fuzz_model({family!r}, {seed}, {hand.vocab_size}), {options})"
    layers = f"FirstLayers(1, {options})"
    # Some architectures have no layers that can be found, and refuse.
    parts = [assistant] if case.architecture else [assistant, layers]
    if rng.random() < 0.4:
        return rng.choice(parts)
    return f"Merged([CallPool(), {', '.join(rng.sample(parts, rng.randint(1, len(parts))))}])"


def _draw_more(case: Case, hand: _Hand) -> Case:
    """Draw what lade is seldom given, and what it seldom knows of a model."""
    rng = hand.rng
    if rng.random() >= SHARE_OF_MORE:
        return case
    given, profile = dict(case.lade), {}
    kind = rng.choice(["prewarmed", "watch", "nested", "nested"])
    if kind == "prewarmed":
        table = f"random_table({rng.randrange(99)}, {hand.vocab_size})"
        profile["found"] = f"{{'prewarmed': {table}}}"
        given.pop("drafter", None)
    elif kind == "nested" and not case.architecture:
        case = _draw_nested(case, rng)
        given = dict(case.lade)
    if kind == "watch" or rng.random() < 0.3:
        profile["proofs"] = f"proofs_after({rng.randint(0, 2)})"
    return replace(case, lade=given, profile=profile)


def _draw_nested(case: Case, rng: Random) -> Case:
    """Let a callback call the model."""
    kind = rng.choice(["forward", "generate", "lade"])
    if rng.random() < 0.5 and _LIST not in case.options:
        processor = f"LogitsProcessorList([NestedProcessor(log, model, {kind!r})])"
        return replace(case, options=case.options | {_LIST: processor})
    pool = ", pool" if kind == "lade" and "pool" in case.lade else ""
    return replace(case, lade=case.lade | {"on_step": f"NestedStep(model, {kind!r}{pool})"})


def _draw_what_happens(case: Case, hand: _Hand) -> Case:
    """Draw what happens to a copy of the model before the compared call."""
    rng = hand.rng
    rows = [list(_repetitive(hand, 5)) for _ in case.rows]
    if len(rows) > 1 or any(0 in row for row in case.mask or ()):
        rows = [[0, *row[1:]] for row in rows[:1]] + rows[:2]
    events = [f"used(model, {rows})"] if rng.random() < 0.9 else []
    case = _draw_changes(case, hand, rows, events)
    return replace(case, events=tuple(events))


def _draw_changes(case: Case, hand: _Hand, rows: list[list[int]], events: list[str]) -> Case:
    """Add one or more changes of the model to the events."""
    rng = hand.rng
    makers: dict[str, Callable[[], list[str]]] = {
        "hook": lambda: [f"hooked(model, {rng.choice(_HOOKS)!r}, {hand.whole(0, 15)})"],
        "copy": lambda: [f"copied(model, {rng.choice(['deepcopy', 'deepcopy', 'pickle'])!r})"],
        "weights": lambda: [f"swapped(model, {hand.whole(0, 99)}, {rng.random() < 0.5})"],
        "module": lambda: [f"exchanged(model, {hand.whole(0, 99)})"],
        "wrap": lambda: [f"wrapped(model, {rows}, {rng.random() < 0.4})"],
        "degenerate": lambda: _degenerate(hand, rows),
        "compile": lambda: ["compiled(model)"],
        "failing": lambda: [f"failing(model, {rng.choice([0, 1, 2, 5, 12, 20, 30])})"],
        "adapter": lambda: [f"adapted(model, {rng.choice(_ADAPTERS)!r}, {hand.whole(0, 99)})"],
        "dtype": lambda: ["converted(model, 'float32')"],
        "quantize": lambda: ["quantized(model)"],
        "train": lambda: ["trained(model)"],
    }
    weights = [20, 6, 8, 6, 6, 12, 6, 8, 14, 6, 14, 1]
    if case.architecture:
        names = ("hook", "copy", "weights", "module", "wrap", "degenerate")
        makers, weights = {name: makers[name] for name in names}, [20, 5, 6, 8, 6, 15]
    chunks = case.earlier is not None or case.setting("prefill_chunk_size") is not None
    nests = "on_step" in case.lade or "Nested" in case.options.get(_LIST, "")
    drawn: list[str] = []
    for name in rng.choices([*makers], weights, k=rng.choice([1, 1, 2])):
        if name == "failing" and (chunks or case.num_calls > 1):
            continue  # plain decoding runs several tokens behind a cache there, too
        if name in ("adapter", "train") and nests:
            continue  # PEFT changes the model for the time of a call; dropout draws
        if name in drawn or (drawn and {name, *drawn} & {"quantize", "adapter", "dtype"}):
            continue  # packages know each other's models less than lade does
        made = makers[name]()
        if name == "failing" and "FirstLayers" in case.lade.get("drafter", ""):
            # These are the model's own: it is their drafter that fails, which costs time alone.
            config = case.lade["config"].replace("strict_drafter=True", "strict_drafter=False")
            case = replace(case, lade={**case.lade, "config": config})
        if name == "quantize":
            case = replace(case, model={**case.model, "dtype": "float32"})
        if name == "dtype" and rng.random() < 0.3 and not _is_eager(case.model):
            made = [*made, *([events[-1]] if events else []), "converted(model, 'float64')"]
        if name == "hook" and rng.random() < 0.25:
            made = [*made, f"used(model, {rows})", "unhooked(model)"]
        if name == "adapter" and rng.random() < 0.25:
            made = [*made, f"used(model, {rows})", "unadapted(model)"]
        events += made
        drawn.append(name)
    return case


def _degenerate(hand: _Hand, rows: list[list[int]]) -> list[str]:
    """Return events by which weights tell nothing when lade first looks, and mostly do later."""
    kind, number = hand.rng.choice(("zero", "equal", "huge", "one nan")), hand.whole(0, 30)
    made = ["copied(model, 'deepcopy')", f"degenerate(model, {kind!r}, {number})"]
    later = [f"used(model, {rows})", "regenerated(model)"]
    return made + later * (hand.rng.random() < 0.75)


_HOOKS = ("last", "single")
_ADAPTERS = ("lora", "lora", "ia3", "prompt", "prefix", "own")
