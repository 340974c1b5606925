"""`lade bench serve`: ask running servers with a progress bar, print and write the table."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from lade.cli.bench import ResultFiles, describe_prompts, print_sheet, progress_bar
from lade.cli.loading import console

if TYPE_CHECKING:
    from lade.bench.prompts import PromptFile


def read_servers(texts: Sequence[str]) -> dict[str, str]:
    """Return the addresses of servers by name, from texts as NAME=URL.

    Raises:
        ValueError: one is not that, or a name stands twice.
    """
    servers: dict[str, str] = {}
    for text in texts:
        name, _, address = text.partition("=")
        if not name or not address.startswith(("http://", "https://")):
            raise ValueError(f"expected a server as NAME=http://HOST:PORT, got {text!r}")
        if name in servers:
            raise ValueError(f"expected different names of servers, got {name!r} twice")
        servers[name] = address
    return servers


def run(
    servers: Mapping[str, str], chosen: "PromptFile", max_new_tokens: int, files: ResultFiles
) -> None:
    """Ask all servers; show and write what they replied, also when interrupted."""
    from lade.bench.environment import environment
    from lade.bench.serving import Reply, as_json, ask_all, table

    replies: list[Reply] = []
    num_turns = sum(len(prompt.turns) for prompt in chosen.prompts)
    stopped_by: BaseException | None = None
    try:
        with progress_bar() as bars:
            task = bars.add_task("asking", total=num_turns * len(servers))
            for reply in ask_all(servers, chosen.prompts, max_new_tokens):
                replies.append(reply)
                bars.update(task, advance=1, description=f"{reply.prompt_id}, {reply.server}")
    except BaseException as error:  # still show and write what was measured so far
        if len({reply.server for reply in replies}) < len(servers):
            raise
        stopped_by = error
    title = f"{len(chosen.prompts)} conversations, {num_turns} turns, {max_new_tokens} tokens each"
    sheet = table(replies, title)
    print_sheet(sheet)
    if stopped_by is not None:
        console.print(f"stopped after {len(replies)} of {num_turns * len(servers)} answers")
    settings = {
        "prompts": describe_prompts(chosen),
        "max_new_tokens": max_new_tokens,
        "interrupted": stopped_by is not None,
    }
    files.write({"environment": environment(), "settings": settings, **as_json(replies)}, sheet)
    if stopped_by is not None:
        raise stopped_by
