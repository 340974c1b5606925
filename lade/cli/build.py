"""`lade pool build`: read files, tokenise them, and put them into a pool."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.progress import MofNCompleteColumn

from lade.cli.loading import bar
from lade.cli.sources import Message, Render, find_files, texts_of
from ngram_pool import NGramPool

_BATCH = 2**7  # texts that are tokenised in one call, which tokenizers do in several threads


@dataclass
class Built:
    """Counts of a run."""

    num_tokens: int = 0
    num_files: int = 0
    sec: float = 0.0
    left_out: Counter[str] = field(default_factory=Counter)  # by reason
    num_refused: int = 0  # chats


def build(pool: NGramPool, paths: Sequence[Path], tokenizer: Any) -> Built:
    """Add the text of files, each or each chat as a sequence of its own."""
    start = perf_counter()
    built = Built()
    found = find_files(paths, built.left_out)
    render = _renderer_of(tokenizer, built)
    with bar(MofNCompleteColumn()) as bars:
        texts = _texts(bars.track(found, description="reading files"), render, built)
        while batch := [*islice(texts, _BATCH)]:
            for ids in tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]:
                pool.observe(ids, None)
                built.num_tokens += len(ids)
    built.sec = perf_counter() - start
    return built


def _texts(files: Iterable[Path], render: Render, built: Built) -> Iterator[str]:
    for path in files:
        has_text = False
        try:
            for text in texts_of(path, render):
                has_text = True
                yield text
        except UnicodeError:
            built.left_out["no text in UTF-8"] += 1
        except OSError:
            built.left_out["not readable"] += 1
        built.num_files += has_text


def _renderer_of(tokenizer: Any, built: Built) -> Render:
    """Return a function from a chat to its text, by the chat template if there is one."""
    from jinja2 import TemplateError

    def render(messages: list[Message]) -> str:
        if tokenizer.chat_template:
            try:
                text: str = tokenizer.apply_chat_template(messages, tokenize=False)
                return text
            except TemplateError:
                built.num_refused += 1
        return "\n\n".join(message["content"] for message in messages)

    return render
