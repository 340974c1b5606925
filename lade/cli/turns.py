"""`lade bench turns`: hold growing chats with a progress bar, print and write what turns take."""

from collections.abc import Sequence
from dataclasses import asdict

from lade.cli.bench import ResultFiles, describe_model, print_sheet, progress_bar
from lade.cli.loading import console
from lade.cli.options import Dtype, load
from lade.config import Config


def run(
    loading: tuple[str | None, str | None, int | None, bool],
    dtypes: Sequence[Dtype],
    num_turns: int,
    num_history: int,
    max_new_tokens: int,
    num_passes: int,
    config: Config,
    files: ResultFiles,
) -> None:
    """Measure chats in each number format; show and write them, also when interrupted.

    Args:
        loading: model, device, threads, and whether to trust its code.
        dtypes: number formats, each loaded in turn.
        num_turns, num_history, max_new_tokens: of each chat.
        num_passes: chats in each number format.
        config: of lade, which reuses prefixes.
        files: where to write results.
    """
    from lade.bench.environment import environment
    from lade.bench.turns import Chats, as_json, measure_turns, table, warm_up

    model, device, threads, trusts = loading
    measured: list[Chats] = []
    described = {}
    stopped_by: BaseException | None = None
    try:
        for dtype in dtypes:
            loaded = load(model, device, dtype, threads, trusts)
            described = describe_model(loaded)
            warm_up(loaded, max_new_tokens, config)
            chats = Chats(str(dtype), [])
            with progress_bar() as bars:
                task = bars.add_task(f"{dtype}", total=num_turns * num_passes)
                for seed in range(num_passes):
                    turns = measure_turns(
                        loaded,
                        num_turns,
                        num_history,
                        max_new_tokens,
                        config,
                        seed=seed,
                        on_turn=lambda bars=bars, task=task: bars.advance(task),  # type: ignore[misc]
                    )
                    if not chats.chats:
                        measured.append(chats)
                    chats.chats.append(turns)
    except BaseException as error:  # still show and write what was measured so far
        if not measured:
            raise
        stopped_by = error
    sheet = table(measured)
    print_sheet(sheet)
    if stopped_by is not None:
        num_chats = sum(len(chats.chats) for chats in measured)
        console.print(f"stopped after {num_chats} of {len(dtypes) * num_passes} chats")
    settings = {
        **described,
        "dtype": ", ".join(dtypes),
        "turns": num_turns,
        "history_tokens": num_history,
        "max_new_tokens": max_new_tokens,
        "passes": num_passes,
        "config": asdict(config),
        "interrupted": stopped_by is not None,
    }
    content = {"environment": environment(), "settings": settings, "runs": as_json(measured)}
    files.write(content, sheet)
    if stopped_by is not None:
        raise stopped_by
