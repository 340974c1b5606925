"""What clients of OpenAI ask for is what they get: texts are those of plain generate."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from lade.models import LoadedModel
from tests.lade.apps.server.client import QUESTION, Client, Json, text_of
from tests.lade.apps.server.serving import (
    loaded_model,
    plain_ids,
    plain_text,
    prompt_of,
    serving,
)

SAMPLED: Json = {"temperature": 0.8, "top_p": 0.9}


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return loaded_model()


@pytest.fixture(scope="module")
def client(loaded: LoadedModel) -> Iterator[Client]:
    with serving(loaded, max_new_tokens=200) as client:
        yield client


@pytest.fixture(scope="module")
def ending() -> LoadedModel:
    """A model whose answers may end by themselves, as schemas want it."""
    return loaded_model(eos_token_id=93)


@pytest.fixture(scope="module")
def ends(ending: LoadedModel) -> Iterator[Client]:
    with serving(ending) as client:
        yield client


# --- texts ----------------------------------------------------------------------------------


def test_openais_own_client_reads_all_of_it(loaded: LoadedModel, client: Client) -> None:
    asked: Any = {"model": "tiny", "temperature": 0, "max_tokens": 40}
    import openai

    with openai.OpenAI(base_url=client.url, api_key="none", max_retries=0) as made:
        official: Any = made
        answer = official.chat.completions.create(messages=QUESTION, **asked)
        assert answer.choices[0].message.content == plain_text(loaded)
        chunks = official.chat.completions.create(messages=QUESTION, stream=True, **asked)
        assert "".join(each.choices[0].delta.content or "" for each in chunks) == plain_text(loaded)
        assert official.completions.create(prompt="What-is", **asked).choices[0].text
        assert [model.id for model in official.models.list()] == ["tiny"]
        answers = official.chat.completions.create(messages=QUESTION, n=2, **asked).choices
        assert [each.message.content for each in answers] == [plain_text(loaded)] * 2
        with pytest.raises(openai.BadRequestError, match="best_of: Input should be 1"):
            official.completions.create(prompt="What-is", best_of=2, **asked)


def test_the_same_seed_gives_the_same_text_and_none_another_each_time(
    loaded: LoadedModel, client: Client
) -> None:
    """However many ask at once."""
    seeds = (0, 1, 2, 3, 2**40)
    expected = [plain_text(loaded, seed=seed, **SAMPLED) for seed in seeds]
    with ThreadPoolExecutor(6) as threads:
        texts = [*threads.map(lambda seed: client.text(seed=seed, **SAMPLED), seeds)]
    assert texts == expected
    assert text_of(client.stream(seed=seeds[-1], **SAMPLED)) == expected[-1]
    assert len({client.text(temperature=1) for _ in range(3)}) == 3


@pytest.mark.parametrize("more", [{"stop": ["e"]}, {"logprobs": True}])
def test_several_answers_are_those_of_the_seeds_that_follow(client: Client, more: Json) -> None:
    asked = {"seed": 7, **SAMPLED, **more}
    alone = [client.ask(**{**asked, "seed": seed}) for seed in (7, 8, 9)]
    together = client.ask(n=3, **asked)
    reported = [each["choices"][0] | {"index": index} for index, each in enumerate(alone)]
    # How tokens came to forwards decides the last digits of their log-probabilities.
    for mine, theirs in zip(together["choices"], reported, strict=True):
        of_mine, of_theirs = (choice.pop("logprobs", None) or {} for choice in (mine, theirs))
        pairs = zip(of_mine.get("content", ()), of_theirs.get("content", ()), strict=True)
        for token, expected in pairs:
            assert token.pop("logprob") == pytest.approx(expected.pop("logprob"), abs=1e-4)
        assert of_mine == of_theirs
    assert together["choices"] == reported
    events = client.stream(n=3, stream_options={"include_usage": True}, **asked)
    for index, choice in enumerate(reported):
        mine = [e for e in events if e["choices"] and e["choices"][0]["index"] == index]
        assert text_of(mine) == choice["message"]["content"]
        assert mine[0]["choices"][0]["delta"] == {"role": "assistant"}
        assert mine[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
    for usage in (together["usage"], events[-1]["usage"]):
        of_alone = [each["usage"]["completion_tokens"] for each in alone]
        assert usage["completion_tokens"] == sum(of_alone)
        assert usage["prompt_tokens"] == alone[0]["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "^[a-z]{4}$"},
        {"type": "array", "items": {"enum": [*range(10)]}, "minItems": 2, "maxItems": 2},
    ],
    ids=str,
)
def test_several_answers_each_keep_a_schema_as_if_alone(ends: Client, schema: Json) -> None:
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    asked: Json = {"seed": 1, "temperature": 2, "response_format": form}
    alone = [ends.ask(**{**asked, "seed": seed})["choices"][0] for seed in (1, 2, 3)]
    texts = [choice["message"]["content"] for choice in alone]
    assert len({*texts}) > 1
    before = ends.metric("vllm:prompt_tokens_total")
    together = ends.ask(n=3, **asked)
    assert [{**each, "index": 0} for each in together["choices"]] == alone
    assert ends.metric("vllm:prompt_tokens_total") - before == len(prompt_of())
    events = [each["choices"][0] for each in ends.stream(n=3, **asked)]
    for index, text in enumerate(texts):
        reported = [each for each in events if each["index"] == index]
        assert "".join(each["delta"].get("content", "") for each in reported) == text
        assert reported[-1]["finish_reason"] == "stop"


def test_options_of_sampling_are_generates(loaded: LoadedModel, client: Client) -> None:
    sampling = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.3}
    expected = plain_text(loaded, seed=1, **sampling)
    assert client.text(seed=1, temperature=1, **sampling) == expected
    expected = plain_text(loaded, seed=1, top_k=0)
    assert client.text(seed=1, temperature=1, top_k=-1) == expected  # all of them
    assert len(client.text(max_tokens=-1, stop=["~"] * 16)) > 40
    assert client.text(logit_bias={"40": 100}, max_tokens=5) == "I" * 5


def test_penalties_are_openais(loaded: LoadedModel, client: Client) -> None:
    """The answer's own tokens count, and draft tokens are verified with them."""
    plain = client.text()
    assert len({*client.text(presence_penalty=2, frequency_penalty=2)}) > len({*plain})
    assert len({*client.text(presence_penalty=-2, frequency_penalty=-2)}) <= len({*plain})
    ids = loaded.tokenizer(prompt_of(), return_tensors="pt")["input_ids"]
    said: list[int] = []
    for _ in range(20):
        logits = loaded.model(torch.cat([ids, torch.tensor([said]).long()], dim=1)).logits[0, -1]
        for token_id in said:
            logits[token_id] -= 0.7
        logits[[*{*said}]] -= 1.5
        said.append(int(logits.argmax()))
    text = client.text(presence_penalty=1.5, frequency_penalty=0.7, max_tokens=20)
    assert text == loaded.tokenizer.decode(said)


def test_a_last_message_goes_on_and_prompts_may_be_tokens(
    loaded: LoadedModel, client: Client
) -> None:
    begun = [*QUESTION, {"role": "assistant", "content": "it-is"}]
    text = client.text(messages=begun, continue_final_message=True, add_generation_prompt=False)
    assert text == plain_text(loaded, prompt_of() + "it-is")
    ids = loaded.tokenizer("What-is")["input_ids"]
    assert client.text(prompt=ids) == client.text(prompt="What-is")


@pytest.mark.parametrize("place", [(3, 4), (9, 12)])
def test_an_answer_ends_before_a_stop(
    loaded: LoadedModel, client: Client, place: tuple[int, int]
) -> None:
    text = plain_text(loaded)
    stop = text[slice(*place)]
    expected = text[: text.index(stop)]
    choice = client.ask(stop=stop)["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (expected, "stop")
    events = client.stream(stop=[stop, "~~~~"])
    assert text_of(events) == expected
    # What may begin a stop is held back, and sent at the end where none comes.
    assert text_of(client.stream(stop=[stop + "~~~~", text[-3:] + "~"])) == text
    assert client.text(stop=stop, prompt="What-is") in plain_text(loaded, "What-is")


@pytest.mark.parametrize("places", [[], [9], [15, 9]], ids=str)
def test_an_answer_that_ends_with_its_last_token_has_ended(
    ending: LoadedModel, ends: Client, places: list[int]
) -> None:
    """By its own mark, by a text of it, or by the first of two; one token less is too few."""
    asked: Json = {"seed": 3, "temperature": 0.9}
    if places:
        text = ends.text(**asked, max_tokens=24)
        asked["stop"] = [text[place : place + 3] for place in places]
    else:
        sampling: Json = {"temperature": 0.9, "max_new_tokens": 24}
        ids = {seed: plain_ids(ending, seed=seed, **sampling) for seed in range(9)}
        asked["seed"] = next(seed for seed, each in ids.items() if each[-1] == 93)
    whole = ends.ask(**asked, max_tokens=30)
    num, choice = whole["usage"]["completion_tokens"], whole["choices"][0]
    assert choice["finish_reason"] == "stop"
    if not places:  # there is no text of its mark
        text = ending.tokenizer.decode(ids[asked["seed"]][:-1])
        assert choice["message"]["content"] == text
        assert text_of(ends.stream(**asked, max_tokens=24)) == text
    assert ends.ask(**asked, max_tokens=num)["choices"] == [choice]
    assert ends.ask(**asked, max_tokens=num - 1)["choices"][0]["finish_reason"] == "length"


# --- log-probabilities ----------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "top_p": 0.8, "seed": 3}])
def test_logprobs_are_the_models_own(loaded: LoadedModel, client: Client, options: Json) -> None:
    options = {**options, "repetition_penalty": 1.2, "max_tokens": 12}
    choice = client.ask(logprobs=True, top_logprobs=3, **options)["choices"][0]
    content = choice["logprobs"]["content"]
    assert "".join(each["token"] for each in content) == choice["message"]["content"]
    prompt, ids = loaded.tokenizer([prompt_of(), choice["message"]["content"]])["input_ids"]
    with torch.no_grad():
        logits = loaded.model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    expected = logits.float().log_softmax(-1)
    for place, (each, token_id) in enumerate(zip(content, ids, strict=True)):
        assert each["bytes"] == list(each["token"].encode())
        assert each["logprob"] == pytest.approx(float(expected[place, token_id]), abs=1e-3)
        best = expected[place].topk(3)
        names = [loaded.tokenizer.decode([other]) for other in best.indices.tolist()]
        assert [other["token"] for other in each["top_logprobs"]] == names


def test_streamed_logprobs_go_with_their_text(client: Client) -> None:
    whole = client.ask(logprobs=True, stop="zz")["choices"][0]["logprobs"]["content"]
    assert whole[0]["top_logprobs"] == []
    found: list[str] = []
    for (choice,) in (event["choices"] for event in client.stream(logprobs=True, stop="zz")):
        shown = [each["token"] for each in (choice["logprobs"] or {"content": []})["content"]]
        assert "".join(shown) == choice["delta"].get("content", "")
        found += shown
    assert found == [each["token"] for each in whole]


def test_completions_have_logprobs_of_their_own(client: Client) -> None:
    options: Json = {"prompt": "What-is", "max_tokens": 9, "logprobs": 2}
    choice = client.ask(**options)["choices"][0]
    reported = choice["logprobs"]
    assert "".join(reported["tokens"]) == choice["text"]
    assert reported["text_offset"] == list(range(9))
    for token, logprob, top in zip(
        reported["tokens"], reported["token_logprobs"], reported["top_logprobs"], strict=True
    ):
        assert top[token] == max(top.values()) == logprob
    streamed = [each["choices"][0].get("logprobs") for each in client.stream(**options)]
    shown = [each for each in streamed if each]
    assert [token for each in shown for token in each["tokens"]] == reported["tokens"]
    assert [at for each in shown for at in each["text_offset"]] == reported["text_offset"]


# --- schemas ---------------------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ann", "bob"]}, "age": {"enum": [1, 2]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_a_schema_is_kept_and_what_it_forces_is_drafted(ending: LoadedModel) -> None:
    with serving(ending) as client:
        form = {"type": "json_schema", "json_schema": {"name": "who", "schema": SCHEMA}}
        answer = client.ask(response_format=form)
        assert answer["choices"][0]["finish_reason"] == "stop"
        found = json.loads(answer["choices"][0]["message"]["content"])
        assert found["name"] in ("ann", "bob")
        assert found["age"] in (1, 2)
        assert answer["usage"]["completion_tokens_details"]["accepted_draft_tokens"] > 10
        assert json.loads(text_of(client.stream(response_format=form))) == found
        assert client.text(response_format={"type": "json_object"}).startswith("{")
        of_llama_cpp = {"type": "json_object", "schema": SCHEMA}
        assert json.loads(client.text(response_format=of_llama_cpp)) == found


# --- predictions, usage, padding ------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"temperature": 1.2, "seed": 7}], ids=["greedy", "seeded"])
def test_a_prediction_changes_no_text_and_usage_counts_it(client: Client, options: Json) -> None:
    text = client.text(**options)

    def predicted(content: Any) -> Json:
        return {"prediction": {"type": "content", "content": content}, **options}

    parts = [{"type": "text", "text": part} for part in (text[:9], text[9:])]
    for content in (text, parts):
        answer = client.ask(**predicted(content))
        assert answer["choices"][0]["message"]["content"] == text
        details = answer["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] >= 30
        both = details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"]
        assert both == len(text)
    assert text_of(client.stream(**predicted(text))) == text
    answer = client.ask(**predicted("~!" * 40))
    assert answer["choices"][0]["message"]["content"] == text
    assert answer["usage"]["completion_tokens_details"]["rejected_prediction_tokens"] >= 70


def test_usage_and_metrics_say_what_was_drafted(client: Client) -> None:
    whole = client.ask(user="carl")
    events = client.stream(user="dora", stream_options={"include_usage": True})
    assert [each.get("usage") for each in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1]["choices"] == []
    for reported in (whole, events[-1]):
        usage, details = reported["usage"], reported["usage"]["completion_tokens_details"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt_of()), 40)
        drafts = reported["metrics"]["speculative_decoding"]  # as vLLM has it
        counts = drafts["acceptance_histogram"]
        assert sum(counts) == drafts["num_spec_steps"] > 0
        accepted = sum(number * count for number, count in enumerate(counts))
        assert accepted == drafts["num_accepted_draft_tokens"] == details["accepted_draft_tokens"]
        both = details["accepted_draft_tokens"] + details["rejected_draft_tokens"]
        assert drafts["num_draft_tokens"] == both
        assert drafts["draft_acceptance_rate"] == pytest.approx(accepted / both)
        assert len(counts) == drafts["num_spec_tokens"] + 1
        length = 1 + accepted / drafts["num_spec_steps"]
        assert drafts["mean_acceptance_length"] == pytest.approx(length)
    drafts = client.ask(speculation=False)["metrics"]["speculative_decoding"]
    assert (drafts["acceptance_histogram"], drafts["num_draft_tokens"]) == ([0], 0)


@pytest.mark.parametrize("body", [{"messages": QUESTION}, {"prompt": "What-is"}], ids=str)
def test_events_are_padded_unless_asked_not_to_be(client: Client, body: Json) -> None:
    body = {**body, "max_tokens": 9, "stream": True, "temperature": 0}
    path = "/completions" if "prompt" in body else "/chat/completions"
    parts = client.post(path, json=body).text.split("\n\n")[:-2]
    assert {(len(part) + 2) % 512 for part in parts} == {0}
    paddings = {json.loads(part.removeprefix("data: "))["obfuscation"] for part in parts}
    assert len(paddings) == len(parts)
    plain = client.post(path, json=body | {"stream_options": {"include_obfuscation": False}})
    assert "obfuscation" not in plain.text
    assert plain.headers["content-type"].startswith("text/event-stream")


def test_the_one_model_is_listed_and_tells_no_path(loaded: LoadedModel, tmp_path: Any) -> None:
    (tmp_path / "some-model").mkdir()
    with serving(loaded._replace(name=str(tmp_path / "some-model"))) as client:
        (found,) = client.get("/v1/models").json()["data"]
        assert found["id"] == "some-model"
        assert client.get("/v1/models/some-model").json() == found
        missing = client.get("/v1/models/other")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
        assert client.get("/health").json() == {"status": "ok"}
        answer = client.post(json={"messages": QUESTION, "max_tokens": 2})
        assert answer.headers["x-request-id"] == answer.json()["id"]
