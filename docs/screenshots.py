"""The picture of a chat in a terminal, from one that takes place: `python docs/screenshots.py`."""

import io
import re
from collections.abc import Iterator
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.cells import cell_len
from rich.console import Console
from rich.segment import Segment
from rich.terminal_theme import DEFAULT_TERMINAL_THEME
from rich.text import Text

IMAGES = Path(__file__).parent / "images"
_WIDTH = 92
_LINES = (
    "/plain Write a Python function that converts Celsius to Fahrenheit.",
    "/show",
)
# Without fonts from elsewhere, which a page of documentation has no need to fetch.
_SVG_FORMAT = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)


def folded(segments: list[Segment]) -> Iterator[Segment]:
    """Yield segments with lines broken where a terminal breaks them."""
    column = 0
    for text, style, control in segments:
        for letter in text:
            column = 0 if letter == "\n" else column + cell_len(letter)
            if column > _WIDTH:
                yield Segment("\n")
                column = cell_len(letter)
            yield Segment(letter, style, control)


def terminal() -> None:
    """Draw a chat in a terminal."""
    import lade
    from lade.apps.chat.conversation import Conversation
    from lade.apps.chat.terminal import PROMPT, Terminal
    from lade.models.settings import Settings

    loaded = lade.models.load(dtype="float32")  # where both write the same
    for is_plain in (True, False):  # checks of the model and compiling are no part of an answer
        Conversation(loaded, settings=Settings(8)).answer("Hi", str, is_plain=is_plain)
    conversation = Conversation(loaded, settings=Settings(max_new_tokens=128))
    console = Console(
        record=True,
        file=io.StringIO(),
        force_terminal=True,
        width=_WIDTH,
        highlight=False,
    )
    chat = Terminal(conversation, console)
    for line in _LINES:
        console.print(Text.assemble((PROMPT, "bold"), line))
        chat.take(line)
    console.print(Text(PROMPT, style="bold"))
    console._record_buffer[:] = folded(console._record_buffer)
    IMAGES.mkdir(exist_ok=True)
    (IMAGES / "chat.svg").write_text(
        console.export_svg(
            title="lade chat",
            theme=DEFAULT_TERMINAL_THEME,
            code_format=_SVG_FORMAT,
            unique_id="chat",
        )
    )


if __name__ == "__main__":
    terminal()
