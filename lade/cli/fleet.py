"""`lade bench fleet`: simulate fleets with a progress bar, print and write the tables."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from lade.cli.bench import ResultFiles, print_sheet, progress_bar, say_written
from lade.cli.grid import choose_numbers
from lade.cli.loading import console

if TYPE_CHECKING:
    from lade.bench.fleet import Kind, Setup, Sharing
    from lade.bench.traffic import Population


def choose_sharings(exchange_sec: str, shards: str) -> "list[Sharing]":
    """Return ways of sharing: none, exchanges by their seconds, one pool, and shards by name.

    Raises:
        ValueError: a list is not one of different seconds above 0, or of different shards; "" is
            an empty one.
    """
    from lade.bench.fleet import Kind, Sharing

    seconds = choose_numbers("--exchange-sec", exchange_sec) if exchange_sec else []
    if 0 in seconds:
        raise ValueError(f"expected --exchange-sec above 0, got {exchange_sec!r}")
    return [
        Sharing(Kind.replica),
        *(Sharing(Kind.exchange, sec) for sec in seconds),
        Sharing(Kind.one),
        *map(Sharing, _choose_shards(shards)),
    ]


def _choose_shards(text: str) -> "list[Kind]":
    from lade.bench.fleet import SHARDED

    known = [kind.value for kind in SHARDED]
    names = [name.strip() for name in text.split(",")] if text else []
    if len({*names}) < len(names) or not {*names} <= {*known}:
        raise ValueError(
            f"expected --shards to be different ones of {', '.join(known)}, got {text!r}"
        )
    return [kind for name in names for kind in SHARDED if kind.value == name]


def run(
    traces_path: Path,
    fleets: Sequence[int],
    sharings: "Sequence[Sharing]",
    population: "Population",
    setup: "Setup",
    num_users: int,
    requests_per_day: float,
    files: ResultFiles,
) -> None:
    """Simulate every fleet with every sharing; show and write them, also when interrupted."""
    from lade.bench.fleet import Cell, Kind, measure_costs, simulate
    from lade.bench.fleet_report import as_json, on_paper, paper_table, table
    from lade.bench.plots import plot_fleet
    from lade.bench.report import prompts_fingerprint
    from lade.bench.traces import read_traces
    from lade.bench.traffic import Catalogue
    from lade.drafting.pool_drafter import PoolDrafter

    recorded = read_traces(traces_path)
    catalogue = Catalogue(recorded, PoolDrafter.num_successors, population.seed)
    runs = [
        (num_replicas, sharing)
        for num_replicas in fleets
        for sharing in sharings
        # One replica has nobody to share with.
        if num_replicas > 1 or sharing.kind not in (Kind.exchange, Kind.one)
    ]
    cells: list[Cell] = []
    stopped_by: BaseException | None = None
    with progress_bar() as bars:
        costs = measure_costs(catalogue, setup)
        paper = on_paper(costs, population, setup, num_users, requests_per_day)
        task = bars.add_task("simulating", total=len(runs) * setup.num_measured)
        try:
            for number, (num_replicas, sharing) in enumerate(runs):
                words = f"{num_replicas} replicas, {sharing.label}"
                bars.update(task, description=words, completed=number * setup.num_measured)
                cells.append(
                    simulate(
                        catalogue,
                        population,
                        num_replicas,
                        sharing,
                        setup,
                        on_request=lambda: bars.advance(task),
                    )
                )
        except BaseException as error:  # still show and write what was simulated so far
            if not cells:
                raise
            stopped_by = error
    sheets = [table(cells), paper_table(paper)]
    for sheet in sheets:
        print_sheet(sheet)
    if stopped_by is not None:
        console.print(f"stopped after {len(cells)} of {len(runs)} simulations")
    described = {
        "traces": {**prompts_fingerprint(traces_path), "num": len(recorded.traces)},
        "recorded": {"settings": recorded.settings, "environment": recorded.environment},
        "num_questions": len(catalogue),
        "shared_words": round(catalogue.shared_share, 4),
        "population": asdict(population),
        **asdict(setup),
        "interrupted": stopped_by is not None,
    }
    files.write(as_json(cells, paper, costs, described), *sheets)
    if files.plot is not None:
        say_written(plot_fleet(files.plot, "fleet", cells))
    if stopped_by is not None:
        raise stopped_by
