"""All private functions of transformers that lade calls, and differences between its versions.

lade calls them only where no public function suffices. They are tested on the oldest and the newest
supported version.
"""

from collections.abc import Sequence
from dis import get_instructions
from functools import cache, lru_cache, partial
from types import CodeType, FunctionType
from typing import Any

import torch
import transformers
from packaging import version
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList
from transformers.generation.utils import ALL_CACHE_NAMES

from lade.compat.attempts import Attempt

# Whether it is 5.23 or newer; versions between 5.15 and 5.23 count as 5.15, untested.
_IS_RECENT = version.parse(transformers.__version__) >= version.parse("5.23")
# Whether indexers of sparse attention take boolean masks; 5.15 adds masks to their scores.
INDEXERS_TAKE_MASKS = _IS_RECENT
# Whether `generate` marks a cache that its caller passed.
MARKS_CACHES = _IS_RECENT
# Whether `generate` asks the criteria about a token before it gives the streamer that token.
STOPS_FIRST = _IS_RECENT
# Whether a prompt that runs in chunks leaves out its cached tokens; 5.15 runs them again.
CHUNKS_GO_ON = _IS_RECENT

#: All names under which `generate` and models pass caches to each other.
CACHE_NAMES: Sequence[str] = ALL_CACHE_NAMES
#: What most call the cache; the name up to transformers 5.23, "past_key_values", is deprecated.
CACHE = CACHE_NAMES[0]

Model = Any  # a transformers PreTrainedModel with generate; transformers is untyped here


def prefill(
    model: Model, input_ids: Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]
) -> Any:
    """Run prompts as `generate` does.

    This slices a prompt whose beginning is cached, feeds embeddings and images, and splits long
    prompts into chunks.
    """
    return model._prefill(input_ids, config, dict(model_kwargs))


def parsed_template(template: str) -> Any:
    """Return a chat template's syntax tree, as transformers has jinja2 read it."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    return _compile_jinja_template(template).environment.parse(template)


def decode_standard(model: Model, input_ids: Tensor, **options: Any) -> Any:
    """Decode as `generate` does without a custom function: one token per forward pass."""
    return type(model)._sample(model, input_ids, **options)  # as `generate` looks it up


def candidate_generator(
    model: Model,
    config: GenerationConfig,
    input_ids: Tensor,
    processors: LogitsProcessorList,
    assistant: Model | None = None,
    tokenizers: tuple[Any, Any] | None = None,
) -> Any:
    """Return the candidate generator that `generate` would use.

    Args:
        config: of the call, without sampling.
        input_ids: on the device of the generator.
        tokenizers: of the model and of the assistant, if they differ.
    """
    given = config, input_ids, None, processors, {}, assistant, *(tokenizers or ())
    return model._get_candidate_generator(*given)


def attention_of(model: Model) -> str | None:
    """Return the name of the attention implementation of the model's text part."""
    name: str | None = model.config.get_text_config(decoder=True)._attn_implementation
    return name


def dtype_of(model: Model) -> torch.dtype:
    """Return the dtype of a model's states: that of its first weights, or what these compute in."""
    for module in model.modules():
        for weight in module._parameters.values():
            if weight is not None and weight.is_floating_point():
                dtype: torch.dtype = getattr(module, "computes_in", weight.dtype)
                return dtype
    found: torch.dtype = model.dtype
    return found


def end_tokens(config: Any) -> tuple[int, ...]:
    """Return the tokens that end a text, of a generation config: one, several or none."""
    ends = config.eos_token_id
    return (ends,) if isinstance(ends, int) else tuple(ends or ())


@cache
def start_compiler() -> None:
    """Compile something: at first, torch changes `nn.Module`, after which all models look new."""
    torch.compile(lambda number: number + 1, backend="eager")(
        torch.zeros(1, dtype=torch.float32, device="cpu")
    )


def experts_of(model: Model) -> set[str]:
    """Return the names of the implementations of experts in use, if transformers has several.

    "eager" loops on the host over the experts that tokens are routed to.
    """
    can_choose = getattr(model, "_can_set_experts_implementation", None)
    if can_choose is None or not can_choose():
        return set()
    return {*model.get_experts_implementation().values()}


def takes_ids_by_name(model: Model) -> bool:
    """Return whether `generate` takes a prompt as `input_ids=`, not only by position.

    transformers refuses a name that no signature of the model has; some models take `*args`.
    """
    check = getattr(model, "_validate_model_kwargs", None)  # of the base model, if PEFT wraps it
    try:
        if check is not None:
            check({"input_ids": True})
    except ValueError:
        return False
    return True


def has_custom_generate(model: Model) -> bool:
    """Return whether a model's `generate` differs from that of transformers."""
    of_model = vars(model).get("generate")
    is_patched = of_model is not None and not getattr(of_model, "is_lades", False)
    return is_patched or type(model).generate is not GenerationMixin.generate


def prepares_as_usual(model: Model) -> bool:
    """Return whether the model prepares inputs and masks of prompts as most models do.

    Otherwise, running a prompt in chunks may change it: PaliGemma's tokens see later tokens, too.
    """
    name = "prepare_inputs_for_generation"
    is_usual = getattr(type(model), name) is getattr(GenerationMixin, name)
    return is_usual and name not in vars(model) and not hasattr(model, "create_masks_for_generate")


def has_adapters(model: Model) -> bool:
    """Return whether a model or its wrapper has PEFT adapters."""
    return getattr(model, "_hf_peft_config_loaded", False) or hasattr(model, "peft_config")


def has_adapters_by_row(model: Model) -> bool:
    """Return whether PEFT chooses an adapter, or its offset, for each row of this call."""
    if not has_adapters(model):
        return False
    hooks = (hook for module in model.modules() for hook in module._forward_pre_hooks.values())
    named = ("adapter_names", "alora_offsets")
    return any(
        isinstance(each, partial) and not each.keywords.keys().isdisjoint(named) for each in hooks
    )


def hooks_of(module: nn.Module) -> list[Any]:
    """Return the hooks of a module's forward that may do something."""
    hooks = *module._forward_hooks.values(), *module._forward_pre_hooks.values()
    return [hook for hook in hooks if not does_nothing(hook)]


def has_hook(module: nn.Module) -> bool:
    """Return whether a module has hooks, torch's or accelerate's, that may do something."""
    return bool(hooks_of(module)) or hasattr(module, "_hf_hook")


def does_nothing(hook: Any) -> bool:
    """Return whether a hook does nothing when text is generated.

    Hooks of transformers that collect outputs do nothing unless outputs are requested. Hooks that
    trainers leave in a model only ask for gradients.
    """
    code = getattr(hook, "__code__", None)
    is_collecting = getattr(hook, "__module__", "").startswith("transformers.utils.")
    return is_collecting or (code is not None and _asks_for_gradients(code))


# Instructions by which a function can only call methods of its arguments.
_CALLING = ("RESUME", "LOAD_", "PUSH_NULL", "PRECALL", "CALL", "KW_NAMES", "POP_TOP", "RETURN_")


@lru_cache(64)
def _asks_for_gradients(code: CodeType) -> bool:
    """Return whether a hook's code calls `requires_grad_` of its arguments, and does nothing else.

    Whose hook it is does not matter: its code is read, and tried out on a tensor.
    """
    names = [each.opname for each in get_instructions(code)]
    is_simple = all(each.startswith(_CALLING) for each in names)
    if not is_simple or code.co_names != ("requires_grad_",) or code.co_freevars:
        return False
    with torch.no_grad(), Attempt():
        states = torch.ones(1, 1, 8, dtype=torch.float32, device="cpu")
        result = FunctionType(code, {})(nn.Identity(), (states,), states)
        return result is None or result is states
    return False


def may_be_users(cache: Any) -> bool:
    """Return whether the caller of `generate` may have passed a cache; recent versions mark it."""
    return bool(getattr(cache, "_is_user_defined", not MARKS_CACHES))


def mark_as_new(model_kwargs: dict[str, Any]) -> None:
    """Mark the cache in model arguments as made by `generate`, as recent versions do."""
    if (cache := model_kwargs.get(CACHE)) is not None:
        cache._is_user_defined = False


def placeholders_of(model: Model) -> list[int]:
    """Return the tokens that stand for images, videos and audio; invalid without these inputs."""
    kinds = ("image", "video", "audio")
    names = [f"{kind}_token_{what}" for kind in kinds for what in ("id", "index")]
    found = {getattr(model.config, name, None) for name in names}
    return sorted(token_id for token_id in found if isinstance(token_id, int))


def drops_tokens(model: Model) -> bool:
    """Return whether a model's last layers, given how many logits to keep, run for these alone."""
    return bool(getattr(model.config.get_text_config(decoder=True), "num_kv_shared_layers", 0))


def without_compiler(model: Model) -> Model:
    """Return the model inside a `torch.compile` wrapper, which is the one that `generate` runs."""
    return getattr(model, "_orig_mod", model)


def unwrapped(model: Model) -> Model:
    """Return the model that `generate` runs inside wrappers such as PEFT's, accelerate's or TRL's.

    A wrapper is no model of transformers that generates, and holds one.
    """
    if not isinstance(model, nn.Module) or isinstance(model, GenerationMixin):
        return model
    return next((each for each in model.modules() if isinstance(each, GenerationMixin)), model)


def compiled_part_of(model: Model) -> str | None:
    """Return which part of a model `torch.compile` has been applied to, or None."""
    for name, module in model.named_modules():
        forward = vars(module).get("forward", type(module).forward)
        is_compiled = module._compiled_call_impl is not None or "_orig_mod" in module._modules
        if is_compiled or hasattr(forward, "_torchdynamo_orig_callable"):
            return name or type(model).__name__
    return None


def device_of_inputs(model: Model) -> torch.device:
    """Return the device for token ids; accelerate's hooks move offloaded weights to it."""
    if model.device.type != "meta":
        device: torch.device = model.device
        return device
    for module in model.modules():
        hooked = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
        if hooked is not None:
            return torch.device(hooked)
    return torch.device("cpu")


def mesh_of(model: Model) -> Any:
    """Return the device mesh of a tensor-parallel model, or None for any other."""
    is_parallel = (getattr(model, "_tp_size", None) or 1) > 1
    return getattr(model, "_device_mesh", None) if is_parallel else None
