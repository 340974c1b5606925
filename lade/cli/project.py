"""`lade bench project`: what drafts are worth elsewhere, and what a draft model would be."""

from collections.abc import Sequence
from pathlib import Path

from lade.cli.bench import ResultFiles, print_sheet
from lade.cli.grid import choose_numbers, choose_sizes


def project_replays(step_cost_path: Path, mat_paths: Sequence[Path], files: ResultFiles) -> None:
    """Print and write replays projected to the step costs of another machine."""
    from lade.bench.project import as_json, project, read_points, read_step_costs, table
    from lade.bench.report import prompts_fingerprint

    costs = read_step_costs(step_cost_path)
    made = [each for path in mat_paths for each in project(path.stem, read_points(path), costs)]
    sheet = table(made, step_cost_path.name)
    print_sheet(sheet)
    described = {
        "step_cost": prompts_fingerprint(step_cost_path),
        "mat": [prompts_fingerprint(path) for path in mat_paths],
    }
    files.write(as_json(made, described), sheet)


def project_by_formula(
    cost_ratio: float | None,
    acceptance: str,
    k: str,
    step_cost_path: Path | None,
    measured: Sequence[Path],
    files: ResultFiles,
) -> None:
    """Print and write the what-if table of assisted generation, and real runs beside the formula.

    Raises:
        ValueError: nothing is asked for, a list is none, or a file is no result file.
    """
    from lade.bench.assisted import as_json, compare, comparison_table, predict, what_if_table
    from lade.bench.project import read_step_costs
    from lade.bench.report import prompts_fingerprint

    if cost_ratio is None and not measured:
        raise ValueError("expected --mat with --step-cost, --cost-ratio or --measured, got none")
    costs = None if step_cost_path is None else read_step_costs(step_cost_path)
    predictions = []
    sheets = []
    if cost_ratio is not None:
        acceptances = choose_numbers("--acceptance", acceptance)
        predictions = predict(acceptances, cost_ratio, choose_sizes("--k", k), costs)
        name = None if step_cost_path is None else step_cost_path.name
        sheets.append(what_if_table(predictions, name))
    comparisons = [each for path in measured for each in compare(path, costs)]
    if comparisons:
        sheets.append(comparison_table(comparisons))
    for sheet in sheets:
        print_sheet(sheet)
    described = {
        "step_cost": None if step_cost_path is None else prompts_fingerprint(step_cost_path),
        "measured": [prompts_fingerprint(path) for path in measured],
    }
    files.write(as_json(predictions, comparisons, described), *sheets)
