"""What lade does with weight formats: a tiny model in each, against its own `generate`.

The formats are those that people load models in: some made by packages of their own, and all that
the installed transformers knows. Whatever cannot be made here says why. A second model, large
enough that products take the time, tells what a forward over more tokens costs in each.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module, metadata
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import DynamicCache
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from lade import DecodeStats
from tests.support.inside import CACHE, environment
from tests.support.report import VERDICTS, reason_of, short
from tests.support.run import CASES, Case, Row, Verdict, check_model, quiet
from tests.support.tiny import Model, error_line, tiny_model

MODEL_TYPE = "llama"
#: Of the tiny model: the smallest sizes that all formats take, whose groups are of 32 to 128.
TINY: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "vocab_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
#: Of the model that is timed: 47 million weights, all but two million in the layers that are
#: quantized.
TIMED: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "vocab_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
#: Numbers of tokens of the forwards that are timed.
WIDTHS = (1, 2, 4, 8, 16, 32)
NUM_REPEATS = 9
#: Number of tokens whose logits are compared, of forwards over one token and over all of them.
NUM_COMPARED = 64
HEADINGS = (
    *("format", "activations", "one row", "batch", "MAT", "rounding", "text"),
    "1 token, ms",
    *(f"{width}" for width in WIDTHS[1:]),
    "why no better method",
)

Build = Callable[[Model], Model]  # from a model in float; that one may be changed


class Format(NamedTuple):
    """One weight format, and how a model gets it."""

    name: str
    build: Build
    package: str | None = None  # what makes it, beside torch and transformers
    method: str | None = None  # its name in transformers
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)  # of activations


@dataclass(slots=True)
class FormatRow:
    """Findings on one format with activations of one dtype."""

    name: str
    package: str | None = None  # with its version, if it is installed
    dtype: str | None = None  # of activations; None if the format cannot be made in any
    why_not: str | None = None  # why no model was made
    check: Row | None = None  # how drafts are verified, and whether the text is plain's
    #: In half precision: by how much of the largest logit a forward over more tokens moves some
    #: logit, with no draft and nothing of lade.
    rounding: float | None = None
    sec: float | None = None  # of a forward over one token of the larger model
    #: By number of tokens: seconds of a forward, relative to one token's.
    costs: dict[int, float] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        """The worst of the findings; a tie is as wide as the model's own rounding."""
        if self.check is None:
            return "not compared"
        if self.check.verdict != "wrong" or self.rounding is None:
            return self.check.verdict
        # Both of the best two logits may have moved.
        gaps = [difference.gap for difference in self.check.differences]
        is_tie = all(gap is not None and gap <= 2 * self.rounding for gap in gaps)
        return "tie" if is_tie else "wrong"

    @property
    def is_bad(self) -> bool:
        """Whether lade is at fault."""
        return self.verdict in ("wrong", "failed")


def _by_transformers(method: str, **options: Any) -> Build:
    """Return how to load a model with a quantization config of transformers."""

    def build(model: Model) -> Model:
        config = AUTO_QUANTIZATION_CONFIG_MAPPING[method](**options)
        with TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            loaded: Any = type(model).from_pretrained(
                folder, quantization_config=config, dtype=model.dtype
            )
        return loaded.eval()

    return build


def _dynamic(model: Model) -> Model:
    quantize: Any = torch.ao.quantization.quantize_dynamic
    return quantize(model, {nn.Linear}, torch.qint8)


def _torchao(kind: str, **options: Any) -> Build:
    """Return how to quantize with a config of torchao; strings name members of its module."""

    def build(model: Model) -> Model:
        torchao = import_module("torchao.quantization")
        made = {
            name: value(torchao) if callable(value) else value for name, value in options.items()
        }
        torchao.quantize_(model, getattr(torchao, kind)(**made))
        return model

    return build


def _quanto(kind: str) -> Build:
    def build(model: Model) -> Model:
        quanto = import_module("optimum.quanto")
        quanto.quantize(model, weights=getattr(quanto, kind))
        quanto.freeze(model)
        return model

    return build


def _hqq(num_bits: int) -> Build:
    def build(model: Model) -> Model:
        settings = import_module("hqq.core.quantize").BaseQuantizeConfig(num_bits, group_size=64)
        kind = import_module("hqq.models.hf.base").AutoHQQHFModel
        kind.quantize_model(model, settings, compute_dtype=model.dtype, device="cpu")
        return model

    return build


def _compressed_tensors(preset: str, **activations: Any) -> Build:
    """Return how to quantize to the nearest value, save, and load as transformers does."""

    def build(model: Model) -> Model:
        library = import_module("compressed_tensors.quantization")
        scheme = library.preset_name_to_scheme(preset, ["Linear"])
        if activations:
            scheme.input_activations = library.QuantizationArgs(**activations)
        config = library.QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"])
        library.apply_quantization_config(model, config)
        for module in model.modules():
            if hasattr(module, "quantization_scheme"):
                _calibrate(module, library)
        packer = import_module("compressed_tensors.compressors").ModelCompressor
        packer = packer.from_pretrained_model(model)
        with TemporaryDirectory() as folder, torch.no_grad():
            packer.compress_model(model)
            model.save_pretrained(folder)
            packer.update_config(folder)
            loaded: Any = type(model).from_pretrained(folder, dtype=model.dtype)
        return loaded.eval()

    return build


def _calibrate(module: Any, library: Any) -> None:
    """Set scales and zero points of a layer from the range of its weights."""
    settings = module.quantization_scheme.weights
    groups = module.weight.detach()[:, None]
    if settings.group_size:
        groups = groups.reshape(len(groups), -1, settings.group_size)
    utils = import_module(f"{library.__name__}.utils")
    made = utils.calculate_qparams(groups.amin(-1), groups.amax(-1), settings)
    for name, values in zip(("weight_scale", "weight_zero_point"), made, strict=True):
        if hasattr(module, name):
            getattr(module, name).data.copy_(values)
    module.quantization_status = library.QuantizationStatus.FROZEN


_INT4: Any = vars(torch)["int4"]  # which torch's types do not have
_PER_TENSOR = {"num_bits": 8, "strategy": "tensor", "dynamic": True}
_BNB = partial(Format, package="bitsandbytes")
_AO = partial(Format, package="torchao", method="torchao")
_QUANTO = partial(Format, package="optimum-quanto", method="quanto")
_HQQ = partial(Format, package="hqq", method="hqq")
_CT = partial(Format, package="compressed-tensors", method="compressed-tensors")
#: Formats with names of their own; `all_formats` adds the others that transformers knows.
FORMATS = [
    Format("not quantized", lambda model: model),
    Format("torch.ao dynamic int8", _dynamic, dtypes=(torch.float32,)),
    _BNB(
        "bitsandbytes int8",
        _by_transformers("bitsandbytes_8bit", load_in_8bit=True),
        method="bitsandbytes_8bit",
    ),
    _BNB(
        "bitsandbytes int8, threshold 0",
        _by_transformers("bitsandbytes_8bit", load_in_8bit=True, llm_int8_threshold=0.0),
        method="bitsandbytes_8bit",
    ),
    *(
        _BNB(
            f"bitsandbytes {kind}",
            _by_transformers("bitsandbytes_4bit", load_in_4bit=True, bnb_4bit_quant_type=kind),
            method="bitsandbytes_4bit",
        )
        for kind in ("nf4", "fp4")
    ),
    _AO("torchao int8 weights", _torchao("Int8WeightOnlyConfig")),
    _AO("torchao int8, activations per token", _torchao("Int8DynamicActivationInt8WeightConfig")),
    _AO(
        "torchao int8, activations per tensor",
        _torchao(
            "Int8DynamicActivationInt8WeightConfig", granularity=lambda torchao: torchao.PerTensor()
        ),
    ),
    _AO("torchao int4 weights", _torchao("Int4WeightOnlyConfig", group_size=64)),
    _AO(
        "torchao int4 weights, unpacked",
        _torchao(
            "IntxWeightOnlyConfig",
            weight_dtype=_INT4,
            granularity=lambda torchao: torchao.PerGroup(64),
        ),
    ),
    _AO(
        "torchao int4 weights, int8 activations per token",
        _torchao(
            "Int8DynamicActivationIntxWeightConfig",
            weight_dtype=_INT4,
            weight_granularity=lambda torchao: torchao.PerGroup(64),
        ),
    ),
    _AO("torchao float8 weights", _torchao("Float8WeightOnlyConfig")),
    _AO("torchao float8, activations too", _torchao("Float8DynamicActivationFloat8WeightConfig")),
    *(
        _QUANTO(f"quanto {kind[1:]} weights", _quanto(kind))
        for kind in ("qint8", "qint4", "qfloat8")
    ),
    *(_HQQ(f"HQQ int{num_bits} weights", _hqq(num_bits)) for num_bits in (8, 4)),
    _CT("compressed-tensors W8A16", _compressed_tensors("W8A16")),
    _CT("compressed-tensors W4A16", _compressed_tensors("W4A16")),
    _CT("compressed-tensors W8A8", _compressed_tensors("W8A8")),
    _CT("compressed-tensors FP8", _compressed_tensors("FP8_DYNAMIC")),
    _CT(
        "compressed-tensors W8A8, activations per tensor",
        _compressed_tensors("W8A8", **_PER_TENSOR),
    ),
]
#: Options without which a config of transformers cannot be made.
_OPTIONS: Mapping[str, Mapping[str, Any]] = {"gptq": {"bits": 4}}


def all_formats() -> dict[str, Format]:
    """Return every format by its name: those of `FORMATS`, then transformers' others."""
    named = {each.method for each in FORMATS}
    others = [
        Format(method, _by_transformers(method, **_OPTIONS.get(method, {})), method=method)
        for method in sorted(AUTO_QUANTIZATION_CONFIG_MAPPING.keys() - named)
    ]
    return {each.name: each for each in (*FORMATS, *others)}


def run_formats(names: Sequence[str], *, seed: int = 0) -> Iterator[FormatRow]:
    """Check formats of `all_formats` in turn; whatever one of them does, the run goes on."""
    known = all_formats()
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"expected weight formats of {[*known]}, got {', '.join(unknown)}")
    for name in names:
        yield from run_format(known[name], seed=seed)


def run_format(
    kind: Format, *, cases: Sequence[Case] = CASES, seed: int = 0, is_timed: bool = True
) -> list[FormatRow]:
    """Check one format; return a row for each dtype, or a single one if no model can be made."""
    try:
        package = kind.package and f"{kind.package} {metadata.version(kind.package)}"
    except metadata.PackageNotFoundError:
        return [FormatRow(kind.name, why_not=f"it needs the package {kind.package}")]
    rows = []
    with quiet(), torch.random.fork_rng(devices=[]):
        for dtype in kind.dtypes:
            row = FormatRow(kind.name, package, str(dtype).removeprefix("torch."))
            try:
                model = kind.build(tiny_model(MODEL_TYPE, seed=seed, dtype=dtype, **TINY))
            except Exception as error:  # packages, devices: whatever it says is the reason
                is_made_elsewhere = "model to be pre-quantized" in str(error)
                loaded = "transformers only loads weights that are in it already"
                row.why_not = loaded if is_made_elsewhere else error_line(error)
            else:
                _fill(row, kind, model, cases, seed)
                if is_timed and row.check is not None and row.check.compared:
                    large = tiny_model(MODEL_TYPE, seed=seed, dtype=dtype, **TIMED)
                    seconds = _seconds(kind.build(large))
                    row.sec = seconds.pop(1)
                    row.costs = {width: each / row.sec for width, each in seconds.items()}
            rows.append(row)
    if len({row.why_not for row in rows}) == 1 and rows[0].why_not is not None:
        return [FormatRow(kind.name, package, why_not=rows[0].why_not)]
    return rows


def _fill(row: FormatRow, kind: Format, model: Model, cases: Sequence[Case], seed: int) -> None:
    """Compare a model with its own `generate`."""
    row.check = Row(kind.name, MODEL_TYPE, type(model).__name__)
    stats = DecodeStats()
    if model.dtype != torch.float32:  # where rounding decides some draws
        cases = [case for case in cases if not case.is_sampled]
        row.rounding = _rounding(model)
    check_model(row.check, model, cases, seed, stats)
    row.check.add(stats)


@torch.no_grad()
def _rounding(model: Model) -> float:
    """Return the largest difference of logits between forwards over one token and over many."""
    token_ids = torch.arange(NUM_COMPARED)[None] % TINY["vocab_size"]
    together = model(input_ids=token_ids, use_cache=False).logits[0].double()
    cache = DynamicCache(config=model.config)
    alone = torch.cat(
        [
            model(input_ids=token_id[None], **{CACHE: cache}).logits[0].double()
            for token_id in token_ids[0, :, None]
        ]
    )
    return float(((together - alone).abs().amax(-1) / alone.amax(-1)).max())


@torch.no_grad()
def _seconds(model: Model) -> dict[int, float]:
    """Return the seconds of a forward, by its number of tokens; the least of some repeats."""
    found = dict.fromkeys(WIDTHS, float("inf"))
    for repeat in range(-1, NUM_REPEATS):
        for width in WIDTHS:  # in turn, so that what slows the machine down slows all of them
            token_ids = torch.arange(2, 2 + width)[None]
            started = perf_counter()
            model(input_ids=token_ids, use_cache=False)
            if repeat >= 0:  # the first one is a warm-up
                found[width] = min(found[width], perf_counter() - started)
    return found


def summary(rows: Sequence[FormatRow]) -> dict[str, int]:
    """Return the numbers of formats, of models made, of those that speculate, and by verdict."""
    made = [row.check for row in rows if row.check is not None]
    verdicts = [row.verdict for row in rows]
    return {
        "formats": len({row.name for row in rows}),
        "models": len(made),
        "speculate": sum(check.speculates for check in made),
        **{name: verdicts.count(name) for name in VERDICTS},
    }


def cells(row: FormatRow) -> tuple[str, ...]:
    """Return the cells of a row as text."""
    check = row.check
    if check is None:
        nothing = [""] * (len(HEADINGS) - 3)
        return (row.name, row.dtype or "", *nothing, short(row.why_not or ""))
    found = [f"differs: {difference}" for difference in check.differences]
    found += [f"{case}: {short(error)}" for case, error in check.failures.items()]
    plain = dict.fromkeys(check.plain_failures.values())
    found += [f"plain generate fails ({short(error)})" for error in plain]
    return (
        row.name,
        row.dtype or "",
        check.kind,
        check.batch_verification or "",
        "" if check.mat is None else f"{check.mat:.2f}",
        "" if row.rounding is None else f"{row.rounding:.1%}",
        "; ".join([row.verdict, *found]),
        "" if row.sec is None else f"{1000 * row.sec:.1f}",
        *(f"{row.costs[width]:.2f}" if width in row.costs else "" for width in WIDTHS[1:]),
        reason_of(check),
    )


def content_of(rows: Sequence[FormatRow], seed: int, stopped: bool) -> dict[str, Any]:
    """Return what a result file has: the counts, and the table's rows."""
    settings = {
        "seed": seed,
        "cases": [case.name for case in CASES],
        "tiny": TINY,
        "timed": TIMED,
        "num_repeats": NUM_REPEATS,
        "num_compared": NUM_COMPARED,
        "interrupted": stopped,
    }
    return {
        "environment": environment(),
        "settings": settings,
        "summary": summary(rows),
        "headings": [*HEADINGS],
        "packages": sorted({row.package for row in rows if row.package}),
        "formats": [[*cells(row)] for row in rows],
    }
