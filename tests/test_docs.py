"""What README and the site say is what there is: figures, links, code, and how long they are."""

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(
    path
    for path in [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    if "_build" not in path.relative_to(ROOT).parts
)
_CODE = re.compile(r"```(?P<language>\S*)[^\n]*\n(?P<code>.*?)```", re.DOTALL)
_LINK = re.compile(r"\]\((?![a-z]+:)(?P<place>[^)#\s]*)(?:#(?P<anchor>[^)\s]+))?\)")
# Of README and the site, outside of markers.
_SPEED_UP = re.compile(r"\b\d+\.\d+x")


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    return load(DOCS / "figures.py")


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def names_of(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


# --- figures --------------------------------------------------------------------------------


def test_every_figure_is_that_of_its_result_file(figures: ModuleType) -> None:
    assert names_of([path for path, _ in figures.outdated()]) == [], "run: python docs/figures.py"
    assert figures.outdated_plots() == [], "run: python docs/figures.py"


def test_a_figure_that_was_changed_by_hand_is_found(figures: ModuleType) -> None:
    call = "<!-- figures: value results/fuzz num_cases , -->{}<!-- end -->"
    assert figures.filled(call.format("20,001")) == call.format("20,000")


def test_tables_have_every_row_in_full(figures: ModuleType) -> None:
    headings = ("kind", "text", "draft tokens/step", "none", "n")
    lines = figures._table(headings, 2, [("a", "x|y", "10.5", "", "7")]).splitlines()
    assert lines[1:] == ["| --- | --- | ---: | ---: | ---: |", "| a | x\\|y | 10.5 |  | 7 |"]


def test_no_speed_up_is_typed_by_hand(figures: ModuleType) -> None:
    for path in figures.pages():
        text = re.sub(r"<!-- figures: .*?<!-- end -->", "", path.read_text(), flags=re.DOTALL)
        assert not _SPEED_UP.findall(text), path.name


def test_results_say_what_code_they_are_of_and_are_small(figures: ModuleType) -> None:
    files = [path for part in ("results", "support") for path in (DOCS / part).rglob("*.json")]
    for path in files:
        made = figures._made(json.loads(path.read_text()))
        of = made["code"] if "code" in made else made["stored_in"]
        assert re.fullmatch("[0-9a-f]{7,12}", of), path.name
        assert made["lade"], path.name
    assert sum(path.stat().st_size for path in files) <= 200_000  # `python -m benchmarks publish`


# --- pages ----------------------------------------------------------------------------------


def test_readme_and_architecture_are_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 90
    assert len((ROOT / "ARCHITECTURE.md").read_text().splitlines()) < 150


def test_the_site_has_few_pages_and_words() -> None:
    pages = [path for path in PAGES if DOCS in path.parents]
    assert len(pages) <= 22
    assert sum(len(path.read_text().split()) for path in pages) <= 30_000


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_a_clone_has_two_commands_and_packages_go_into_an_environment(page: str) -> None:
    blocks = [block["code"] for block in _CODE.finditer((ROOT / page).read_text())]
    assert re.findall(r"^make (\w+)", blocks[0], re.MULTILINE) == ["demo", "test"]
    # Python of Debian takes no others; without torch's build for CPUs, pip fetches that for GPUs.
    first, second, third = blocks[1].splitlines()
    assert "python3 -m venv" in first
    assert second.startswith("pip install torch --index-url https://download.pytorch.org/whl/cpu")
    assert third.startswith('pip install ".[cli]"')


@pytest.mark.parametrize("page", names_of(PAGES))
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    for link in _LINK.finditer(_CODE.sub("", path.read_text())):
        target = (path.parent / link["place"]).resolve() if link["place"] else path
        assert target.exists(), link[0]
        if link["anchor"] and target.suffix == ".md":
            assert link["anchor"] in anchors_of(target), link[0]


def anchors_of(path: Path) -> set[str]:
    """Return the anchors that GitHub makes of the headings of a page, as the site does."""
    headings = re.findall(r"^#+ (.+)$", _CODE.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}


@pytest.mark.parametrize("page", names_of(PAGES))
def test_python_code_compiles(page: str) -> None:
    for block in _CODE.finditer((ROOT / page).read_text()):
        if block["language"] == "python":
            compile(block["code"], page, "exec")
        # Else it would not read on GitHub as on the site.
        assert block["language"][:1] != "{"


@pytest.mark.parametrize("page", names_of(PAGES))
def test_no_label_stands_before_a_heading(page: str) -> None:
    labels = re.findall(r"^\([\w-]+\)=$", (ROOT / page).read_text(), re.MULTILINE)
    assert labels == []  # GitHub shows them as text, and links to them lead to the page's top


def test_every_page_of_the_site_is_in_its_index() -> None:
    text = (DOCS / "index.md").read_text()
    for path in DOCS.rglob("*.md"):
        name = path.relative_to(DOCS).with_suffix("")
        if name.parts[0] not in ("_build", "index"):
            assert re.search(rf"^- \[.+\]\({name}\.md\): .+\.$", text, re.MULTILINE), name


def test_every_public_name_is_in_the_reference() -> None:
    import lade
    import ngram_pool

    text = "".join(path.read_text() for path in (DOCS / "reference").glob("*.md"))
    names = {
        name: getattr(package, name) for package in (lade, ngram_pool) for name in package.__all__
    }
    for name, thing in names.items():
        if name == "__version__" or isinstance(thing, ModuleType):
            continue
        assert re.search(rf"^### (lade|ngram_pool)\.{name}$", text, re.MULTILINE), name


def test_every_warning_is_explained() -> None:
    import lade

    text = (DOCS / "troubleshooting.md").read_text()
    for name in lade.__all__:
        assert "Warning" not in name or f"\n| `{name}` |" in text, name


def test_the_reference_shows_how_things_are_called_and_what_they_say() -> None:
    text = (DOCS / "reference" / "api.md").read_text()
    part = text.split("\n### lade.generate\n")[1].split("\n### ")[0]
    assert "    prediction: str | Sequence[int] | Tensor | None = None,\n" in part
    assert "\n- `input_ids`: int64 [rows, num_tokens], batches padded on the left.\n" in part
    assert "\n- `UnsupportedOptionError`: " in part
    assert "\n#### Batcher.submit\n" in text
    assert "\n#### Batcher.seat" not in text


def test_every_command_is_on_its_page() -> None:
    text = (DOCS / "reference" / "cli.md").read_text()
    for name in ("generate", "demo", "prewarm", "warm-up", "pool build", "bench"):
        assert f"\n## lade {name}\n" in text
    assert re.search(r"^\| `--max-new-tokens` \w+ \| .*\. Default: `256`\. \|$", text, re.MULTILINE)


# --- PyPI -----------------------------------------------------------------------------------


def test_links_of_the_readme_work_without_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "hatchling.metadata.plugin.interface"  # only builds have it
    interface = ModuleType(name)
    monkeypatch.setattr(interface, "MetadataHookInterface", object, raising=False)
    monkeypatch.setitem(sys.modules, name, interface)
    with_links = load(ROOT / "hatch_build.py").with_links
    text = "[a](docs/a.md), [b](https://b.org/) and [c](#c)![d](docs/d.svg)"
    home = "https://home.org/lade"
    assert with_links(text, f"{home}/") == (
        f"[a]({home}/blob/main/docs/a.md), [b](https://b.org/) and [c](#c)"
        f"![d]({home}/raw/main/docs/d.svg)"
    )
    assert with_links(text, None) == "a, [b](https://b.org/) and [c](#c)"
