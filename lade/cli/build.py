"""`lade pool build`: read files, tokenise them, and keep them in a pool on disk.

What was read is noted beside the pool, in a file of its name and `.sources`: the next run leaves
out what has not changed since, and goes on in the middle of a file where one was interrupted.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from rich.progress import TaskProgressColumn, TimeRemainingColumn

from lade.cli.chats import Message
from lade.cli.loading import bar
from lade.cli.sources import Render, TextPiece, UnreadableError, find_files, opened, pieces_of
from ngram_pool import NGramPool
from ngram_pool.files import stamp_of
from ngram_pool.writing import write_whole

# Pieces that are tokenised in one call: at most half a second for a tokenizer of two threads.
_BATCH = 2**7
# Seconds between saves, and at least so many times as long as a save takes.
_SAVE_EVERY_SEC, _SAVE_SHARE = 60.0, 20.0

Encode = Callable[[Sequence[str]], list[list[int]]]


class Read(NamedTuple):
    """A file as it was read, and how far."""

    num_bytes: int
    mtime_ns: int
    num_pieces: int
    is_whole: bool


@dataclass
class BuiltFrom:
    """What a pool on disk was built from, by file."""

    path: Path  # beside the pool
    read: dict[str, Read] = field(default_factory=dict)
    lost: str | None = None  # why nothing is known, although there is a file

    @classmethod
    def of(cls, pool_path: Path) -> "BuiltFrom":
        """Read what is noted of a pool; nothing is of one that something else has written since."""
        path = pool_path.with_name(f"{pool_path.name}.sources")
        try:
            content = json.loads(path.read_bytes())
            if content["pool"] != stamp_of(pool_path):
                return cls(path, lost=f"{pool_path.name} has changed since it was built")
            return cls(path, {name: Read(*each) for name, each in content["read"].items()})
        except FileNotFoundError:
            return cls(path)
        except (ValueError, TypeError, KeyError):
            return cls(path, lost=f"{path.name} is damaged")

    def save(self, pool_path: Path) -> None:
        """Note what was read, if anything, now that the pool is saved."""
        if not self.read:
            return
        content = {"pool": stamp_of(pool_path), "read": self.read}
        write_whole(self.path, json.dumps(content).encode())


@dataclass
class Built:
    """What a run has done."""

    num_tokens: int = 0
    num_files: int = 0
    num_unchanged: int = 0
    sec: float = 0.0  # all of it, without the last save
    left_out: Counter[str] = field(default_factory=Counter)  # by reason
    num_refused: int = 0  # chats


class _Part(NamedTuple):
    """A piece, and what is noted when it is in the pool; no piece where a file ends."""

    name: str
    piece: TextPiece | None
    read: Read


def build(
    pool: NGramPool,
    paths: Sequence[Path],
    tokenizer: Any,
    *,
    sources: BuiltFrom,
    save: Callable[[], None],
    built: Built,
    excluded: Sequence[Path] = (),
) -> None:
    """Add the text of files, each or each chat as a sequence of its own; `save` now and then.

    `sources` is brought up to date after every batch, and `built` receives what was done, also
    where this is interrupted. Nothing is saved at the end.
    """
    start = saved_at = perf_counter()
    found = find_files(paths, excluded)
    built.left_out += found.left_out
    encode, render = encoder_of(tokenizer), _renderer_of(tokenizer, built)
    saving_sec = 0.0
    sequence = 0
    with _bar(found.files) as show, ThreadPoolExecutor(1) as threads:

        def encoded(parts: list[_Part]) -> tuple[list[_Part], list[list[int]]]:
            return parts, encode([part.piece.text for part in parts if part.piece is not None])

        parts_of_all = _parts(found.files, sources, render, built, show)
        batches = iter(lambda: [*islice(parts_of_all, _BATCH)], [])
        # One batch is tokenised while the one before is observed.
        ahead = [threads.submit(encoded, parts) for parts in islice(batches, 1)]
        try:
            while ahead:
                parts, rows = ahead.pop().result()
                ahead += [threads.submit(encoded, following) for following in islice(batches, 1)]
                left = iter(rows)
                for part in parts:
                    if part.piece is not None:
                        if part.piece.begins:
                            if sequence:
                                pool.close_sequence(sequence)
                            sequence = pool.open_sequence()
                        token_ids = next(left)
                        pool.observe(token_ids, sequence)
                        built.num_tokens += len(token_ids)
                    else:
                        built.num_files += part.read.num_pieces > 0
                    sources.read[part.name] = part.read
                if perf_counter() - saved_at > max(_SAVE_EVERY_SEC, _SAVE_SHARE * saving_sec):
                    began = perf_counter()
                    save()
                    saved_at = perf_counter()
                    saving_sec = saved_at - began
        finally:
            threads.shutdown(cancel_futures=True)
            built.sec = perf_counter() - start


def _parts(
    files: Sequence[Path],
    sources: BuiltFrom,
    render: Render,
    built: Built,
    show: Callable[[int, Built], None],
) -> Iterator[_Part]:
    """Yield the pieces of all files that have changed since they were read."""
    num_bytes = 0
    for path in files:
        try:
            state = path.stat()
            before = sources.read.get(str(path))
            if before is not None and before[:2] != (state.st_size, state.st_mtime_ns):
                before = None
            if before is not None and before.is_whole:
                built.num_unchanged += 1
            else:
                read = before or Read(state.st_size, state.st_mtime_ns, 0, False)
                for part, place in _parts_of(path, read, render, built):
                    yield part
                    show(num_bytes + place, built)
            num_bytes += state.st_size
            show(num_bytes, built)
        except OSError:
            built.left_out["not readable"] += 1


def _parts_of(path: Path, read: Read, render: Render, built: Built) -> Iterator[tuple[_Part, int]]:
    """Yield the pieces of a file that were not read, each with the place on disk behind it."""
    num_before = read.num_pieces
    place = 0
    with opened(path) as (raw, content):
        try:
            for piece in islice(pieces_of(path, content, render), num_before, None):
                # In the middle of a text, if that was interrupted.
                begins = piece.begins or read.num_pieces == num_before
                read = read._replace(num_pieces=read.num_pieces + 1)
                place = raw.tell()
                yield _Part(str(path), TextPiece(piece.text, begins), read), place
        except UnreadableError as error:
            built.left_out[str(error)] += 1
    yield _Part(str(path), None, read._replace(is_whole=True)), place


def encoder_of(tokenizer: Any) -> Encode:
    """Return a function that tokenises texts as they are, in the tokenizer's own threads."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return lambda texts: [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    # A copy, as files of tokenizers may ask for truncation and padding. Through transformers, the
    # same takes 1.4 times as long.
    copied = type(backend).from_str(backend.to_str())
    copied.no_truncation()
    copied.no_padding()

    def encode(texts: Sequence[str]) -> list[list[int]]:
        return [each.ids for each in copied.encode_batch_fast(texts, add_special_tokens=False)]

    return encode


def _renderer_of(tokenizer: Any, built: Built) -> Render:
    """Return what makes a text of a chat: the tokenizer's template, or its texts without one."""
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


@contextmanager
def _bar(files: Sequence[Path]) -> Iterator[Callable[[int, Built], None]]:
    """Show a bar of the bytes on disk; yield a function that is told how many were read."""
    start = perf_counter()
    with bar(TaskProgressColumn(), TimeRemainingColumn()) as bars:
        task = bars.add_task("reading", total=sum(map(_size_of, files)))

        def show(num_bytes: int, built: Built) -> None:
            rate = built.num_tokens / max(perf_counter() - start, 1e-3)
            text = f"{built.num_files:,} files, {built.num_tokens:,} tokens ({rate:,.0f}/s)"
            bars.update(task, description=text, completed=num_bytes)

        yield show


def _size_of(path: Path) -> int:
    """Return the size of a file; 0 of one that is gone by now."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
