"""A chat in the browser, on Gradio's own, and a race of plain `generate` against lade.

    pip install ".[web]"                           # in a clone
    python examples/chat_web.py                    # the embedded default model; prints the address
    python examples/chat_web.py --model Qwen/Qwen3-0.6B --dtype float32

Every tab has a pool of its own, which is gone with it, and nothing is sent to anybody else. The
page is for this machine; put it behind a proxy that asks who comes before you let in others.
"""

import argparse
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple

import gradio as gr
import torch
from transformers import StoppingCriteria, StoppingCriteriaList, TextIteratorStreamer

import lade
from lade.apps.bench.report import why_different
from lade.models import LoadedModel, load
from lade.stats import ends_in_loop

_EXAMPLE = "Why is the sky blue?"
_FRAME_SEC = 0.1  # between two looks at an answer
_BAR = 24  # characters of the longest bar of a race
_LOOP = 320  # repeated tokens that end an answer, as in the terminal
# System fonts only: Gradio's own themes fetch theirs from Google.
_FONT = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif")
_MONO = ("ui-monospace", "Consolas", "monospace")
_QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}


@dataclass
class Tab:
    """What belongs to one browser tab."""

    pool: lade.NGramPool = field(default_factory=lade.NGramPool)
    stopped: threading.Event = field(default_factory=threading.Event)  # what runs for it


class Sides(NamedTuple):
    """What a race shows: who is how far, and both answers."""

    result: str
    plain: str
    with_lade: str


class Page:
    """The page and what it answers with.

    Attributes:
        tabs: by the hash that Gradio gives each one.
        blocks: Gradio's description of the page.
    """

    def __init__(self, loaded: LoadedModel, max_new_tokens: int = 512) -> None:
        self.model, self.tokenizer, self.name = loaded
        self.batcher = lade.Batcher(self.model)
        self.tabs: dict[str, Tab] = {}
        self.blocks = self._build(max_new_tokens)

    def launch(self, port: int | None = None) -> str:
        """Serve the page in the background; return its address."""
        self.blocks.queue(default_concurrency_limit=None).launch(
            server_name="127.0.0.1",
            server_port=port,
            share=False,
            prevent_thread_lock=True,
            quiet=True,
            show_error=True,
            footer_links=[],
            run_history=False,  # else browsers keep what was asked
            enable_monitoring=False,
            ssr_mode=False,
            mcp_server=False,
            max_file_size="1kb",
            theme=gr.themes.Default(primary_hue="blue", font=_FONT, font_mono=_MONO),
        )
        address: str = self.blocks.local_url
        return address

    def close(self) -> None:
        """Stop what runs, and the server."""
        for tab in self.tabs.values():
            tab.stopped.set()
        self.blocks.close(verbose=False)
        self.batcher.close()

    def _build(self, max_new_tokens: int) -> Any:
        title = f"lade: {self.name}"
        with gr.Blocks(title=title, analytics_enabled=False, fill_height=True) as blocks:
            with gr.Sidebar(open=False):
                system = gr.Textbox(label="System prompt", lines=2)
                temperature = gr.Slider(0, 2, 0, step=0.05, label="Temperature (0 is greedy)")
                longest = gr.Slider(1, 4096, max_new_tokens, step=1, label="Longest answer, tokens")
            options = [system, temperature, longest]
            gr.Markdown(f"**{self.name}** on this machine, decoded by lade", elem_id="model")
            with gr.Tab("Chat"):
                figures = gr.Markdown(elem_id="figures", render=False)
                chat = gr.ChatInterface(
                    self.answer,
                    chatbot=gr.Chatbot(height="65vh", buttons=["copy"], elem_id="chat"),
                    textbox=gr.Textbox(
                        placeholder="Ask something", container=False, elem_id="message"
                    ),
                    examples=[[_EXAMPLE]],
                    additional_inputs=options,
                    additional_outputs=[figures],
                    concurrency_limit=None,
                    **_QUIET,
                )
                figures.render()
                chat.chatbot.clear(self.forget, None, None, **_QUIET)
            with gr.Tab("Race"):
                gr.Markdown(
                    "The same question, answered by plain `generate` and then by lade. Neither "
                    "knows anything of the chat or of earlier races."
                )
                question = gr.Textbox(
                    label="Question", placeholder=_EXAMPLE, submit_btn="Start", stop_btn="Stop"
                )
                result = gr.Markdown(elem_id="race")
                with gr.Row():
                    with gr.Column():
                        gr.Markdown("**plain generate**")
                        plain = gr.Markdown(container=True, elem_id="plain")
                    with gr.Column():
                        gr.Markdown("**lade**")
                        with_lade = gr.Markdown(container=True, elem_id="lade")
                shown = [result, plain, with_lade]
                asked = [question, *options]
                question.submit(self.race, asked, shown, concurrency_limit=None, **_QUIET)
                question.stop(self.stop, None, None, queue=False, **_QUIET)
            blocks.unload(self.leave)
        return blocks

    # --- tabs -----------------------------------------------------------------------------------

    def tab(self, request: gr.Request) -> Tab:
        """Return the tab that a request comes from; what ran for it before ends."""
        tab = self.tabs.setdefault(str(request.session_hash), Tab())
        tab.stopped.set()
        tab.stopped = threading.Event()
        return tab

    def forget(self, request: gr.Request) -> None:
        """Begin anew, with a pool that knows nothing of what was said."""
        self.tab(request).pool = lade.NGramPool()

    def stop(self, request: gr.Request) -> None:
        """End what runs for a tab."""
        self.tab(request)

    def leave(self, request: gr.Request) -> None:
        """Drop all that belongs to a tab that was closed."""
        tab = self.tabs.pop(str(request.session_hash), None)
        if tab is not None:
            tab.stopped.set()

    # --- answers --------------------------------------------------------------------------------

    def answer(
        self,
        question: str,
        history: list[dict[str, Any]],
        system: str,
        temperature: float,
        longest: float,
        request: gr.Request,
    ) -> Iterator[tuple[str, str]]:
        """Yield the answer to the newest question as it grows, and its figures."""
        tab = self.tab(request)
        stopped = tab.stopped
        inputs = self.encode([*map(_as_message, history), _said("user", question)], system)
        options = _options(temperature, longest)
        config = lade.Config(reuses_prefix=True)  # of a conversation, only what is new is run
        start = last = perf_counter()
        token_ids: list[int] = []
        loops = False
        call = self.batcher.submit(
            **inputs, **options, pool=tab.pool, config=config, return_dict_in_generate=True
        )
        try:
            with suppress(CancelledError):
                for token_id in call:
                    token_ids.append(token_id)
                    loops = len(token_ids) % 16 == 0 and ends_in_loop(token_ids, _LOOP)
                    if stopped.is_set() or loops:
                        call.cancel()
                    if perf_counter() - last > _FRAME_SEC:
                        last = perf_counter()
                        yield self.text(token_ids), _speed(len(token_ids), last - start)
        finally:  # also where Gradio drops this, as its button for stopping has it do
            call.cancel()
        figures = _speed(len(token_ids), perf_counter() - start)
        if call.cancelled():
            figures += ", ended, as it repeats itself" if loops else ", stopped"
        else:
            stats = call.result().stats
            figures += f", {stats.mean_accepted_tokens:.2f} tokens a step"
            if stats.num_reused_tokens:
                figures += f", {stats.num_reused_tokens:,} tokens of the prompt not run again"
        yield self.text(token_ids), figures

    def race(
        self, question: str, system: str, temperature: float, longest: float, request: gr.Request
    ) -> Iterator[Sides]:
        """Answer a question twice, and yield how far both are; others wait meanwhile."""
        stopped = self.tab(request).stopped
        inputs = self.encode([_said("user", question)], system)
        options = {**inputs, **_options(temperature, longest)}
        stop = _Stop(stopped, inputs["input_ids"].shape[1])
        options["stopping_criteria"] = StoppingCriteriaList([stop])
        generate = type(self.model).generate
        runners: dict[str, Callable[..., Any]] = {
            "generate": lambda **more: generate(self.model, **options, **more),
            "lade": lambda **more: lade.generate(self.model, **options, **more),
        }
        texts, secs = dict.fromkeys(runners, ""), dict.fromkeys(runners, 0.0)
        for name, run in runners.items():
            for texts[name], secs[name] in self._streamed(run):
                yield Sides(_bars(secs), *texts.values())
            if stopped.is_set():
                return
        same = "The texts are the same."
        if texts["generate"] != texts["lade"]:
            same = f"The texts differ. {why_different(self.model)}"
        if stop.has_loop:
            same += " Answers were ended, as they repeat themselves."
        ratio = secs["generate"] / secs["lade"]
        result = f"{_bars(secs)}\n\nlade was {ratio:.2f} times as fast. {same}"
        yield Sides(result, *texts.values())

    def _streamed(self, run: Callable[..., Any]) -> Iterator[tuple[str, float]]:
        """Run something that generates, alone; yield its text as it grows, and its seconds."""
        streamer = TextIteratorStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        errors: list[Exception] = []

        def alone() -> None:
            try:
                torch.manual_seed(0)  # both draw alike
                self.batcher.run(lambda: run(streamer=streamer))
            except Exception as error:  # raised again below
                errors.append(error)
            finally:
                streamer.text_queue.put(streamer.stop_signal)

        thread = threading.Thread(target=alone)
        start = perf_counter()
        thread.start()
        text = ""
        for part in streamer:
            text += part
            yield text, perf_counter() - start
        thread.join()
        if errors:
            raise errors[0]

    def encode(self, messages: list[dict[str, str]], system: str) -> dict[str, Any]:
        """Return the tokens of a conversation; without a chat template, of its last message."""
        if not self.tokenizer.chat_template:
            return {**self.tokenizer(messages[-1]["content"], return_tensors="pt")}
        before = [_said("system", system)] if system.strip() else []
        encoded = self.tokenizer.apply_chat_template(
            [*before, *messages], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        return {
            name: encoded[name].to(self.model.device) for name in ("input_ids", "attention_mask")
        }

    def text(self, token_ids: list[int]) -> str:
        """Return what tokens say, without a character that is not there whole."""
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        return text.rstrip("\N{REPLACEMENT CHARACTER}")


class _Stop(StoppingCriteria):  # type: ignore[misc]
    """Ends a call once an event is set, or where its answer repeats itself."""

    def __init__(self, event: threading.Event, num_prompt_tokens: int) -> None:
        self._event, self._begin = event, num_prompt_tokens
        self.has_loop = False  # an answer that it ended

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        num_tokens = input_ids.shape[1] - self._begin
        loops = num_tokens % 16 == 0 and ends_in_loop(input_ids[0, self._begin :].tolist(), _LOOP)
        self.has_loop |= loops
        ends = loops or self._event.is_set()
        return torch.full((len(input_ids),), ends, device=input_ids.device)


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _as_message(shown: dict[str, Any]) -> dict[str, str]:
    """Return a message as chat templates take it; Gradio's has its text in parts."""
    content = shown["content"]
    parts = [content] if isinstance(content, str) else [part["text"] for part in content]
    return _said(shown["role"], "".join(parts))


def _options(temperature: float, longest: float) -> dict[str, Any]:
    options: dict[str, Any] = {"max_new_tokens": int(longest), "do_sample": temperature > 0}
    return options | ({"temperature": temperature} if temperature > 0 else {})


def _speed(num_tokens: int, sec: float) -> str:
    return f"{num_tokens:,} tokens, {num_tokens / max(sec, 1e-3):.1f} tokens a second"


def _bars(secs: dict[str, float]) -> str:
    """Return a bar for each side of a race, as long as it took so far."""
    longest = max(secs.values())
    rows = [
        f"| {name} | {'█' * round(_BAR * sec / longest)} | {sec:.1f} s |"
        for name, sec in secs.items()
    ]
    return "\n".join(["| | | |", "| --- | --- | ---: |", *rows])


def main() -> None:
    """Serve the page until Ctrl-C."""
    parser = argparse.ArgumentParser(description="Chat with a model in the browser.")
    parser.add_argument("--model", help="a Hugging Face id or a folder")
    parser.add_argument("--dtype", help="float32 gives the text of plain generate")
    parser.add_argument("--port", type=int, help="without it, the first free one from 7860 on")
    arguments = parser.parse_args()

    def tell(what: str) -> None:
        print(f"{what} …", flush=True)

    loaded = load(arguments.model, dtype=arguments.dtype, progress=tell)
    tell("Checking how the model verifies drafts")
    lade.warm_up(loaded.model)  # else the first answer would wait for it
    page = Page(loaded)
    print(page.launch(arguments.port), flush=True)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        page.close()


if __name__ == "__main__":
    main()
