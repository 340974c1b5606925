"""Turn requests into prompts, lengths and options of calls, within the server's limits."""

import copy
import math
import threading
from dataclasses import replace
from functools import cached_property
from typing import Any

import llguidance
import torch

from lade.apps.server.errors import ApiError
from lade.apps.server.exchange import Exchange, OneAnswer
from lade.apps.server.grammars import Grammars
from lade.apps.server.options import ServerOptions
from lade.apps.server.requests import Asked, Chat, Completion, Message, wrong
from lade.compat.attempts import Attempt
from lade.config import Config
from lade.errors import UserError
from lade.models.loading import LoadedModel
from lade.models.prompts import (
    encode_messages,
    num_positions,
    tool_calls,
    useless_fields,
    why_unknown,
)
from lade.models.responses import CallForm, call_form_of, parser_of

# Bytes of a token in the mean, and of a body beside its prompt. A body with more bytes than its
# longest prompt could have is refused before it is tokenized.
_MOST_BYTES, _OTHER_BYTES = 64, 2**16
# Tools whose calls are predicted. Each runs the chat template, while other requests wait.
_MOST_TOOLS = 64
_USUAL_NEW_TOKENS = 1024  # if neither request nor model names a number


class Preparing:
    """Prepares the calls of requests; its methods may be called from threads."""

    def __init__(self, loaded: LoadedModel, options: ServerOptions) -> None:
        self._loaded, self._tokenizer = loaded, loaded.tokenizer
        self._options, self._positions = options, num_positions(loaded.model) or math.inf
        self._max_prompt_tokens = min(options.max_prompt_tokens or math.inf, self._positions - 1)
        self.grammars = Grammars(loaded)
        self._lock = threading.Lock()  # tokenizers change settings, which is not thread-safe

    def prepare(self, exchange: Exchange) -> None:
        """Set an exchange's config, answers and prediction.

        Raises:
            ApiError: the request makes no prompt, or one that is too long.
        """
        asked, ignored, prediction = exchange.asked, [*exchange.ignored], None
        chat = asked if isinstance(asked, Chat) else None
        exchange.config = self._config(asked)
        num_bytes = max(0, exchange.num_held - _OTHER_BYTES)
        num_prompts = len(asked.prompt) if isinstance(asked, Completion) else 1
        self._check_length(num_bytes // _MOST_BYTES // num_prompts, "prompt", " or more")
        if chat is not None and chat.prediction is not None:
            text = "".join(part.text for part in chat.prediction.content)
            prediction = self._predicted(text)
        try:
            with self._lock:
                given = self._encoded(asked, ignored)
        except ApiError:
            raise
        except Exception as error:  # templates and tokenizers raise anything
            message = "expected a request that makes a prompt"
            raise ApiError(400, str(error) if isinstance(error, UserError) else message) from error
        for inputs in given:
            options = self._generation(asked, inputs["input_ids"].shape[1])
            for number in range(asked.n or 1):  # each with the next seed
                seed = None if asked.seed is None else asked.seed + number
                exchange.answers.append(OneAnswer(len(exchange.answers), inputs, options, seed))
        if chat is not None:
            if chat.tools and chat.prediction is None and chat.speculation is not False:
                with Attempt():  # a template may refuse a call that no answer would contain
                    calls = tool_calls(self._tokenizer, chat.tools[:_MOST_TOOLS])
                    prediction = self._predicted(calls)
            text = self._tokenizer.decode(given[0]["input_ids"][0])
            exchange.parser = parser_of(self._loaded, text, chat.tools)
        exchange.ignored, exchange.prediction = ignored, prediction
        exchange.tokens = None if asked.num_logprobs is None else self.grammars.tokens

    def grammar(self, exchange: Exchange, tenant: str) -> llguidance.LLMatcher:
        """Return the grammar of a chat's schema, of the calls that it forces, or of either.

        Raises:
            ApiError: no grammar can be made of it, or the form of the model's calls is unknown.
        """
        chat = exchange.asked
        assert isinstance(chat, Chat)
        schema, functions, param = None, chat.tools_forced, "tool_choice"
        if functions is None:
            schema, param = chat.schema_asked, "response_format"
            assert schema is not None
            made = self.grammars.made(schema, tenant)
            functions = [tool["function"] for tool in chat.tools or ()]
            if not functions:
                return made
        form = self._call_form
        if form is not None:  # then there is a parser
            thinks = exchange.parser.is_thinking
            form = form._replace(thoughts=None) if thinks is False else form
        if form is None or (thinks and form.thoughts is None):
            reason = "not supported: the model's chat template does not tell how calls are written"
            raise wrong(param, reason)
        asked = form, functions, schema, tenant
        try:
            return self.grammars.of_calls(*asked, is_thinking=bool(thinks))
        except ApiError as error:
            error.param = "tools"
            raise

    @cached_property
    def _call_form(self) -> CallForm | None:
        with Attempt(), self._lock:  # a template may refuse a call that no answer would contain
            return call_form_of(self._loaded)
        return None

    def _config(self, asked: Asked) -> Config:
        """Return the config of a call, unless fields contradict each other or the server's."""
        config = self._options.config
        if asked.speculation is not False:
            return config
        for name in ("prediction", "pools"):
            if getattr(asked, name, None) is not None:
                raise ApiError(400, f"expected no {name}, as nothing is drafted", param=name)
        return replace(config, max_draft_tokens=0)

    def _encoded(self, asked: Asked, ignored: list[str]) -> list[dict[str, Any]]:
        """Return the inputs of each prompt; append the names of unused fields to `ignored`."""
        if isinstance(asked, Completion):
            return [*map(self._encoded_text, asked.prompt)]
        assert isinstance(asked, Chat)
        if not self._tokenizer.chat_template:
            raise UserError("expected a completion, for the model has no chat template")
        messages = [each.as_template_input() for each in asked.messages]
        options = {"tools": asked.tools or None, **(asked.chat_template_kwargs or {})}
        for useless in useless_fields(self._tokenizer, messages, options):
            of_what, _, name = useless.rpartition(".")
            is_known = of_what.startswith("messages.") and name in Message.without_effect
            if useless == "tools" or not (is_known or self._options.ignores_unknown):
                raise wrong(useless, "not supported: the model's chat template has no use for it")
            ignored.append(useless)
        if asked.continue_final_message:
            options |= {"add_generation_prompt": False, "continue_final_message": True}
        return [encode_messages(self._loaded, messages, options=options)]

    def _encoded_text(self, prompt: str | list[int]) -> dict[str, Any]:
        if isinstance(prompt, str):
            return encode_messages(self._loaded, [{"content": prompt}], is_raw=True)
        if why := why_unknown(self._loaded, max(prompt)):
            raise wrong("prompt", why)
        ids = torch.tensor([prompt], dtype=torch.int64, device=self._loaded.model.device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def _generation(self, asked: Asked, num_prompt: int) -> Any:
        """Return the GenerationConfig of a call, if prompt and answer fit into the context."""
        self._check_length(num_prompt, "prompt")
        most = int(min(self._options.max_new_tokens, self._positions - num_prompt))
        wanted = getattr(asked, "max_completion_tokens", None) or asked.max_tokens
        if wanted is not None and wanted > most:
            message = f"expected an answer of at most {most} tokens after a prompt of {num_prompt}"
            raise _too_long(f"{message}, got {wanted}", "max_tokens")
        options = copy.deepcopy(self._loaded.model.generation_config)
        if wanted is None:
            wanted = max(options.max_new_tokens or 0, _USUAL_NEW_TOKENS)
        options.max_new_tokens, options.max_length = min(wanted, most), None
        options.return_dict_in_generate = True
        for name in ("top_p", "top_k", "min_p", "repetition_penalty"):
            if (value := getattr(asked, name)) is not None:
                setattr(options, name, max(value, 0))
        if asked.temperature is not None:
            options.do_sample = asked.temperature > 0
            options.temperature = asked.temperature or None
        elif asked.top_p is not None:
            options.do_sample = True
        if biases := asked.logit_bias:  # transformers takes no empty dict
            if why := why_unknown(self._loaded, max(biases)):
                raise wrong("logit_bias", why)
            options.sequence_bias = {(token,): float(bias) for token, bias in biases.items()}
        return options

    def _predicted(self, text: str) -> list[int]:
        """Return the tokens of a prediction, which may have as many as a prompt."""
        # Tokenizers release the GIL only for batches.
        encode = self._tokenizer._tokenizer.encode_batch_fast
        token_ids: list[int] = encode([text], add_special_tokens=False)[0].ids
        self._check_length(len(token_ids), "prediction")
        return token_ids

    def _check_length(self, num_tokens: int, what: str, more: str = "") -> None:
        if num_tokens > (most := self._max_prompt_tokens):
            message = f"expected a {what} of at most {most} tokens, got {num_tokens}{more}"
            raise _too_long(message, None if what == "prompt" else what)


def _too_long(message: str, param: str | None) -> ApiError:
    return ApiError(400, message, param=param, code="context_length_exceeded")
