"""Models of GGUF files, whose weights stay in the file's blocks, memory-mapped.

The config is made of its header (`converted.py`), the tokenizer by transformers, unless they are
beside it. A file is checked first: everything that its header names must be in it, and is used.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, get_tensor_name_map
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
)

from lade.compat import end_tokens
from lade.errors import UserError
from lade.forward import words
from lade.forward.blocks import Blocks, refuse
from lade.forward.experts import PARTS, STACKS
from lade.forward.packed import PackedEmbedding, PackedLinear, PackedStack, unpacked
from lade.models.converted import (
    ANGLES,
    GROUPED,
    RAISED,
    TURNED,
    architecture_of,
    check_angles,
    config_of,
)

_F32, _MOST_DIMENSIONS = 0, 4
# Most entries of a list in a header: no vocabulary has more tokens.
_MOST_ENTRIES = 2**24
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_SCALARS |= {12: "d"}
_STRING, _ARRAY = 8, 9
_EXPERTS = "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"
_ALTERNATING = "gpt_oss"  # whose module has the columns of gate and up by turns


class Stored(NamedTuple):
    """A tensor of a file."""

    shape: tuple[int, ...]  # as torch has it
    format: int  # GGML's number
    start: int  # in the file
    num_bytes: int


class GgufHeader(NamedTuple):
    """The checked header of a file."""

    settings: dict[str, Any]  # numbers, texts and lists of them
    tensors: dict[str, Stored]


# --- the file -------------------------------------------------------------------------------------


class _HeaderReader:
    """Reads a header in order, and nothing beyond the file."""

    def __init__(self, blob: Any) -> None:
        self._blob, self.offset = blob, 0

    def number(self, kind: str) -> Any:
        (number,) = struct.unpack_from(f"<{kind}", self._blob, self.offset)
        self.offset += struct.calcsize(f"<{kind}")
        return number

    def text(self) -> str:
        return self._bytes(self.number("Q")).decode()

    def _bytes(self, size: int) -> bytes:
        start, self.offset = self.offset, self.offset + size
        if self.offset > len(self._blob):
            raise ValueError(f"a text of {size:,} bytes ends beyond the file")
        return bytes(self._blob[start : self.offset])

    def value(self) -> Any:
        """Return a number, a text or a list of such."""
        kind = self.number("I")
        if kind != _ARRAY:
            return self._one(kind)
        of, num = self.number("I"), self.number("Q")
        if num > _MOST_ENTRIES:
            raise ValueError(f"it has a list of {num:,} entries")
        if of in _SCALARS:
            numbers = self._bytes(num * struct.calcsize(f"<{_SCALARS[of]}"))
            return [*struct.unpack(f"<{num}{_SCALARS[of]}", numbers)]
        return [self._one(of) for _ in range(num)]

    def _one(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind not in _SCALARS:
            raise ValueError(f"it has a value of type {kind}, which is none of GGUF's")
        return self.number(_SCALARS[kind])


def header_of(path: Path) -> GgufHeader:
    """Read and check the header of a file.

    Raises:
        UserError: it is no whole GGUF file, or has tensors of a format that is not read.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as blob:
            return _header(_HeaderReader(blob), len(blob))
    except (ValueError, struct.error) as error:  # a file of no bytes cannot be mapped
        size = path.stat().st_size
        raise UserError(
            f"expected a whole GGUF file, got {path} of {size:,} bytes: {error}"
        ) from error


def _header(read: _HeaderReader, size: int) -> GgufHeader:
    if read.number("4s") != b"GGUF" or read.number("I") not in (2, 3):
        raise ValueError("it does not begin as one of version 2 or 3")
    num_tensors, num_settings = read.number("Q"), read.number("Q")
    if max(num_tensors, num_settings) > _MOST_ENTRIES:
        raise ValueError(f"its header names {num_tensors:,} tensors and {num_settings:,} settings")
    settings: dict[str, Any] = {}
    for _ in range(num_settings):
        name = read.text()
        settings[name] = read.value()
    if settings.get("split.count", 1) not in (0, 1):
        raise ValueError("it is a part of one; join the parts with llama-gguf-split --merge")
    listed = []
    for _ in range(num_tensors):
        name, num_dimensions = read.text(), read.number("I")
        if not 0 < num_dimensions <= _MOST_DIMENSIONS:
            raise ValueError(f"the tensor {name!r} has {num_dimensions:,} dimensions")
        sizes = [read.number("Q") for _ in range(num_dimensions)]
        listed.append((name, tuple(reversed(sizes)), read.number("I"), read.number("Q")))
    unit = settings.get("general.alignment", 32)
    if type(unit) is not int or not 0 < unit <= 2**16 or unit % 8:
        raise ValueError(f"its data is aligned to {unit!r} bytes")
    first = -(-read.offset // unit) * unit
    tensors: dict[str, Stored] = {}
    for name, shape, format_, offset in listed:
        if format_ not in words.BLOCKS:
            known = {each.value: each.name for each in GGMLQuantizationType}
            raise ValueError(
                f"the tensor {name!r} is of GGML's type {known.get(format_, format_)}, and "
                f"{', '.join(name for name, *_ in words.BLOCKS.values())} are read"
            )
        numbers, in_bytes = (1, 4) if format_ == _F32 else words.BLOCKS[format_][1:]
        num_bytes = math.prod(shape) // numbers * in_bytes
        is_whole = min(shape) > 0 and shape[-1] % numbers == 0 and offset % unit == 0
        if not is_whole or name in tensors or first + offset + num_bytes > size:
            raise ValueError(
                f"the tensor {name!r} of shape {[*shape]} has {num_bytes:,} bytes from "
                f"{first + offset:,} on, or is there twice"
            )
        tensors[name] = Stored(shape, format_, first + offset, num_bytes)
    return GgufHeader(settings, tensors)


# --- the model and its tokenizer ------------------------------------------------------------------


def load_gguf(
    path: Path, *, trust_remote_code: bool = False, dtype: Any = None, device: Any = None
) -> Any:
    """Return a causal LM whose matrices stay in the blocks of a file, or made whole in a dtype.

    Raises:
        UserError: the file is damaged, or has a key or tensor that is not read.
    """
    header = header_of(path)
    settings, tensors = header.settings, header.tensors
    made = architecture_of(path, settings)
    name = settings["general.architecture"]
    numbers = {each.split(".")[1] for each in tensors if each.startswith("blk.")}
    num_layers = settings.get(f"{name}.block_count")
    if num_layers != len(numbers) or "token_embd.weight" not in tensors:
        raise UserError(
            f"expected {num_layers} layers and 'token_embd.weight' in {path}, got other"
        )
    beside, options = path.parent, dict[str, Any](trust_remote_code=trust_remote_code)
    if (beside / "config.json").is_file():
        config = AutoConfig.from_pretrained(beside, **options)
        text = config.get_text_config(decoder=True)
        if type(text) in MODEL_FOR_CAUSAL_LM_MAPPING:  # a file has no images' part
            config = text
        if config.model_type not in made.types:
            raise UserError(
                f"expected a config.json of {' or '.join(made.types)} beside {path}, whose tensors "
                f"were converted as {name}, got {config.model_type}"
            )
    else:
        config = config_of(path, settings, _shapes_of(path, tensors))
    if hasattr(config, "quantization_config"):  # nothing is dequantized
        del config.quantization_config
    config.tie_word_embeddings = "output.weight" not in tensors
    _check_sizes(path, header, config)
    options["dtype"] = dtype or torch.float32
    if dtype is None:  # others run all experts at once, which would make their weights whole
        options["experts_implementation"] = "eager"
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, **options)
    for module in model.modules():  # such as angles, which no file has
        buffers = module._buffers
        if any(each is not None and each.is_meta for each in buffers.values()):
            buffers.update({n: torch.empty_like(b, device="cpu") for n, b in buffers.items()})
            model._init_weights(module)
    check_angles(path, settings, tensors, model)
    # Nothing is written, so processes share the pages of the file.
    blob = torch.from_numpy(np.memmap(path, np.uint8, "c"))
    _Filler(path, header, model, made.changes, dtype, device, blob).fill()
    if (beside / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(beside)
    else:
        _end_at(model.generation_config, settings)
    if dtype is None:
        if not any(each.is_floating_point() for each in model.parameters()):
            # OLMo has no other weights than matrices, and transformers asks one for the dtype.
            none = torch.empty(0, dtype=torch.float32, device="cpu")
            model.register_parameter("of_dtype", torch.nn.Parameter(none, False))
        for method in ("save_pretrained", "resize_token_embeddings"):
            vars(model)[method] = refuse
    return model.to(device).eval()


def _shapes_of(path: Path, tensors: dict[str, Stored]) -> dict[str, Any]:
    """Return shapes by the names of tensors, and the numbers of tensors that hold angles."""
    found = dict[str, Any]()
    for name, stored in tensors.items():
        found[name] = stored.shape
        if name.split(".")[0] in ANGLES:
            if stored.format != _F32:
                raise UserError(f"expected {name!r} in {path} in F32, got another format")
            found[name] = np.fromfile(path, np.float32, math.prod(stored.shape), "", stored.start)
    return found


def _end_at(config: Any, settings: dict[str, Any]) -> None:
    """Let texts end at each token that a file ends texts, turns or messages with."""
    found: list[Any] = [*end_tokens(config)]
    found += [settings.get(f"tokenizer.ggml.{each}_token_id") for each in ("eos", "eot", "eom")]
    ends = [*dict.fromkeys(each for each in found if each is not None)]
    config.eos_token_id = ends if len(ends) > 1 else ends[0] if ends else None


def _check_sizes(path: Path, header: GgufHeader, config: Any) -> None:
    """Refuse sizes of the config that no tensor of the file has, before a model is made of them."""
    largest = max(max(each.shape) for each in header.tensors.values())
    text = config.get_text_config(decoder=True)
    names = ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "num_attention_heads")
    for name in (*names, "num_key_value_heads"):
        size = vars(text).get(text.attribute_map.get(name, name))  # some differ between layers
        if size is not None and not (isinstance(size, int) and 0 < size <= largest):
            raise UserError(f"expected {name} of at most {largest:,} in {path}, got {size}")
    num_experts = vars(text).get("num_experts") or vars(text).get("num_local_experts")
    chosen = vars(text).get("num_experts_per_tok")
    if num_experts and not (isinstance(chosen, int) and 0 < chosen <= num_experts):
        raise UserError(f"expected 1 to {num_experts} experts of a token in {path}, got {chosen}")


@dataclass(frozen=True, slots=True)
class _Filler:
    """Puts the tensors of a file in a model whose parameters have no memory yet."""

    path: Path  # of the file
    header: GgufHeader  # of it
    model: Any
    changes: str  # of the tensors, see `Architecture`
    dtype: Any  # of whole weights; None leaves them in blocks
    device: Any  # of whole weights
    blob: Any  # the file's bytes

    def fill(self) -> None:
        names = self._names(self.header.settings["general.architecture"])
        stacked: dict[str, dict[str, Stored]] = {}
        for name, stored in self.header.tensors.items():
            part = ".".join(name.removesuffix(".weight").split(".")[2:])
            if part.removesuffix(".bias") in _EXPERTS:
                stacked.setdefault(name.split(".")[1], {})[part] = stored
            elif name in names:
                self._put(name, names[name], stored)
            elif name.split(".")[0] not in ANGLES:
                raise UserError(
                    f"{type(self.model).__name__} has no parameter for {name!r} of {self.path}"
                )
        self._stack(stacked)
        if self.model.config.tie_word_embeddings:
            self._tie()
        missing = [name for name, each in self.model.named_parameters() if each.is_meta]
        if missing:
            raise UserError(f"expected a tensor for {missing[0]} in {self.path}, got none")

    def _stack(self, stacked: dict[str, dict[str, Stored]]) -> None:
        """Let modules index packed stacks by expert, given those of each layer of the file."""
        for name, module in self.model.named_modules():
            if STACKS[0] not in module._parameters:
                continue
            found = stacked.pop(next(each for each in name.split(".") if each.isdigit()), {})
            stored = [found[kind] for kind in _EXPERTS if kind in found]
            biases = [found[f"{kind}.bias"] for kind in _EXPERTS if f"{kind}.bias" in found]
            num, inner, hidden = (
                stored[0].shape if stored and len(stored[0].shape) == 3 else (0,) * 3
            )
            shapes: list[Any] = [(num, inner, hidden)] * 2 + [(num, hidden, inner)]
            if module._parameters.get(STACKS[2]) is not None:
                shapes += [each[:2] for each in shapes]
            wanted = [module._parameters[each].shape for each in STACKS[:2]]
            is_across = wanted == [(num, hidden, 2 * inner), (num, inner, hidden)]
            is_known = is_across or wanted == [(num, 2 * inner, hidden), (num, hidden, inner)]
            got = [each.shape for each in (*stored, *biases)]
            if not is_known or got != shapes or any(each.format != _F32 for each in biases):
                raise UserError(
                    f"expected {', '.join(_EXPERTS)} for {name}, {[*map(tuple, wanted)]}, in "
                    f"{self.path}, got {got}"
                )
            alternates = self.model.config.model_type == _ALTERNATING
            lies = words.LIE_ACROSS * is_across | words.ALTERNATE * alternates
            blocks = [nn.Parameter(self._raw(x).view(*x.shape[:2], -1), False) for x in stored]
            formats = [each.format for each in stored]
            stacks = (
                PackedStack(blocks[:2], formats[:2], hidden, lies),
                PackedStack(blocks[2:], formats[2:], inner, lies),
            )
            if self.dtype is None:
                module._parameters.update(zip(PARTS[:3], blocks, strict=True))
            for stack, packed in zip(STACKS[:2], stacks, strict=True):
                del module._parameters[stack]
                if self.dtype is None:
                    vars(module)[stack] = packed
                else:
                    whole = torch.stack([self._whole(packed[each]) for each in range(num)])
                    module._parameters[stack] = nn.Parameter(whole, requires_grad=False)
            if biases:
                self._put_biases(module, biases, lies)
        if stacked:
            raise UserError(
                f"{type(self.model).__name__} has no experts for layer {min(stacked)} of "
                f"{self.path}"
            )

    def _put_biases(self, module: Any, stored: list[Stored], lies: int) -> None:
        """Give experts their biases: as the module wants them, and as jobs do."""
        gate, up, down = (self._raw(x).view(torch.float32).view(x.shape) for x in stored)
        both = torch.cat((gate, up), dim=1)
        wanted = torch.stack((gate, up), dim=2).flatten(1) if lies & words.ALTERNATE else both
        for name, each in zip((PARTS[3], *STACKS[2:]), (both, wanted, down), strict=True):
            if self.dtype is None or name in STACKS:
                module._parameters[name] = nn.Parameter(self._whole(each), False)

    def _whole(self, numbers: Any) -> Any:
        return numbers if self.dtype is None else numbers.to(self.device, self.dtype)

    def _raw(self, stored: Stored) -> Any:
        return self.blob[stored.start : stored.start + stored.num_bytes]

    def _names(self, architecture: str) -> dict[str, str]:
        """Return names of parameters, by names of tensors."""
        known = {name: number for number, name in MODEL_ARCH_NAMES.items()}
        number = self.model.config.get_text_config(decoder=True).num_hidden_layers
        names = get_tensor_name_map(known[architecture], number)
        found = {}
        for full_name, _ in self.model.named_parameters(remove_duplicate=False):
            module_name, _, attribute = full_name.rpartition(".")
            found[f"{names.get_name(module_name)}.{attribute}"] = full_name
            found[f"{names.get_name(full_name)}.weight"] = full_name
        for full_name, _ in self.model.named_buffers():
            found[f"{names.get_name(full_name)}.weight"] = full_name
        return found

    def _put(self, name: str, full_name: str, stored: Stored) -> None:
        module_name, _, attribute = full_name.rpartition(".")
        module = self.model.get_submodule(module_name)
        shape = getattr(module, attribute).shape
        if [x for x in stored.shape if x > 1] == [x for x in shape if x > 1]:
            stored = stored._replace(shape=tuple(shape))  # files leave out dimensions of 1
        if stored.shape != shape:
            raise UserError(
                f"expected {name!r} of shape {[*shape]} in {self.path}, as "
                f"{type(self.model).__name__} has it, got {[*stored.shape]}"
            )
        raw = self._raw(stored)
        if attribute in module._buffers and stored.format == _F32:
            module._buffers[attribute] = self._whole(raw.view(torch.float32).view(shape))
            return
        is_matrix = isinstance(module, nn.Linear | nn.Embedding) and attribute == "weight"
        order = self._order(name, shape[0])
        if is_matrix and stored.format != _F32 and self.dtype is None:
            blocks = raw.view(shape[0], -1)
            if order is not None:  # a copy
                blocks = blocks[order]
            weight = Blocks(blocks, requires_grad=False)
            self._replace(module_name, module, weight, stored.format)
            return
        rows = raw.view(shape[0] if is_matrix else 1, -1)
        made = unpacked(rows, stored.format).view(shape)
        made = made if order is None else made[order]
        if self.changes == RAISED and name.endswith("norm.weight"):
            made = made - 1
        module._parameters[attribute] = nn.Parameter(self._whole(made), requires_grad=False)

    def _order(self, name: str, num: int) -> Any:
        """Return which rows of a file become the first; None if they stand in the model's order."""
        part = (name.split(".")[2:3] or [""])[0]
        if part not in {TURNED: ("attn_q", "attn_k"), GROUPED: ("attn_qkv",)}.get(self.changes, ()):
            return None
        config = self.model.config
        rows = torch.arange(num, dtype=torch.int64, device="cpu")
        heads = config.num_key_value_heads if part == "attn_k" else config.num_attention_heads
        if num % ((3 if part == "attn_qkv" else 2) * heads):
            raise UserError(f"the rows of {name!r} in {self.path} are not those of {heads} heads")
        if part == "attn_qkv":
            return rows.view(3, heads, -1).transpose(0, 1).reshape(-1)
        return rows.view(heads, -1, 2).transpose(1, 2).reshape(-1)

    def _replace(self, module_name: str, module: Any, weight: Any, format_: int) -> None:
        if type(module) is nn.Linear:
            made: Any = PackedLinear(weight, format_, module.in_features)
            made.bias = module.bias  # which may be put in place later
        else:
            scale = getattr(module, "embed_scale", None)
            made = PackedEmbedding(weight, format_, module.embedding_dim, scale)
        self.model.set_submodule(module_name, made)

    def _tie(self) -> None:
        """Let the head have the embedding's weight."""
        table: Any = self.model.get_input_embeddings()
        head = self.model.get_output_embeddings()
        if type(table) is PackedEmbedding:
            weight: Any = table.weight
            made = PackedLinear(weight, table.ggml_type, table.embedding_dim)
            self.model.set_output_embeddings(made)
        else:
            head.weight = table.weight
