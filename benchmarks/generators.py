"""Candidate generators of transformers as drafters, beside transformers' own loop: `generators`.

Models have random weights, as few checkpoints with heads are small. The assistant is the target
with a little noise. No heads are trained for a random target: they do all their work, and then
their tokens are replaced by those of the known answer, with one in four wrong ("replayed").
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from operator import attrgetter
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.generation import candidate_generator as hf
from transformers.modeling_layers import MtpModel
from transformers.models.gemma4_assistant import modeling_gemma4_assistant as gemma
from transformers.models.muse_glimmer_assistant import modeling_muse_glimmer_assistant as glimmer

import lade
from benchmarks.environment import environment
from benchmarks.report import sheet, show
from lade.drafters import AssistantModel, Candidates, FirstLayers
from lade.drafters.candidates import config_for

WAYS = ("transformers", "lade")
_NOISE = 0.05
_LENGTH = 4  # of a draft of heads


class Sizes(NamedTuple):
    """The sizes of the models."""

    hidden: int = 256
    layers: int = 6
    vocab: int = 512

    def config(self, kind: str, **more: Any) -> Any:
        """Return a config of a type of model."""
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": self.hidden // 4}
        sizes = {"hidden_size": self.hidden, "intermediate_size": 3 * self.hidden, **heads}
        sizes |= {"num_hidden_layers": self.layers, "vocab_size": self.vocab, "pad_token_id": 0}
        return CONFIG_MAPPING[kind](**{**sizes, "eos_token_id": None, "bos_token_id": 1, **more})


class Case(NamedTuple):
    """A generator, and the drafter that stands for it."""

    model: Any
    make: Callable[..., Any]  # as for `Candidates`
    drafter: lade.Drafter
    is_replayed: bool = False


def cases(sizes: Sizes, dtype: torch.dtype) -> dict[str, Case]:
    """Return all generators by their classes' names."""
    torch.manual_seed(0)

    def model_of(config: Any) -> Any:
        return _random(
            AutoModelForCausalLM.from_config(config, experts_implementation="eager"), dtype
        )

    target, options = model_of(sizes.config("llama")), {"num_assistant_tokens": _LENGTH}
    near, layers = copy.deepcopy(target), sizes.layers - 1
    for weight in near.parameters():
        weight.data += _NOISE * weight.data.std() * torch.randn_like(weight)
    near.generation_config.update(**options, assistant_confidence_threshold=0.0)
    translated = copy.deepcopy(near)
    translated.resize_token_embeddings(sizes.vocab + 8, mean_resizing=False)
    mine, theirs = (
        _words([*range(sizes.vocab + more)][::turn]) for more, turn in ((0, 1), (8, -1))
    )
    for part in (translated.get_input_embeddings(), translated.get_output_embeddings()):
        part.weight.data = part.weight.data.flip(0).clone()
    with_heads = model_of(
        sizes.config("glm4_moe", num_mtp_layers=1, first_k_dense_replace=sizes.layers)
    )
    heads = _random(MtpModel(with_heads, 1), dtype)
    heads.tie_with_main_model(with_heads)
    of_gemma = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    of_gemma |= {"global_head_dim": sizes.hidden // 4, "num_global_key_value_heads": 2}
    kinds = {"layer_types": [*["sliding_attention"] * layers, "full_attention"]}
    shared = model_of(sizes.config("gemma4_text", **of_gemma, **kinds))
    text = copy.deepcopy(shared.config)
    text.num_hidden_layers = text.num_kv_shared_layers = 2
    text.layer_types = ["sliding_attention", "full_attention"]
    small = CONFIG_MAPPING["gemma4_assistant"](text_config=text, backbone_hidden_size=sizes.hidden)
    sharing = _random(gemma.Gemma4AssistantForCausalLM(small), dtype)
    sharing.generation_config.update(**options)
    block = {"block_size": _LENGTH + 1, "mask_token_id": 1, "target_layer_ids": [0, layers]}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "num_hidden_layers": 2}
    flash = sizes.config("muse_glimmer_assistant", **block, **rope)
    diffusing = _random(glimmer.MuseGlimmerAssistantModel(flash), dtype)

    def assisted(call: Any, input_ids: Any, processors: Any) -> Any:
        return hf.AssistedCandidateGenerator(input_ids, near, config_for(call), {})

    def translating(call: Any, input_ids: Any, processors: Any) -> Any:
        given: Any = input_ids, translated, mine, theirs, config_for(call), {}
        return hf.AssistedCandidateGeneratorDifferentTokenizers(*given)

    def universal(call: Any, input_ids: Any, processors: Any) -> Any:
        translator = hf.AssistantToTargetTranslator(mine, theirs, sizes.vocab, translated)
        given: Any = input_ids, translated, mine, theirs, config_for(call), {}, translator
        return hf.UniversalSpeculativeDecodingGenerator(*given)

    def lookup(call: Any, input_ids: Any, processors: Any) -> Any:
        return hf.PromptLookupCandidateGenerator(max_length=call.max_length)

    def early_exit(call: Any, input_ids: Any, processors: Any) -> Any:
        twin, config = copy.deepcopy(target), config_for(call, assistant_early_exit=layers)
        twin.generation_config.update(**options, assistant_confidence_threshold=0.0)
        return hf.EarlyExitCandidateGenerator(input_ids, twin, config, {})

    def by_gemma(call: Any, input_ids: Any, processors: Any) -> Any:
        given = sharing, shared.get_input_embeddings(), config_for(call)
        return hf.SinglePositionMultiTokenCandidateGenerator(*given)

    def by_heads(call: Any, input_ids: Any, processors: Any) -> Any:
        with patch.object(MtpModel, "from_pretrained", lambda *_, **__: heads):
            return hf.MTPCandidateGenerator(with_heads, config_for(call), {})

    def by_blocks(call: Any, input_ids: Any, processors: Any) -> Any:
        ends = target.get_input_embeddings(), target.get_output_embeddings()
        return hf.DFlashTokenCandidateGenerator(diffusing, *ends, config_for(call))

    translator = AssistantModel(translated, theirs, target_tokenizer=mine, length=_LENGTH)
    return {
        "AssistedCandidateGenerator": Case(target, assisted, AssistantModel(near, length=_LENGTH)),
        "AssistedCandidateGeneratorDifferentTokenizers": Case(target, translating, translator),
        "UniversalSpeculativeDecodingGenerator": Case(target, universal, Candidates(universal)),
        "PromptLookupCandidateGenerator": Case(target, lookup, Candidates(lookup)),
        "EarlyExitCandidateGenerator": Case(
            target, early_exit, FirstLayers(layers, length=_LENGTH)
        ),
        "SinglePositionMultiTokenCandidateGenerator": Case(
            shared, by_gemma, Candidates(by_gemma), is_replayed=True
        ),
        "MTPCandidateGenerator": Case(with_heads, by_heads, Candidates(by_heads), True),
        "DFlashTokenCandidateGenerator": Case(target, by_blocks, Candidates(by_blocks), True),
    }


class Timed(NamedTuple):
    """One decoding: tokens a forward, that of the prompt included, and CPU seconds."""

    tokens_per_forward: float
    sec: float


def compared(case: Case, prompt: Tensor, num_new: int) -> Iterator[tuple[Timed, Timed]]:
    """Decode by transformers' loop and by lade, again and again."""
    options: dict[str, Any] = {"attention_mask": torch.ones_like(prompt), "do_sample": False}
    options |= {"max_new_tokens": num_new, "pad_token_id": 0}
    options["return_dict_in_generate"] = True
    answer, make = case.model.generate(prompt, **options).sequences[0].tolist(), case.make
    drafter = case.drafter
    if case.is_replayed:
        make = partial(_replayed, case.make, answer)
        drafter = Candidates(make)
        drafter.is_measured = False
    num_steps = [0]
    twin, forward = copy.copy(case.model), case.model.forward

    @wraps(forward)
    def counted(*args: Any, **kwargs: Any) -> Any:
        num_steps[0] += 1
        return forward(*args, **kwargs)

    def generator(generation_config: Any, input_ids: Tensor, **_: Any) -> Any:
        call = lade.drafting.drafter.DraftingCall(case.model, 0, generation_config.max_length)
        return make(call, input_ids, None)

    vars(twin).update(forward=counted, _get_candidate_generator=generator)
    config = lade.Config(strict_drafter=True, max_draft_tokens=16)
    while True:
        num_steps[0], begin = 0, process_time()
        theirs = twin.generate(prompt, prompt_lookup_num_tokens=1, **options).sequences[0].tolist()
        sec = process_time() - begin
        num = len(theirs) - prompt.shape[1]
        by_transformers = Timed(num / num_steps[0], sec)
        begin = process_time()
        out = lade.generate(case.model, prompt, drafter=drafter, config=config, **options)
        sec = process_time() - begin
        assert out.sequences[0].tolist() == theirs == answer, "another text"
        yield by_transformers, Timed(num / (1 + out.stats.num_steps), sec)


def run(num_new: int, rounds: int, file: Path | None) -> None:
    """Compare all generators with transformers' own loop; print and write the figures."""
    torch.set_num_threads(1)
    sizes, runs = Sizes(), dict[str, Any]()
    prompt = torch.randint(2, sizes.vocab, (1, 32), generator=torch.Generator().manual_seed(1))
    for name, case in cases(sizes, torch.float32).items():
        pairs = compared(case, prompt, num_new)
        next(pairs)  # checks and compiles
        timed = zip(*(next(pairs) for _ in range(rounds)), strict=True)
        row = {
            way: {field: median(map(attrgetter(field), of_way)) for field in Timed._fields}
            for way, of_way in zip(WAYS, timed, strict=True)
        }
        runs[name] = {"is_replayed": case.is_replayed, **row}
    settings = {"sizes": sizes._asdict(), "new_tokens": num_new, "rounds": rounds, "threads": 1}
    headings = "", "generator", "transformers", "lade", "transformers, sec", "lade, sec"
    cells = [
        ("", name, *(f"{row[way][field]:.2f}" for field in Timed._fields for way in WAYS))
        for name, row in runs.items()
    ]
    content = {"settings": settings, "environment": environment(), "runs": runs}
    show(file, content, sheet("tokens a forward, and CPU seconds", headings, [cells]))


class _Replayed:
    """A generator whose tokens are those of a known text, one in four wrong."""

    def __init__(self, generator: Any, text: Sequence[int]) -> None:
        self._generator, self._text = generator, text

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    def get_candidates(self, input_ids: Tensor, **given: Any) -> Any:
        """Return as many tokens as the generator does."""
        found, _ = self._generator.get_candidates(input_ids, **given)
        places = range(input_ids.shape[1], min(found.shape[1], len(self._text)))
        known = [self._text[place] if place % 4 else 1 for place in places]
        return torch.cat([input_ids, input_ids.new_tensor([known]).long()], dim=-1), None


def _replayed(make: Any, text: Sequence[int], *given: Any) -> Any:
    return _Replayed(make(*given), text)


def _random(model: Any, dtype: torch.dtype) -> Any:
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0.0, 1.5 / weight.shape[-1] ** 0.5)
    return model.to(dtype).eval()


def _words(ids: Sequence[int]) -> Any:
    """Return a tokenizer of words with these ids."""
    words = Tokenizer(models.WordLevel({f"w{word}": id_ for word, id_ in enumerate(ids)}, "w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words)
