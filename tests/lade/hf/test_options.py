"""What is refused, and by which name: the one that the user has written."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import BatchEncoding, GenerationConfig, StoppingCriteria

import lade
from tests.lade.both import ONE, same_as_generate
from tests.lade.shared import shared_model
from tests.lade.tiny import tiny_model

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 5}


@pytest.fixture
def model() -> Any:
    return shared_model("llama", seed=1)


OWN = "; call model.generate for it"
BEAMS = {"num_beams": 2, "do_sample": True, "prompt_lookup_num_tokens": 3}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"num_beams": 4}, f"the generation mode beam_search yet{OWN}"),
    (BEAMS, f"the generation mode beam_sample yet{OWN}"),
    (
        {"penalty_alpha": 0.6, "top_k": 4},
        f"the generation mode contrastive_search yet{OWN}",
    ),
    ({"dola_layers": "high"}, f"the generation mode dola_generation yet{OWN}"),
    ({"dola_layers": [0, 2]}, f"the generation mode dola_generation yet{OWN}"),
    ({"custom_generate": lade.decode}, f"custom_generate yet{OWN}"),
    ({"synced_gpus": True}, f"synced_gpus yet{OWN}"),
    ({"cache_implementation": "paged"}, f"cache_implementation='paged' yet{OWN}"),
    ({"token_healing": True}, f"token_healing yet{OWN}"),
]
OF_CALLS = ("custom_generate", "synced_gpus", "cache_implementation")


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=lambda value: next(iter(value)))
def test_unsupported_options_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    model, pool = tiny_model("llama"), lade.NGramPool(50)
    calls = [options]
    if not options.keys() & {*OF_CALLS}:
        calls.append({"generation_config": GenerationConfig(**options)})
    for call in calls:
        with pytest.raises(lade.UnsupportedOptionError) as refused:
            lade.generate(model, ONE, pool=pool, max_new_tokens=4, **call)
        assert str(refused.value).endswith(f"support {message}")
        assert isinstance(refused.value, ValueError)  # for who does not know our errors
    assert len(pool) == 0
    if "num_beams" in options:
        model.generation_config.num_beams = options["num_beams"]
        with pytest.raises(lade.UnsupportedOptionError, match="support the generation mode beam_"):
            lade.generate(model, ONE, max_new_tokens=4)
    if "custom_generate" not in options:
        lade.wrap(model)
        with pytest.raises(lade.UnsupportedOptionError, match=r"lade\.unwrap\(model\) restores"):
            model.generate(ONE, max_new_tokens=4, **options)


def test_prompt_lookup_is_a_limit_of_draft_tokens() -> None:
    model = tiny_model("llama", seed=1)
    prompt = ONE.repeat(1, 4)
    expected = model.generate(prompt, do_sample=False, max_new_tokens=40)
    pool = lade.NGramPool()
    pool.observe(expected[0].tolist())

    def most(num_lookup: int, **options: Any) -> int:
        steps: list[lade.Step] = []
        options |= {"do_sample": False, "max_new_tokens": 40, "pool": pool}
        options |= {"prompt_lookup_num_tokens": num_lookup, "on_step": steps.append}
        assert torch.equal(lade.wrap(model).generate(prompt, **options), expected)
        return max(step.num_draft_tokens for step in steps)

    assert most(2) <= 2 < most(30)
    assert most(2, config=lade.Config(max_draft_tokens=8)) == 2
    with pytest.raises(ValueError, match="prompt_lookup_num_tokens of at least 1, got 0"):
        lade.generate(model, prompt, max_new_tokens=4, prompt_lookup_num_tokens=0)


@pytest.mark.parametrize(
    ("wrong", "way_out"),
    [
        ("Hello", "tokenize it"),
        ([5, 6], "torch.tensor([token_ids])"),
        (BatchEncoding({"input_ids": ONE}), "lade.generate(model, **inputs)"),
        (5, "got int"),
    ],
)
def test_what_is_no_tensor_of_ids_is_refused_with_a_way_out(
    model: Any, wrong: Any, way_out: str
) -> None:
    with lade.Batcher(model) as batcher:
        for call in (lambda: lade.generate(model, wrong), lambda: batcher.submit(wrong)):
            with pytest.raises(TypeError, match="expected input_ids to be a tensor") as told:
                call()
            assert way_out in str(told.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.uint8, torch.int32])
def test_prompts_have_the_types_that_embeddings_take(dtype: torch.dtype) -> None:
    model = tiny_model("llama", seed=1)
    expected = lade.generate(model, ONE, **GREEDY).tolist()  # and the model is checked
    if dtype == torch.int32:
        assert lade.generate(model, ONE.to(dtype), **GREEDY).tolist() == expected
        return
    with pytest.raises(RuntimeError):
        model.generate(ONE.to(dtype), **GREEDY)
    calls: list[Callable[[], Any]] = [
        lambda: lade.generate(model, ONE.to(dtype), **GREEDY),
        lambda: model.generate(ONE.to(dtype), custom_generate=lade.decode, **GREEDY),
        lambda: lade.wrap(model).generate(ONE.to(dtype), **GREEDY),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=f"input_ids of int64 or int32, got {dtype}"):
            call()


def test_arguments_that_contradict_each_other_or_are_unknown_are_refused(model: Any) -> None:
    with pytest.raises(ValueError, match="expected pool or drafter, got both"):
        lade.generate(model, ONE, pool=lade.NGramPool(9), drafter=lade.Drafter())
    config = lade.Config(max_candidates=3)
    with pytest.raises(ValueError, match="it is a setting of the pool"):
        lade.generate(model, ONE, drafter=lade.Drafter(), config=config)
    with pytest.raises(ValueError, match="not_an_option"):
        lade.generate(model, ONE, not_an_option=1)


class Answering(StoppingCriteria):  # type: ignore[misc]
    """A criterion that answers what a function makes of whether to stop, and of how many rows."""

    def __init__(self, answer: Callable[[bool, int], Any]) -> None:
        self._answer = answer

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        return self._answer(input_ids.shape[1] >= ONE.shape[1] + 4, len(input_ids))


@pytest.mark.filterwarnings("ignore:lade falls back:lade.PlainDecodingWarning")  # batches
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(lambda ends, rows: torch.tensor([ends]), id="one for all"),
        pytest.param(lambda ends, rows: torch.tensor(ends), id="no dimension"),
        pytest.param(lambda ends, rows: torch.tensor([[ends]] * rows), id="column"),
        pytest.param(lambda ends, rows: ends, id="bool"),
        pytest.param(lambda ends, rows: -int(ends), id="lowest bit"),
        pytest.param(lambda ends, rows: 2 * int(ends), id="no lowest bit"),
        pytest.param(lambda ends, rows: torch.full((rows,), ends).to(torch.uint8), id="uint8"),
    ],
)
def test_what_generate_takes_for_an_answer_of_a_criterion_is_taken(
    model: Any, answer: Callable[[bool, int], Any], num_rows: int
) -> None:
    prompts = torch.cat([ONE + row for row in range(num_rows)])
    options: dict[str, Any] = {"max_new_tokens": 9, "eos_token_id": None}
    same_as_generate(model, prompts, stopping_criteria=[Answering(answer)], **options)


REFUSED_ANSWERS = (torch.tensor([False] * 2), torch.tensor([]).bool(), torch.tensor([1.0]), None)


@pytest.mark.parametrize("answer", REFUSED_ANSWERS)
def test_another_answer_of_a_criterion_is_refused(model: Any, answer: Any) -> None:
    criteria = [Answering(lambda ends, rows: answer)]
    with pytest.raises((TypeError, RuntimeError)):  # torch's own
        lade.generate(model, ONE, stopping_criteria=criteria, max_new_tokens=9)
