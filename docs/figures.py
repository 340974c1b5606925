"""Write every figure of README.md and of the site from docs/results and docs/support.

    python docs/figures.py            # writes what differs, and names it
    python docs/figures.py --check    # writes nothing, and fails where anything differs

A page holds a figure between two comments:

    <!-- figures: NAME ARGUMENTS -->
    …
    <!-- end -->

What stands between them is replaced by what the function of that name below returns. Both comments
may stand in one line, around a single number. Files are named by their path in docs/, without
`.json`. A plot names the file that it is of, and that file's digest.
"""

import hashlib
import json
import re
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import api  # of this folder
import commands

from benchmarks.cpu_engines import HEADINGS, cells_of
from benchmarks.environment import code as present_code
from benchmarks.report import share_text, speedup_text
from benchmarks.run import BenchSettings
from lade.apps.bench.report import LOOPS, OVERALL

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent

_MARKED = re.compile(r"<!-- figures: (?P<call>[^\n]*?) -->(?P<body>.*?)<!-- end -->", re.DOTALL)
_FIGURES: dict[str, Callable[..., str]] = {}

_NAMES = {
    "plain": "`generate`",
    "prompt_lookup": "transformers' prompt lookup",
    "no_drafts": "**lade**, no drafts",
    "lade": "**lade**",
    "lade_fresh": "**lade**",
    "lade_prewarmed": "**lade**, after `lade prewarm`",
    "openvino": "OpenVINO GenAI",
    "openvino_lookup": "OpenVINO GenAI's prompt lookup",
    "llama_cpp": "llama.cpp",
    "llama_cpp_lookup": "llama.cpp with llama-cpp-python's prompt lookup",
    "rival_prompt_lookup": "prompt lookup",
    "rival_recycling": "Token Recycling",
    "rival_sam_recycling": "SAM with Recycling",
    "rival_goose": "copy and adjacency (Goose-like)",
    "rival_sssd": "SSSD, without a datastore",
}
_ENGINES = {
    "plain": "none",
    "ngram": "vLLM's `ngram`, 1 to 4 tokens",
    "ngram_5": "vLLM's `ngram`, 5 tokens",
    "suffix": "vLLM's `suffix`",
    "pool": "**lade**, one pool for all",
    "pool_private": "**lade**, a pool for each request",
    "pool_prewarmed": "**lade**, one pool for all, after `lade prewarm`",
}
_ARENA = "results/arena"  # what is plotted
_MODELS = {"smollm2-135m-instruct": "SmolLM2-135M-Instruct"}


def main(arguments: Sequence[str]) -> int:
    """Write or check all pages and plots; return the exit code."""
    is_check = "--check" in arguments
    found = [*outdated()]
    for path, text in found:
        if not is_check:
            path.write_text(text, encoding="utf-8")
        print(f"{'differs from its results' if is_check else 'written'}: {path.relative_to(ROOT)}")
    plots = outdated_plots()
    for name in plots:
        path = _plot(name) if is_check else draw(name)
        print(f"{'differs from its results' if is_check else 'drawn'}: {path.relative_to(ROOT)}")
    if is_check and (found or plots):
        print("run: python docs/figures.py", file=sys.stderr)
    if older := of_older_code():
        print(f"of other code than this: {', '.join(older)}")
    return int(is_check and bool(found or plots))


def of_older_code() -> list[str]:
    """Return the result files that are not of the present code.

    Each names the digest of its code (`code`) or, where it was made before there was one, the
    commit of this repository that stored it first (`stored_in`).
    """
    files = sorted(
        path for part in ("results", "support") for path in (DOCS / part).rglob("*.json")
    )
    made = {path: _made(json.loads(path.read_text("utf-8"))).get("code") for path in files}
    return [str(path.relative_to(DOCS)) for path in files if made[path] != present_code()]


def _made(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a result says of its making; the fuzzer's files say it themselves."""
    found: Mapping[str, Any] = content.get("environment", content)
    made = found if "date" in found else next(iter(content.values()))
    return {**made.get("versions", {}), **made}


def outdated() -> Iterator[tuple[Path, str]]:
    """Yield every file whose figures differ from its results, with the text that it should have."""
    for path in pages():
        text = path.read_text(encoding="utf-8")
        made = filled(text, path.name)
        if made != text:
            yield path, made


def pages() -> list[Path]:
    """Return all Markdown files that may hold figures."""
    made = ("_build", "results", "support")
    found = [path for path in DOCS.rglob("*.md") if path.relative_to(DOCS).parts[0] not in made]
    return [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted(found)]


def filled(text: str, name: str = "text") -> str:
    """Return a page with its figures made anew.

    Raises:
        ValueError: a figure is asked for that there is not, or with wrong arguments.
    """

    def make(match: re.Match[str]) -> str:
        function, *arguments = shlex.split(match["call"])
        if function not in _FIGURES:
            raise ValueError(f"expected a figure of {', '.join(_FIGURES)} in {name}: {function}")
        try:
            figure = _FIGURES[function](*arguments)
        except (TypeError, KeyError, OSError) as error:
            raise ValueError(f"the figure '{match['call']}' in {name}: {error!r}") from error
        if match["body"].startswith("\n"):
            figure = f"\n\n{figure}\n\n"
        return f"<!-- figures: {match['call']} -->{figure}<!-- end -->"

    return _MARKED.sub(make, text)


def _figure(function: Callable[..., str]) -> Callable[..., str]:
    _FIGURES[function.__name__] = function
    return function


# --- lines -----------------------------------------------------------------------------------


@_figure
def command_line() -> str:
    """Return a section for every command, from the program itself."""
    return commands.markdown()


@_figure
def example(path: str) -> str:
    """Return a file of the repository as a block of code."""
    return f"```python\n{(ROOT / path).read_text(encoding='utf-8').strip()}\n```"


@_figure
def reference(*names: str) -> str:
    """Return a section for each of some names, from signatures and docstrings."""
    return api.markdown(*names)


@_figure
def names(*paths: str) -> str:
    """Return a short section for each of some names, a line for each method."""
    return api.summary(*paths)


@_figure
def lines(*folders: str) -> str:
    """Return how many hundred lines of Python the packages in some folders have, and all of it."""
    found: Counter[str] = Counter()
    for folder in folders:
        for path in (ROOT / folder).rglob("*.py"):
            package = path.relative_to(ROOT).parent
            depth = 2 if folder == "lade" else 1
            found["/".join(package.parts[:depth])] += len(path.read_text().splitlines())
    rows = [(f"`{name}`", _hundreds(num)) for name, num in sorted(found.items())]
    return _table(("package", "lines"), 1, [*rows, ("all", _hundreds(found.total()))])


def _hundreds(num_lines: int) -> str:
    return f"{round(num_lines, -2):,}"


# --- single numbers -------------------------------------------------------------------------


@_figure
def value(file: str, path: str, form: str = "") -> str:
    """Return one number of a file, as it is, as `x` (1.50x) or as `,` (thousands)."""
    found: Any = _read(file)
    for key in path.split("/"):
        found = found[int(key) if isinstance(found, list) else key]
    return speedup_text(found) if form == "x" else f"{found:{form}}"


_EDITS = {
    "rename": "an attribute renamed, nine times",
    "fix": "one line changed",
    "function": "a method added",
    "translation": "three places of a translation changed",
}
_EDITED = {
    ("request", "lade"): "lade",
    ("request", "prediction"): "with the text as the prediction",
    ("request", "wrong_prediction"): "with a wrong one",
    ("text", "lade"): "text in the prompt: lade",
    ("text", "prompt_lookup"): "prompt lookup",
    ("text", "prediction"): "with the prediction",
}


@_figure
def edits() -> str:
    """Return how many steps every edit took, with and without a prediction."""
    found = _read("results/predictions")["edits"]
    rows = [
        (
            *(label, str(found[name]["num_tokens"])),
            *(str(found[name][place][method]["num_steps"]) for place, method in _EDITED),
        )
        for name, label in _EDITS.items()
    ]
    return _table(("edit", "tokens", *_EDITED.values()), 1, rows)


# --- tables ---------------------------------------------------------------------------------


@_figure
def forwards(context: str, *files: str) -> str:
    """Return what forward passes behind so many tokens take, by torch and by lade."""
    rows: list[Sequence[str]] = []
    sizes: list[str] = []
    for file in files:
        found = _read(file)
        what = f"{found['model']}, {found['dtype']}"
        rows.append((f"{what}: reading all parameters", f"{1000 * found['reading']:.0f}"))
        for name, of_way in found["seconds"].items():
            sizes = [*of_way[context]]
            times = (f"{1000 * of_way[context][size]:.0f}" for size in sizes)
            rows.append((_NAMES.get(name, name), *times))
    padded = [(*row, *[""] * (1 + len(sizes) - len(row))) for row in rows]
    return _table(("milliseconds", *sizes), 1, padded)


@_figure
def budget(file: str, dtype: str) -> str:
    """Return tokens a second of the budget and of fixed numbers, medians of fresh processes."""
    found = _read(file)["summary"].items()
    summary = {name: each for name, each in found if name.startswith(dtype)}
    numbers = [*next(iter(summary.values()))["tokens_per_sec"]]
    ratios = ("ratio", "least_ratio", "least_of_categories", "ratio_of_first")
    rows = [
        (
            way.replace("a job", "compiled forward pass"),
            *(f"{each['tokens_per_sec'][number]:.1f}" for number in numbers),
            *(f"{each[ratio]:.2f}" for ratio in ratios),
        )
        for way, each in summary.items()
    ]
    shares = ("of the best", "lowest process", "lowest category", "first calls")
    return _table(("tokens a second", *numbers, *shares), 1, rows)


@_figure
def busy(file: str) -> str:
    """Return tokens a second beside busy processes, and shares of those on a quiet machine."""
    rows, headings = [], ["tokens a second", "quiet"]
    for dtype, rates in _read(file)["summary"].items():
        by_way: dict[str, dict[str, float]] = {}
        for name, rate in rates.items():
            way, *parts = name.split(", ")
            load = next((each for each in parts if "busy" in each), "quiet")
            threads = [each for each in parts if each != load]
            by_way.setdefault(", ".join([_NAMES[way], dtype, *threads]), {})[load] = rate
        for way, (quiet, *beside) in [(way, each.values()) for way, each in by_way.items()]:
            rows.append((way, f"{quiet:.0f}", *(f"{x:.0f} ({x / quiet:.2f})" for x in beside)))
        headings[2:] = [load for load in next(iter(by_way.values())) if load != "quiet"]
    return _table(headings, 1, rows)


@_figure
def cpu_engines(file: str, run: str) -> str:
    """Return what engines did with the same weights, in one dtype and with so many threads."""
    rows = [(_NAMES[name], *cells_of(row)) for name, row in _read(file)["runs"][run].items()]
    return _table(("decoding", *HEADINGS), 1, rows)


_COLUMNS = {
    "prompt_lookup": "transformers' prompt lookup",
    "no_drafts": "lade, no drafts",
    "lade_fresh": "**lade**",
    "openvino_lookup": "OpenVINO GenAI's prompt lookup",
    "llama_cpp": "llama.cpp",
}
_FEWEST = 3  # prompts of a category that may be named as the worst


@_figure
def headline(*files: str) -> str:
    """Return README's table: tokens a second of `generate`, and of others over it.

    Args:
        files: results of prompts in categories, or of engines, a row each; * for all of a folder.
    """
    rows, named = [], chain.from_iterable(sorted(DOCS.glob(f"{each}.json")) for each in files)
    found = [path.relative_to(DOCS).with_suffix("").as_posix() for path in named]
    for file in found:
        content = _read(file)
        made = content["environment"]
        machine = f"{made['cpu']}{' without AVX-512' if file.endswith('_avx2') else ''}"
        of_run = _of_engines(content) if "runs" in content else _of_categories(content)
        num_prompts, plain, ratios, worst, first = of_run
        dtype = content["settings"].get("dtype") or next(iter(content["runs"])).split(",")[0]
        dtype = "4-bit file" if "gguf" in file else dtype
        label = f"{dtype}, {num_prompts} prompts, {machine}"
        cells = [speedup_text(ratios.get(name)) for name in _COLUMNS]
        cells.insert(3, worst)
        rows.append((label, f"{plain:.0f}", *cells, first))
    columns = [*_COLUMNS.values()]
    columns.insert(3, "lade, worst category")
    first = "first token, ms: `generate`, lade"
    return _table((_model(found[0]), "`generate`, tokens/s", *columns, first), 1, rows)


_Run = tuple[int, float, Mapping[str, float], str, str]


def _of_categories(content: Mapping[str, Any]) -> _Run:
    """Return how many prompts a run had, `generate`'s speed, ratios to it, the worst category."""
    summary = content["summary"]
    overall = summary[OVERALL]
    lowest, category = min(
        (of["lade_fresh"]["speedup"], group)
        for group, of in summary.items()
        if group not in (OVERALL, LOOPS) and of["plain"]["num_prompts"] >= _FEWEST
    )
    ratios = {name: each["speedup"] for name, each in overall.items()}
    plain, worst = overall["plain"], f"{speedup_text(lowest)} ({category})"
    return plain["num_prompts"], plain["tokens_per_sec"], ratios, worst, ""


def _of_engines(content: Mapping[str, Any]) -> _Run:
    """Return the same of the first run of engines, and the seconds to the first token."""
    columns, methods = content["columns"], next(iter(content["runs"].values()))
    speed, ratio, first = map(columns.index, ("tokens_per_sec", "median_ratio", "first_token_sec"))
    ratios = {name: row[ratio] for name, row in methods.items()}
    plain = methods["plain"]
    times = f"{1000 * plain[first]:.0f}, {1000 * methods['lade_fresh'][first]:.0f}"
    return content["settings"]["prompts"]["num"], plain[speed], ratios, "", times


@_figure
def of_no_drafts(*files: str) -> str:
    """Return tokens a second, over those of the same forwards without drafts: a row a file."""
    rows, names = [], ("lade_fresh", "rival_prompt_lookup")
    for file in files:
        content = _read(file)
        overall = content["summary"][OVERALL]
        alone = overall["no_drafts"]["tokens_per_sec"]
        ratios = [
            speedup_text(overall[name]["tokens_per_sec"] / alone if name in overall else None)
            for name in names
        ]
        label = content["settings"]["dtype"] + ", with a table" * file.endswith("_with_table")
        label += ", one thread without AVX-512" * file.endswith("_avx2")
        rows.append((label, *ratios))
    return _table(("over no drafts", "lade", "prompt lookup of 10 tokens"), 1, rows)


@_figure
def methods(*files: str) -> str:
    """Return the methods of one file, or of several with the same columns."""
    rows = []
    for file in files:
        overall = _read(file)["summary"][OVERALL]
        for method, entry in overall.items():
            for label, each in _each_pass(_name(method), entry):
                ratio = speedup_text(each["speedup"])
                if (
                    len(entry.get("speedup_of_each_pass", [])) > 1
                    and each is entry
                    and method != "plain"
                ):
                    ratio += f" ({_passes_text(entry)})"
                rows.append((label, f"{each['tokens_per_sec']:.1f}", ratio, *_counts(each)))
    headings = ("decoding", "tokens/s", "speed-up", "MAT", "draft tokens/step", "same text")
    return _table(headings, 1, rows)


@_figure
def generators(file: str) -> str:
    """Return candidate generators in transformers' loop and as drafters."""
    rows = []
    for name, run in _read(file)["runs"].items():
        ways = run["transformers"], run["lade"]
        cells = [f"{way[field]:.2f}" for field in ("tokens_per_forward", "sec") for way in ways]
        rows.append((f"`{name}`{' *' * run['is_replayed']}", *cells))
    columns = "tokens a forward", "in lade", "CPU seconds", "in lade"
    return _table(("generator", *columns), 1, rows)


@_figure
def categories(*files: str) -> str:
    """Return lade's speed-up in every category, a column for each file."""
    summaries = [_read(file)["summary"] for file in files]
    groups = [group for group in dict.fromkeys(chain(*summaries)) if group not in (OVERALL, LOOPS)]
    rows = []
    for group in (*groups, OVERALL, LOOPS):
        entries = [summary.get(group) for summary in summaries]
        cells = (
            f"{speedup_text(of['lade_fresh']['speedup'])} ({of['plain']['num_prompts']})"
            if of
            else ""
            for of in entries
        )
        rows.append((group, *cells))
    columns = (
        f"{_read(file)['settings']['dtype']}{', no AVX-512' if file.endswith('_avx2') else ''}"
        for file in files
    )
    return _table(("speed-up of lade (prompts)", *columns), 1, rows)


@_figure
def arena(file: str) -> str:
    """Return MAT, and draft tokens a step, of every drafter at every number of draft tokens."""
    sizes, runs = _read(file)["settings"]["draft_sizes"], _replayed(file)
    rows = [
        (
            _NAMES[method],
            *(
                f"{run['mean_accepted_tokens']:.2f} ({run['draft_tokens_per_step']:.0f})"
                for run in (of_method[size] for size in sizes)
            ),
        )
        for method, of_method in runs.items()
    ]
    return _table(("drafter, MAT (draft tokens a step)", *map(str, sizes)), 1, rows)


@_figure
def arena_speeds(file: str) -> str:
    """Return the speed of every drafter on every curve, with its best number of draft tokens."""
    settings, rows = _read(file)["settings"], []
    for method, of_method in _replayed(file).items():
        cells = []
        for curve in settings["curves"]:
            best = max(settings["draft_sizes"], key=lambda size: of_method[size]["speeds"][curve])
            auto = f", {of_method[curve]['speeds'][curve]:.2f}x" if curve in of_method else ""
            cells.append(f"{of_method[best]['speeds'][curve]:.2f}x ({best}){auto}")
        rows.append((_NAMES[method], *cells))
    return _table(("drafter, speed (draft tokens)", *settings["curves"]), 1, rows)


def _replayed(file: str) -> dict[str, dict[int | str, Mapping[str, Any]]]:
    """Return the runs of the arena by method and number of draft tokens."""
    runs: dict[str, dict[int | str, Mapping[str, Any]]] = {}
    for run in _read(file)["runs"]:
        runs.setdefault(run["method"], {})[run["max_draft_tokens"]] = run
    return runs


_SERVERS = {
    "continuous": "`transformers serve --continuous-batching`",
    "lade": "`lade serve`",
}


@_figure
def servers(file: str, what: str, digits: str) -> str:
    """Return one figure of servers that were asked the same, by how many clients asked at once."""
    found = _read(file)["summary"]
    rows = [
        (label, *(f"{by_name[name][what]:.{digits}f}" for by_name in found.values()))
        for name, label in _SERVERS.items()
    ]
    return _table(("clients", *found), 1, rows)


_FUZZED = {
    "fuzz": ("random calls, mostly in float64", "num_cases", "num_mismatches"),
    "fuzz_float32": ("random calls in float32, compiled forward", "num_cases", "num_mismatches"),
    "fuzz_states": ("calls of models that change, also during the call", "num_cases", "num_wrong"),
}


@_figure
def fuzz() -> str:
    """Return how many random calls were compared with `generate`, and how many differed."""
    rows = []
    for name, (what, total, wrong) in _FUZZED.items():
        found = _read(f"results/{name}")
        made = _made(found)
        counts = (found[each] for each in (total, "num_refused", wrong))
        cells = (*(f"{each:,}" for each in counts), made["date"], made["code"])
        rows.append((what, *cells))
    return _table(("compared", "calls", "refused", "different", "date", "code"), 1, rows)


@_figure
def engine_drafts(file: str) -> str:
    """Return what methods in an engine drafted, and how much was accepted, by pass."""
    rows = []
    for method, by_pass in _engine_rows(file).items():
        if method != "plain":
            mats = [f"{row['mat']:.2f}" for row in by_pass]
            first = by_pass[0]
            share = first["num_accepted_tokens"] / first["num_draft_tokens"]
            per_token = first["num_draft_tokens"] / first["num_tokens"]
            label = _ENGINES[method]
            rows.append((label, *mats, f"{per_token:.2f}", f"{share:.0%}"))
    passes = [f"pass {row['pass']}" for row in by_pass]
    headings = (
        "method",
        *(f"MAT, {name}" for name in passes),
        "drafted for a token, pass 1",
        "accepted, pass 1",
    )
    return _table(headings, 1, rows)


@_figure
def engine_speeds(file: str) -> str:
    """Return how fast methods in an engine were in each pass, by the number of requests at once."""
    sizes = [*dict.fromkeys(row["concurrency"] for row in _read(file)["rows"])]
    cells: dict[str, list[str]] = {}
    for size in sizes:
        of_size = _engine_rows(file, size)
        for method, by_pass in of_size.items():
            ratios = (
                speedup_text(row["tokens_per_sec"] / plain["tokens_per_sec"])
                for row, plain in zip(by_pass, of_size["plain"], strict=True)
            )
            cells.setdefault(method, []).append(", ".join(ratios))
    rows = [(_ENGINES[name], *of) for name, of in cells.items() if name != "plain"]
    return _table(("method", *(f"{size} at once" for size in sizes)), 1, rows)


def _engine_rows(file: str, concurrency: int | None = None) -> dict[str, list[dict[str, Any]]]:
    """Return the passes of each method, with so many requests at once, or the first number."""
    rows = _read(file)["rows"]
    size = rows[0]["concurrency"] if concurrency is None else concurrency
    by_method: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["concurrency"] == size:
            by_method.setdefault(row["method"], []).append(row)
    return by_method


@_figure
def pool(file: str) -> str:
    """Return what the pool takes alone, by the number of tokens it holds."""
    content = _read(file)
    rows = [
        (
            f"{timing['num_tokens']:,}",
            f"{timing['observe_prompt_us']:.2f}",
            f"{timing['draft_us']:.0f} ({timing['draft_p95_us']:.0f})",
            f"{timing['bytes_per_token']:.0f}",
        )
        for timing in content["timings"]
    ]
    draft = f"draft of {content['settings']['max_draft_tokens']} tokens, µs (95 %)"
    return _table(("tokens held", "observe, µs a token", draft, "bytes a token"), 0, rows)


def _by_release() -> list[str]:
    """Return the files of architectures, the newest transformers first, then those of others."""
    files = [path.stem for path in (DOCS / "support").glob("*.json")]
    files = [stem for stem in files if stem not in ("formats", "forwards")]
    return sorted(files, key=lambda stem: [*map(int, re.findall(r"\d+", stem))], reverse=True)


@_figure
def support() -> str:
    """Return how many architectures are verified by which method."""
    names = ("all", "tree", "chain", "snapshot", "plain", "exact", "tie", "wrong", "failed")
    rows = []
    for file in _by_release():
        content = _read(f"support/{file}")
        label = f"transformers {content['environment']['transformers']}"
        for kind in ("architectures", "variants"):
            counts = content["summary"][kind]
            rows.append((f"{label}, {kind}", *(str(counts[name]) for name in names)))
    return _table(("checked", *names), 1, rows)


@_figure
def architectures() -> str:
    """Return what was found of each architecture, grouped by it, for the newest transformers."""
    content = _read(f"support/{_by_release()[0]}")
    made, jobs = content["environment"], _read("support/forwards")
    by_verdict: dict[tuple[str, str, str], dict[str, list[str]]] = {}
    for cells in content["rows"]:
        row = dict(zip(content["headings"], cells, strict=True))
        verdict = (row["one row"], row["batch"], row["text"])
        by_reason = by_verdict.setdefault(verdict, {})
        name = row["model type"] + "†" * (row["model type"] in jobs["jobs"])
        by_reason.setdefault(_reason(row["why no better method"]), []).append(name)
    rows = [
        (*verdict, reason, ", ".join(names))
        for verdict, by_reason in sorted(by_verdict.items(), key=_num_names, reverse=True)
        for reason, names in by_reason.items()
    ]
    headings = ("one row", "batch", "text", "why no better method", "model types")
    counts = jobs["summary"]
    return "\n\n".join(
        (
            f"With transformers {made['transformers']}, torch {made['torch']} and lade "
            f"{made['lade']}, {made['date']}, seed {content['settings']['seed']}. †: with a "
            f"compiled forward pass, {counts['jobs']} of {counts['all']} architectures.",
            _words(headings, rows),
        )
    )


def _num_names(item: tuple[object, Mapping[str, Sequence[str]]]) -> int:
    return sum(map(len, item[1].values()))


_NO_CROP = ", from which no token can be taken"


def _reason(text: str) -> str:
    """Return why no better method will do, without what differs from model to model."""
    text = re.sub(r" by [\d.]+ of their standard deviation \(expected at most [\d.]+\)", "", text)
    text = text.replace(" from those of plain decoding", "").replace(_NO_CROP, "")
    return re.sub(r"(its forward fails|run by torch) \([^;]*", r"\1", text)


def _words(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of texts, which may have what Markdown reads."""
    escaped = [[re.sub(r"([|<*])", r"\\\1", cell) for cell in row] for row in rows]
    return _table(headings, len(headings), escaped)


@_figure
def formats(*widths: str) -> str:
    """Return how drafts are verified in each weight format, and what longer forwards cost."""
    by_format: dict[str, dict[str, dict[str, str]]] = {}
    content = _read("support/formats")
    for cells in content["formats"]:
        row = dict(zip(content["headings"], cells, strict=True))
        if row["one row"]:
            by_format.setdefault(row["format"], {})[row["activations"]] = row
    rows = []
    for name, found in by_format.items():
        methods = [_verified(found.get(dtype)) for dtype in ("float32", "bfloat16")]
        costs = found.get("bfloat16", next(iter(found.values())))
        rows.append((name, *methods, *(f"{float(costs[width]):.1f}" for width in widths)))
    headings = [f"{width} tokens" for width in widths]
    return _table(("format", "in float32", "in bfloat16", *headings), 3, rows)


def _verified(row: Mapping[str, str] | None) -> str:
    return "" if row is None else f"{row['one row']}, {row['text'].split(';')[0]}"


@_figure
def source(*files: str) -> str:
    """Return where figures come from: the files, the settings, the machine and the date."""
    names = ", ".join(f"`docs/{file}.json`" for file in files)
    content = _read(files[0])
    parts = []
    if "model" in content.get("settings", {}):
        settings = content["settings"]
        every = [_read(file)["settings"] for file in files]
        dtypes = dict.fromkeys(each["dtype"] for each in every if "dtype" in each)
        dtype = f" in {' and '.join(dtypes)}" if dtypes else ""  # else its table says it
        parts.append(f"{_model(files[0])}{dtype}")
        if "max_new_tokens" in settings and len({_decoding(file) for file in files}) == 1:
            parts.append(f"{_decoding(files[0])}, {settings['max_new_tokens']} new tokens")
        times = settings.get("passes", 1)
        kept = ", pools kept from one to the next" if settings.get("keep") else ""
        if "prompts" in settings:
            prompts = settings["prompts"]
            num = sum(each["num"] for each in (prompts if isinstance(prompts, list) else [prompts]))
            parts.append(f"{num} prompts, {times} {'pass' if times == 1 else 'passes'}{kept}")
    made = _made(content)
    if "versions" not in made:
        parts.append(_hardware(files[0]))
    engines = [name for name in ("vllm", "openvino-genai", "llama-cpp-python") if name in made]
    parts += [f"{name} {made[name]}" for name in engines]
    return f"*{names}: {'; '.join(parts)}; {made['date'].split()[0]}.*"


# --- plots ----------------------------------------------------------------------------------


def outdated_plots() -> list[str]:
    """Return the names of plots that are not of their present result files."""
    return [
        name
        for name in _PLOTS
        if not _plot(name).exists() or _mark(name) not in _plot(name).read_text("utf-8")
    ]


def draw(name: str) -> Path:
    """Draw a plot as a small SVG, marked with what it is of; return its file."""
    file, make = _PLOTS[name]
    with tempfile.TemporaryDirectory() as folder:
        from matplotlib import rc_context

        # Text as text, and the same file each time.
        with rc_context(
            {
                "svg.fonttype": "none",
                "svg.hashsalt": name,
                "font.size": 9,
                "font.sans-serif": ["DejaVu Sans"],
            }
        ):
            make(Path(folder), name, _read(file))
        text = (Path(folder) / f"{name}.svg").read_text(encoding="utf-8")
    text = re.sub(r"\n *<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    _plot(name).parent.mkdir(exist_ok=True)
    _plot(name).write_text(f"{text.strip()}\n{_mark(name)}\n", encoding="utf-8")
    return _plot(name)


def _plot(name: str) -> Path:
    return DOCS / "plots" / f"{name}.svg"


def _mark(name: str) -> str:
    file, _ = _PLOTS[name]
    return f"<!-- of {file}.json {hashlib.sha256(_path(file).read_bytes()).hexdigest()[:16]} -->"


def _draw_arena(folder: Path, name: str, content: Any) -> None:
    figure, axes = _new_figure()
    sizes = content["settings"]["draft_sizes"]
    for label, runs in _replayed(_ARENA).items():
        line = [runs[size]["mean_accepted_tokens"] for size in sizes]
        axes.plot(sizes, line, "-", marker="o", label=label)
    axes.set_xlabel("draft tokens, at most")
    axes.set_ylabel("mean accepted tokens")
    _save(figure, axes, folder, name)


def _new_figure() -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # not pyplot, which keeps figures and wants a display

    figure = Figure(figsize=(6.0, 4.0), layout="constrained")
    return figure, figure.subplots()


def _save(figure: Any, axes: Any, folder: Path, name: str) -> None:
    axes.legend()
    figure.savefig(folder / f"{name}.svg", dpi=150)


# By name: the file that it is of, and what draws it.
_PLOTS: dict[str, tuple[str, Callable[[Path, str, Any], None]]] = {
    "arena": (_ARENA, _draw_arena),
}


def _table(headings: Sequence[str], num_words: int, rows: Sequence[Sequence[str]]) -> str:
    """Return a table without its title; the columns after the first `num_words` are numbers."""
    rule = ["---" if column < num_words else "---:" for column in range(len(headings))]
    lines = [[cell.replace("|", "\\|") for cell in row] for row in (headings, rule, *rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


# --- reading --------------------------------------------------------------------------------


def _path(file: str) -> Path:
    return DOCS / f"{file}.json"


@cache
def _read(file: str) -> Any:
    return json.loads(_path(file).read_text(encoding="utf-8"))


def _settings(content: Mapping[str, Any]) -> BenchSettings:
    return BenchSettings(
        **{name: content[name] for name in BenchSettings.__dataclass_fields__ if name in content}
    )


def _decoding(file: str) -> str:
    return _settings(_read(file)["settings"]).describe()


def _model(file: str) -> str:
    name = str(_read(file)["settings"]["model"])
    return _MODELS.get(name, name)


def _hardware(file: str) -> str:
    made, settings = _read(file)["environment"], _read(file)["settings"]
    if made["gpu"] and "cuda" in str(settings.get("device")):
        return str(made["gpu"])
    number = settings.get("threads")
    threads = f", {number} {'thread' if number == 1 else 'threads'}" if number else ""
    return f"{made['cpu']}, {made['num_cores']} cores{threads}"


def _name(method: str) -> str:
    return _NAMES.get(method, f"`{method}`")


def _each_pass(label: str, entry: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if "each_pass" not in entry:
        yield label, entry
        return
    for number, of_pass in enumerate(entry["each_pass"], start=1):
        yield f"{label}, pass {number}", of_pass


def _passes_text(entry: Mapping[str, Any]) -> str:
    return ", ".join(f"{ratio:.2f}" for ratio in entry["speedup_of_each_pass"])


def _mat(entry: Mapping[str, Any]) -> str:
    return f"{entry['mean_accepted_tokens']:.2f}"


def _counts(entry: Mapping[str, Any]) -> tuple[str, str, str]:
    return _mat(entry), f"{entry['draft_tokens_per_step']:.1f}", share_text(entry["same_text"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
