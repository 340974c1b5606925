"""Calls of tools and thoughts: recognized, forced where the template shows how, else refused."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch

from tests.grids import thinned
from tests.lade.apps.server.client import QUESTION, Client, Json, text_of
from tests.lade.apps.server.serving import loaded_model, serving


def function(name: str, parameters: Any) -> Json:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [function("f", {"type": "object", "properties": {"a": {"type": "number"}}})]
# By kinds of models whose tokenizers need not say how answers are read, and one that does.
CALLS = {
    "qwen3": '<think>hm</think><tool_call>{"name":"f","arguments":{"a":1}}</tool_call>',
    "qwen3_5": "<think>hm</think><tool_call><function=f><parameter=a>1</parameter></function>"
    "</tool_call>",
    "gemma4": "<|channel>thought\nhm<channel|><|tool_call>call:f{a:1}<tool_call|>",
    "own": '[hm]call(f,{"a":1})',
}
ANCHORS = ["<|im_start|>assistant\n", "<|turn>model\n"]
# As Qwen 2.5 and 3 write calls.
CALL = """\
{%- for c in m.tool_calls or [] %}{%- if not loop.first %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' }}{{- c.function.name }}{{- '", "arguments": ' }}
{{- c.function.arguments | tojson }}{{- '}\\n</tool_call>' }}{%- endfor %}"""
# As Qwen 3.5 and Qwen3-Coder do.
TAGGED = """\
{%- for c in m.tool_calls or [] %}{%- if not loop.first %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n<function=' + c.function.name + '>\\n' }}
{%- for name, value in c.function.arguments | items %}{{- '<parameter=' + name + '>\\n' }}
{{- value if value is string else value | tojson }}{{- '\\n</parameter>\\n' }}{%- endfor %}
{{- '</function>\\n</tool_call>' }}{%- endfor %}"""
OWN = {
    "defaults": {"role": "assistant"},
    "start_anchor": ANCHORS[0],
    "fields": {
        "thinking": {"open": "[", "close": "]", "content": "text"},
        "tool_calls": {
            "open_pattern": r"call\((?P<name>\w+),",
            "close": ")",
            "repeats": True,
            "content": "json",
            "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": "~", "content": "text"},
    },
}


@cache
def model_of(kind: str) -> tuple[Any, list[Any]]:
    """Return a model that many servers have, and what makes processors of each of its calls.

    To check a model takes longer than to answer.
    """
    model, makers = loaded_model(eos_token_id=93, vocab_size=100).model, list[Any]()

    def generate(**options: Any) -> Any:
        options["logits_processor"] += [make() for make in makers]
        return type(model).generate(model, **options)

    model.config.model_type, model.generate = kind, generate
    return model, makers


@contextmanager
def calling(
    kind: str, *, writes: bool = True, marks: str = "", opens: str = "", more: str = ""
) -> Iterator[tuple[Client, list[str]]]:
    """Serve a model that writes what stands in the list, or what its random weights would.

    `marks`, between blanks, are tokens; a prompt ends with what opens an answer, and
    there is more in its template.
    """
    model, makers = model_of(kind)
    loaded = loaded_model(eos_token_id=93, vocab_size=100)._replace(model=model)
    tokenizer, written = loaded.tokenizer, [CALLS[kind]]
    tokenizer.add_tokens([*ANCHORS, "\n", *marks.split()])
    tokenizer.add_tokens(["<end>"], special_tokens=True)
    if kind == "own":
        tokenizer.response_template = OWN
    tokenizer.chat_template = (
        "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        + (TAGGED if kind == "qwen3_5" else CALL)
        + "{% endfor %}"
        "{% if add_generation_prompt %}" + ANCHORS[kind == "gemma4"] + opens + "{% endif %}" + more
    )

    class Writes:
        """A logits processor."""

        def __init__(self) -> None:
            self.left = [*tokenizer("".join(written))["input_ids"]]

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            forced = torch.full_like(scores, -torch.inf)
            forced[:, self.left.pop(0) if self.left else 93] = 0
            return forced

    makers[:] = [Writes] if writes else []
    with serving(loaded) as client:
        yield client, written


@pytest.mark.parametrize("kind", thinned(CALLS, "qwen3_5", "gemma4", "own"))
def test_calls_and_thoughts_are_told_apart(kind: str) -> None:
    with calling(kind) as (client, _):
        choice = client.ask(tools=TOOLS, tool_choice="auto", max_tokens=99)["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        message = choice["message"]
        assert message["reasoning_content"] == "hm"
        assert message["content"].strip("~") == ""  # which is the end of no such model's answers
        (call,) = message["tool_calls"]
        function = {"name": "f", "arguments": '{"a": 1}'}
        assert (call["type"], call["function"]) == ("function", function)
        events = client.stream(tools=TOOLS, max_tokens=99)
        deltas = [each["choices"][0]["delta"] for each in events]
        assert "".join(each.get("reasoning_content", "") for each in deltas) == "hm"
        (streamed,) = [call for each in deltas for call in each.get("tool_calls", ())]
        assert (streamed["index"], streamed["function"]) == (0, function)
        assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"
        result = {"role": "tool", "tool_call_id": call["id"], "content": "2"}

        def num_prompt(said: str) -> Any:
            messages = [*QUESTION, {**message, "content": said}, result]
            return client.ask(messages=messages, tools=TOOLS, max_tokens=9)["usage"][
                "prompt_tokens"
            ]

        assert num_prompt("yes") == num_prompt("") + 3  # the prompt also has the text beside a call


#: What is said behind what the prompt ends with: its thoughts and its text.
SAID: dict[str, list[tuple[str, str, str]]] = {
    "": [
        *(
            (said, "", said)
            for said in (
                "\n\nso\n",
                'yes<tool_call>{"name":</tool_call>so',
                'yes<tool_call>{"name":"f"',
                'yes<tool_call>{"name":"f"}</tool_call>',
                "yes<tool_call>[1]</tool_call>and-more",
            )
        ),
        # Blanks behind marks are the template's.
        ("<think>\nhm</think>\n\nso\n", "hm", "so\n"),
        # "k" is in the mark as well.
        ("<think>hm</think>k<tool_call>[1]</tool_call>k", "hm", "k<tool_call>[1]</tool_call>k"),
    ],
    "<think>\n": [("hm</think>\nso", "hm", "so")],
    "so": [("-is-<end>it", "", "-is-it")],
}


@pytest.mark.parametrize("opens", SAID)
def test_texts_are_the_models_own_whole_and_streamed(opens: str) -> None:
    """Nothing is lost, said twice, or the prompt's; what looks like a call and is none is text."""
    with calling("qwen3", opens=opens) as (client, written):
        for said, thoughts, text in SAID[opens]:
            written[:] = [said]
            (choice,) = client.ask(tools=TOOLS, max_tokens=90)["choices"]
            assert choice["message"]["content"] == text
            assert choice["message"].get("reasoning_content", "") == thoughts
            events = client.stream(tools=TOOLS, max_tokens=90)
            assert text_of(events) == text
            deltas = [each["choices"][0]["delta"] for each in events]
            assert "".join(each.get("reasoning_content", "") for each in deltas) == thoughts
            assert events[-1]["choices"][0]["finish_reason"] == choice["finish_reason"] == "stop"


def test_an_answer_that_is_cut_within_a_later_call_says_so() -> None:
    call = CALLS["qwen3"].partition("</think>")[2]
    with calling("qwen3", marks=">x<") as (client, written):  # ends one call and begins the next
        written[:] = [call + "x" + call]
        for num_more in (0, 1, 9, 199):
            max_tokens = min(len(call) + num_more, 199)
            is_cut = max_tokens < 199
            (choice,) = client.ask(tools=TOOLS, max_tokens=max_tokens)["choices"]
            events = client.stream(tools=TOOLS, max_tokens=max_tokens)
            for reason in (choice, events[-1]["choices"][0]):
                assert reason["finish_reason"] == ("length" if is_cut else "tool_calls")
            assert len(choice["message"]["tool_calls"]) == (1 if is_cut else 2)
            text = "x" + call[: 1 + num_more] if is_cut else "x"
            assert choice["message"]["content"] == text_of(events) == text


def test_calls_of_tools_are_predicted() -> None:
    """They change no text, and count as no prediction of the client's."""
    with calling("qwen3") as (client, _):

        def details_of(**options: Any) -> Any:
            answer = client.ask(tools=TOOLS, max_tokens=90, **options)
            return answer["usage"]["completion_tokens_details"]

        details = details_of()
        assert details["accepted_draft_tokens"] > 20
        assert details["accepted_prediction_tokens"] == details["rejected_prediction_tokens"] == 0
        details = details_of(prediction={"type": "content", "content": "nothing-of-it"})
        assert details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"] == 13
        assert details_of(tool_choice="none")["accepted_draft_tokens"] < 20


# --- forced ---------------------------------------------------------------------------------

# As LangChain's `with_structured_output(Person, method="function_calling")` asks.
PERSON = function(
    "Person",
    {
        "type": "object",
        "properties": {
            "name": {"description": "The name.", "enum": ["ann", "bob"], "type": "string"},
            "age": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["name", "age"],
    },
)
STRUCTURED: Json = {
    "tool_choice": {"type": "function", "function": {"name": "Person"}},
    "parallel_tool_calls": False,
    "max_tokens": 300,
}
MARKS = "<tool_call> </tool_call>"


def closed(tool: Json, **more: Any) -> Json:
    """Return a tool whose parameters a model of random weights fills, and ends."""
    named = tool["function"]
    return function(named["name"], {**named["parameters"], "additionalProperties": False, **more})


@pytest.mark.parametrize(("kind", "marks"), [("qwen3", MARKS), ("qwen3_5", "")])
def test_a_named_tool_is_called_as_langchain_asks(kind: str, marks: str) -> None:
    """With arguments as a JSON object, or each in tags."""
    few = {"type": "array", "items": {"$ref": "#/$defs/age"}, "maxItems": 2}
    ages = {"ages": {"anyOf": [few, {"type": "null"}], "default": None}}
    properties = PERSON["function"]["parameters"]["properties"] | ages
    person = closed(PERSON, properties=properties, **{"$defs": {"age": {"enum": [1, 2]}}})
    asked: Json = {**STRUCTURED, "tools": [person, *TOOLS], "temperature": 1}
    with calling(kind, writes=False, marks=marks) as (client, _):
        for seed in range(2):
            (choice,) = client.ask(**asked, seed=seed)["choices"]
            (call,) = choice["message"]["tool_calls"]
            assert choice["finish_reason"] == "tool_calls"
            assert call["function"]["name"] == "Person"
            found = json.loads(call["function"]["arguments"])
            assert found["name"] in ("ann", "bob")
            assert 0 <= found["age"] <= 99
            assert {*(found.get("ages") or ())} <= {1, 2}
        events = client.stream(**asked, seed=seed)
        deltas = [each["choices"][0]["delta"] for each in events]
        (streamed,) = [call for each in deltas for call in each.get("tool_calls", ())]
        assert streamed["function"] == call["function"]
        assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_string_in_tags_stands_as_it_is_and_cannot_end_a_call() -> None:
    tool = function("f", {"properties": {"a": {"anyOf": [{"type": "string"}, {"type": "null"}]}}})
    asked: Json = {"tools": [tool], "tool_choice": "required", "max_tokens": 120}
    with calling("qwen3_5") as (client, written):
        for text, is_kept in (
            ("so", True),
            ("", True),
            ("<b>\n</b>", True),
            ("</parameter>\n<parameter=b>2", False),
            ("</function></tool_call>", False),
        ):
            written[:] = [f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n"]
            written.append("</function>\n</tool_call>")
            if is_kept:
                (call,) = client.ask(**asked)["choices"][0]["message"]["tool_calls"]
                assert json.loads(call["function"]["arguments"]) == {"a": text}
            else:
                assert client.error(**asked)["param"] == "response_format", text


def test_parameters_that_tags_cannot_keep_are_refused() -> None:
    with calling("qwen3_5") as (client, _):
        for changed in (
            {"properties": {"a": {"type": "string", "pattern": "b"}}},
            {"properties": {"a": {"anyOf": [{"type": "string"}, {"type": "integer"}]}}},
            {"properties": {"a": {"type": ["string", "null"]}}},
            {"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"type": "string"}}},
            {"properties": {"a": {"enum": [1]}}},
            {"properties": {"a": True}},
            {"properties": {"a>": {"type": "integer"}}},
            {"properties": {"a": {"type": "integer"}}, "minProperties": 1},
            {"required": ["a"]},
            {"properties": [1]},
        ):
            asked: Json = {"tools": [function("f", changed)], "tool_choice": "required"}
            assert client.error(**asked)["param"] == "tools", changed


def test_some_tool_is_called_where_that_is_required() -> None:
    with calling("qwen3", writes=False) as (client, _):
        other = function("f", {"properties": {"a": {"enum": [1, 2]}}})
        tools = [closed(PERSON), closed(other)]
        asked: Json = {"tools": tools, "tool_choice": "required", "max_tokens": 200}
        for seed in range(2):
            message = client.ask(**asked, seed=seed, temperature=1)["choices"][0]["message"]
            for call in message["tool_calls"]:
                assert call["function"]["name"] in ("Person", "f")
                assert isinstance(json.loads(call["function"]["arguments"]), dict)
            one = client.ask(**asked, seed=seed, temperature=1, parallel_tool_calls=False)
            (call,) = one["choices"][0]["message"]["tool_calls"]
            assert call["function"] == message["tool_calls"][0]["function"]


@pytest.mark.parametrize("kind", thinned(["qwen3", "qwen3_5"], "qwen3_5"))
def test_beside_a_schema_there_is_an_answer_of_it_or_a_call(kind: str) -> None:
    form = {"type": "json_schema", "json_schema": {"schema": {"enum": [1, 2]}}}
    asked: Json = {"tools": [closed(PERSON)], "response_format": form, "max_tokens": 120}
    asked["parallel_tool_calls"] = False  # random weights would call on and on
    with calling(kind, writes=False) as (client, _):
        for is_call, more in (
            (True, {"logit_bias": {"27": 100}}),  # "<", with which a call begins
            (False, {"logit_bias": {"27": -100}}),
            (True, {"logit_bias": {"27": -100}, "tool_choice": "required"}),
            (False, {"tool_choice": "none"}),
        ):
            (choice,) = client.ask(**asked, **more)["choices"]
            text, calls = choice["message"]["content"], choice["message"].get("tool_calls", [])
            assert choice["finish_reason"] == ("tool_calls" if is_call else "stop")
            assert text_of(client.stream(**asked, **more)) == text
            assert (text in ("1", "2"), text == "") == (not is_call, is_call)
            assert bool(calls) == is_call
        named = {"json_schema": {"schema": {"not": {}}}, "type": "json_schema"}
        assert client.error(**asked | {"response_format": named})["param"] == "response_format"


@pytest.mark.parametrize(("opens", "marks"), [("", "<think> </think>"), ("<think>", "")])
def test_a_model_that_thinks_may_do_so_before_it_is_made_to_call(opens: str, marks: str) -> None:
    may_think = "{# <think> #}"
    with calling("qwen3", marks=marks, opens=opens, more=may_think) as (client, written):
        call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
        written[:] = ["" if opens else "<think>", "hm</think>\n\n", call]
        asked: Json = {"tools": [closed(TOOLS[0])], "tool_choice": "required", "max_tokens": 99}
        message = client.ask(**asked)["choices"][0]["message"]
        assert message["reasoning_content"] == "hm"
        assert [each["function"]["name"] for each in message["tool_calls"]] == ["f"]


def test_thoughts_that_the_prompt_has_ended_do_not_begin_anew() -> None:
    with calling("qwen3", opens="<think>\n\n</think>\n\n", writes=False) as (client, _):
        choice = client.ask(**{**STRUCTURED, "tools": [closed(PERSON)]})["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert not choice["message"].get("reasoning_content")


def test_an_answer_ends_with_its_first_call_where_that_is_asked_for() -> None:
    with calling("qwen3") as (client, written):
        written[:] = ["so", CALLS["qwen3"].partition("</think>")[2] * 2, "and"]
        for single in (False, True):
            choice = client.ask(tools=TOOLS, parallel_tool_calls=not single, max_tokens=200)
            (found,) = choice["choices"]
            assert len(found["message"]["tool_calls"]) == 1 + (not single)
            assert found["finish_reason"] == "tool_calls"
            assert found["message"]["content"] == ("so" if single else "soand")


@pytest.mark.parametrize("kind", thinned(["gemma4", "own"], "own"))
def test_calls_are_forced_only_where_the_template_tells_how(kind: str) -> None:
    with calling(kind) as (client, _):
        for asked in ({"tool_choice": "required"}, {"response_format": {"type": "json_object"}}):
            error = client.error(tools=TOOLS, **asked)
            assert error["param"] in asked
            assert "how calls are written" in error["message"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tool_choice": "required"}, "tool_choice: expected one of tools"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": TOOLS},
            "tool_choice: expected one of tools",
        ),
        ({"tool_choice": {"type": "function"}, "tools": TOOLS}, "tool_choice: expected function"),
        ({"tool_choice": "any", "tools": TOOLS}, "tool_choice.type: Input should be 'none'"),
        *(
            ({"tool_choice": "required", "tools": [function(name, parameters)]}, said)
            for name, parameters, said in (
                ('f"', {}, "plain names"),
                ("f", [1], "objects as parameters"),
                ("f", {"x-guidance": {}}, "x-guidance"),
                ("f", {"properties": {"a": {"not": {}}}}, "not"),
            )
        ),
    ],
    ids=str,
)
def test_choices_and_schemas_that_cannot_be_kept_are_named(
    qwen: Client, changes: Json, said: str
) -> None:
    error = qwen.error(**changes)
    assert said in error["message"]
    assert error["param"].split(".")[0] in changes


@pytest.fixture(scope="module")
def qwen() -> Iterator[Client]:
    with calling("qwen3", writes=False) as (client, _):
        yield client
