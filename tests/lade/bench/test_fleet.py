"""Fleets: who asks what, whose text a pool holds, what is sent, and what is shown of it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from lade.bench import fleet as simulation
from lade.bench.fleet import (
    SHARDED,
    Cell,
    Costs,
    Kind,
    Setup,
    Sharing,
    _exchanging,
    _Fleet,
    _Learner,
    _phases,
    _Run,
    measure_costs,
    simulate,
)
from lade.bench.fleet_report import bytes_text, on_paper, paper_table, table
from lade.bench.plots import plot_fleet
from lade.bench.traces import Trace, Traces, write_traces
from lade.bench.traffic import Catalogue, Population, draw_requests, own_token_ids
from lade.cli.app import app
from lade.cli.fleet import choose_sharings
from lade.drafting.successors import Successors

VOCAB_SIZE = 300
NUM_SUCCESSORS = 8
NUM_SHARED = 20  # tokens that all traces have
EVERY = Sharing(Kind.exchange, 5.0)
SMALL = Population(requests_per_sec=0.5, seconds=60.0, tenants_per_replica=1.0, users_per_tenant=2)
SETUP = Setup(max_draft_tokens=4, capacity_tokens=2**13, num_measured=12)


def a_trace(number: int, category: str, token_ids: list[int], loops: bool = False) -> Trace:
    following = np.array([*token_ids[1:], 0])[:, None]
    others = (following + np.arange(1, NUM_SUCCESSORS)) % VOCAB_SIZE
    ids = np.concatenate([following, others], axis=1).astype(np.int32)
    probs = np.tile(np.array([0.5, *[0.01] * (NUM_SUCCESSORS - 1)], np.float32), (len(ids), 1))
    return Trace(str(number), category, loops, token_ids, 20, Successors(ids, probs))


def recording(num_traces: int = 9, num_categories: int = 3, length: int = 60) -> Traces:
    rng = np.random.default_rng(0)
    traces = []
    for number in range(num_traces):
        category = number % num_categories
        first = NUM_SHARED + 40 * category
        ids = np.where(
            rng.random(length) < 0.6,
            rng.integers(NUM_SHARED, size=length),
            rng.integers(first, first + 40, size=length),
        )
        traces.append(a_trace(number, "abcdefghi"[category], ids.tolist()))
    settings = {"max_new_tokens": length - 20, "vocab_size": VOCAB_SIZE, "num_successors": 8}
    return Traces(traces, settings, {"cpu": "some"})


@pytest.fixture(scope="module")
def recorded() -> Traces:
    return recording()


@pytest.fixture(scope="module")
def catalogue(recorded: Traces) -> Catalogue:
    return Catalogue(recorded, NUM_SUCCESSORS)


def a_fleet(catalogue: Catalogue, num_replicas: int, setup: Setup = SETUP) -> _Fleet:
    requests = draw_requests(SMALL, num_replicas, len(catalogue))
    return _Fleet(catalogue, setup, requests, num_replicas)


# --- who asks what --------------------------------------------------------------------------


def test_only_what_two_categories_have_in_common_is_said_by_all() -> None:
    traces = [
        a_trace(0, "a", [1, 2, 3]),
        a_trace(1, "a", [1, 4, 3]),
        a_trace(2, "b", [1, 3, 5]),
    ]
    settings = {"max_new_tokens": 9, "vocab_size": 7}
    assert own_token_ids(Traces(traces, settings, {})).tolist() == [0, 2, 4, 5, 6]
    of_one = [trace._replace(category="a") for trace in traces]  # each prompt counts as one
    assert own_token_ids(Traces(of_one, settings, {})).tolist() == [0, 2, 4, 5, 6]
    apart = [trace._replace(token_ids=[number]) for number, trace in enumerate(traces)]
    assert own_token_ids(Traces(apart, settings, {})).tolist() == [*range(7)]


def test_tenants_have_words_of_their_own_one_to_one(catalogue: Catalogue) -> None:
    everything = np.arange(VOCAB_SIZE)
    shared = everything[:NUM_SHARED]
    seen = []
    for tenant in range(50):
        words = catalogue.in_words_of(tenant, everything)
        assert sorted(words.tolist()) == everything.tolist()
        assert words[shared].tolist() == shared.tolist()
        seen.append(tuple(words.tolist()))
    assert len({*seen}) == 50
    assert 0.4 < catalogue.shared_share < 0.8


def test_a_trace_in_other_words_has_the_same_shape_and_its_own_successors(
    catalogue: Catalogue,
) -> None:
    trace, known = catalogue.trace(4, tenant=7), catalogue.recorded.traces[4]
    assert trace[:3] == known[:3]
    assert trace.num_prompt_tokens == known.num_prompt_tokens
    assert trace.token_ids != known.token_ids
    # What follows a token is its likeliest successor still.
    assert trace.successors.token_ids[:-1, 0].tolist() == trace.token_ids[1:]
    assert trace.successors.probs is known.successors.probs


def test_answers_that_loop_are_not_asked(recorded: Traces) -> None:
    traces = [trace._replace(loops=number > 1) for number, trace in enumerate(recorded.traces)]
    assert len(Catalogue(replace(recorded, traces=traces), NUM_SUCCESSORS)) == 2
    traces = [trace._replace(loops=True) for trace in traces]
    with pytest.raises(ValueError, match="an answer that does not end in a loop, got none"):
        Catalogue(replace(recorded, traces=traces), NUM_SUCCESSORS)
    with pytest.raises(ValueError, match=r"bench record --num-successors 9\), got 8"):
        Catalogue(recorded, NUM_SUCCESSORS + 1)


def test_a_population_asks_the_same_every_time() -> None:
    requests = draw_requests(SMALL, 10, 9)
    assert all((a == b).all() for a, b in zip(requests, draw_requests(SMALL, 10, 9), strict=True))
    other = draw_requests(replace(SMALL, seed=1), 10, 9)
    assert (requests.sec != other.sec).any()
    assert len(requests.sec) == 300
    assert (np.diff(requests.sec) >= 0).all()
    assert 0 <= requests.sec[0] <= requests.sec[-1] < 60
    assert (requests.user // 2 == requests.tenant).all()
    assert {*requests.replica.tolist()} == {*range(10)}
    assert {*requests.tenant.tolist()} == {*range(10)}
    assert {*requests.question.tolist()} == {*range(9)}


def test_a_request_is_new_to_its_tenant_once() -> None:
    requests = draw_requests(SMALL, 10, 9)
    asked: set[tuple[int, int]] = set()
    for tenant, question, is_new in zip(
        requests.tenant.tolist(), requests.question.tolist(), requests.is_new, strict=True
    ):
        assert is_new == ((tenant, question) not in asked)
        asked.add((tenant, question))


def test_skew_is_how_much_more_often_the_first_comes() -> None:
    even = np.bincount(draw_requests(replace(SMALL, skew=0), 100, 9).tenant)
    skewed = np.bincount(draw_requests(replace(SMALL, skew=1), 100, 9).tenant)
    assert even.max() < 60  # of 3,000 requests by 100 tenants
    # 1 / (1 + 1/2 + … + 1/100) is 19 % of them; tenants differ in which question they ask most.
    assert 480 < skewed[0] < 680
    requests = draw_requests(replace(SMALL, skew=3), 100, 9)
    favourites = {
        int(np.bincount(requests.question[requests.tenant == tenant]).argmax())
        for tenant in range(10)
    }
    assert len(favourites) > 3


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"requests_per_sec": 0.0}, "expected requests_per_sec above 0, got 0.0"),
        ({"seconds": float("inf")}, "expected seconds above 0, got inf"),
        ({"users_per_tenant": 0}, "expected users_per_tenant above 0, got 0"),
        ({"tenants_per_replica": float("nan")}, "expected tenants_per_replica above 0, got nan"),
        ({"skew": -1.0}, "expected skew from 0 to 4, got -1"),
    ],
)
def test_impossible_populations_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Population(**wrong)


def test_impossible_simulations_are_refused(catalogue: Catalogue) -> None:
    with pytest.raises(ValueError, match="expected capacity_tokens of 1 or more, got 0"):
        Setup(capacity_tokens=0)
    nobody = replace(SMALL, seconds=0.001)
    with pytest.raises(ValueError, match="enough requests to measure some of, got 1 to 1000"):
        simulate(catalogue, nobody, 1000, Sharing(Kind.one), SETUP)


# --- whose text is in a pool ----------------------------------------------------------------


def texts_of(learner: _Learner) -> list[tuple[int, ...]]:
    return sorted(tuple(text.tolist()) for text in learner.pool.texts())


def test_exchanged_pools_hold_their_own_text_and_what_had_arrived(catalogue: Catalogue) -> None:
    fleet = a_fleet(catalogue, 7, replace(SETUP, capacity_tokens=2**16))
    run = _Run()
    assert len([*_exchanging(fleet, EVERY, run)]) == SETUP.num_measured
    requests, last = fleet.requests, int(fleet.measured[-1])
    assert len(fleet.watched) == 4
    for number, learner in zip(fleet.watched, run.learners, strict=True):
        phases = _phases(np.arange(7), 5.0)

        def before(sec: float, replica: int, phases: Any = phases) -> float:
            """Return when a replica exchanged last, at some time."""
            return float(phases[replica] + 5.0 * np.floor((sec - phases[replica]) / 5.0))

        end = before(float(requests.sec[last]), number)
        expected = []
        for request in range(last + 1):
            replica, sec = int(requests.replica[request]), float(requests.sec[request])
            if replica == number or sec <= before(end, replica):
                expected.append(tuple(fleet.trace(request).token_ids))
        assert texts_of(learner) == sorted(expected)
        assert len(expected) > sum(requests.replica == number)


def test_what_is_forgotten_by_the_end_need_not_be_learned(catalogue: Catalogue) -> None:
    fleet = a_fleet(catalogue, 4, replace(SETUP, capacity_tokens=500))
    requests = np.arange(100)
    at_once, one_by_one = _Learner(fleet), _Learner(fleet)
    at_once.learn(requests)
    for request in requests:
        one_by_one.learn(np.array([request]))
    assert texts_of(at_once) == texts_of(one_by_one)
    assert [*at_once.texts] == [*one_by_one.texts]
    # 8 texts of 60 tokens, and a part of a ninth
    assert [text.sec for text in at_once.texts] == fleet.requests.sec[91:100].tolist()


def test_one_replica_has_all_text_however_pools_are_shared(catalogue: Catalogue) -> None:
    cells = [
        simulate(catalogue, SMALL, 1, Sharing(kind), SETUP) for kind in (Kind.replica, Kind.one)
    ]
    assert cells[0]._replace(sharing="") == cells[1]._replace(sharing="")
    assert cells[0].num_requests == 12


def test_no_exchange_is_as_good_as_nothing_shared(catalogue: Catalogue) -> None:
    alone = simulate(catalogue, SMALL, 6, Sharing(Kind.replica), SETUP)
    never = simulate(catalogue, SMALL, 6, Sharing(Kind.exchange, 1e6), SETUP)
    assert never.mean_accepted_tokens == alone.mean_accepted_tokens
    assert never.sent_bytes_per_sec is never.received_bytes_per_sec is never.staleness_sec is None


def test_sharing_is_worth_what_the_others_wrote(catalogue: Catalogue) -> None:
    cells = {
        sharing.label: simulate(catalogue, SMALL, 12, sharing, SETUP)
        for sharing in [Sharing(kind) for kind in Kind if kind is not Kind.exchange]
        + [Sharing(Kind.exchange, 1.0), Sharing(Kind.exchange, 20.0)]
    }
    mat = {label: cell.repeated_mean_accepted_tokens or 0.0 for label, cell in cells.items()}
    assert len({cell.num_requests for cell in cells.values()}) == 1
    assert len({cell.repeated_share for cell in cells.values()}) == 1
    assert mat["one"] > 1.2 * mat["per replica"]
    assert mat["per tenant"] > 1.2 * mat["per replica"]
    assert mat["per replica"] < mat["every 20 s"] < 1.05 * mat["every 1 s"]
    # What comes from others is later than in one pool, so a replica's own text stays longer.
    assert mat["every 1 s"] > 0.9 * mat["one"]
    assert mat["per user"] <= mat["per tenant"]
    assert cells["per tenant, over one"].mean_accepted_tokens > (
        cells["per tenant"].mean_accepted_tokens
    )
    assert cells["per tenant"].pools_per_replica == 1.0
    assert cells["per user"].pools_per_replica == 2.0
    assert cells["one"].pools_per_replica == pytest.approx(1 / 12)
    assert {cell.sharing for cell in cells.values() if cell.busiest is not None} == {
        Sharing(kind).label for kind in SHARDED
    }
    assert all((cell.busiest or 1) >= 1 for cell in cells.values())


def test_exchanges_take_the_time_and_bytes_that_they_take(catalogue: Catalogue) -> None:
    # Twice half of the interval: until a replica sends, and until another one fetches.
    cell = simulate(catalogue, SMALL, 12, EVERY, SETUP)
    assert cell.staleness_sec == pytest.approx(5.0, abs=1.0)
    costs = measure_costs(catalogue, SETUP)
    assert costs.tokens_per_request == 60
    assert costs.text_bytes_per_request < costs.bytes_per_request
    sent, received = cell.sent_bytes_per_sec, cell.received_bytes_per_sec
    assert sent is not None
    assert received is not None
    # Half a request a second. Each delta has a header, of about 200 bytes.
    assert 0.5 * costs.text_bytes_per_request < sent < 0.7 * costs.bytes_per_request + 60
    # Those of the unwatched come as one delta, in which contexts are there once.
    assert 3 * sent < received < 11 * sent
    text = simulate(catalogue, SMALL, 12, EVERY, replace(SETUP, with_harvest=False))
    assert (text.sent_bytes_per_sec or sent) < sent
    assert (text.received_bytes_per_sec or received) < received


def test_a_pool_reaches_as_far_back_as_its_capacity(catalogue: Catalogue) -> None:
    # 6 requests of 60 tokens a second: 3,600 tokens are 10 s.
    setup = replace(SETUP, capacity_tokens=3600)
    cell = simulate(catalogue, SMALL, 12, Sharing(Kind.one), setup)
    assert cell.reach_sec == pytest.approx(10.0, abs=2.0)
    assert cell.pool_tokens == 3600
    alone = simulate(catalogue, SMALL, 12, Sharing(Kind.replica), setup)
    assert alone.reach_sec > 40


# --- what is shown --------------------------------------------------------------------------

A_CELL = Cell(
    100,
    "every 10 s",
    10.0,
    num_requests=48,
    repeated_share=0.75,
    mean_accepted_tokens=3.494,
    mean_accepted_tokens_error=0.31,
    new_mean_accepted_tokens=3.0,
    repeated_mean_accepted_tokens=3.74,
    acceptance_rate=0.33,
    sent_bytes_per_sec=2800.0,
    received_bytes_per_sec=67_400.0,
    staleness_sec=9.3,
    reach_sec=17.0,
    busiest=None,
    pools_per_replica=1.0,
    pool_tokens=262_144.0,
    pool_bytes=14_900_000.0,
)


def test_a_table_says_what_a_fleet_sends() -> None:
    markdown = table([A_CELL]).as_markdown()
    assert (
        "| 100 | every 10 s | 3.49 | 0.31 | 3.00 | 3.74 | 67.4 | 6.74 | 9.3 | 17.0 |  | 14.9 |"
        in markdown
    )
    assert "as 75% to 75% are" in markdown


def test_tables_of_fleets_fit_a_terminal() -> None:
    cells = [A_CELL._replace(sharing=Sharing(kind, 60.0).label, busiest=46.5) for kind in Kind]
    console = Console(width=200, record=True, file=None, quiet=True)
    with console.capture() as captured:
        console.quiet = False
        console.print(table(cells))
    rows = [line for line in captured.get().splitlines() if "67.4" in line or "───" in line]
    assert max(map(len, rows)) <= 80


def test_many_users_are_added_up_from_the_costs_of_a_request() -> None:
    costs = Costs(400.0, 500.0, 4000.0, 50.0, 400_000)
    population = Population(requests_per_sec=2.0, users_per_tenant=10)
    paper = on_paper(costs, population, Setup(capacity_tokens=2**18), 864_000, 10)
    assert paper.requests_per_sec == 300  # 8,640,000 a day, 100 a second, three times that
    assert paper.num_replicas == 150
    assert paper.tokens_per_sec == 120_000
    assert paper.received_bytes_per_sec == pytest.approx(4000 * 298)  # its own 2 are not sent back
    assert paper.fleet_bytes_per_sec == pytest.approx(150 * 4000 * 298)
    assert paper.text_fleet_bytes_per_sec == pytest.approx(150 * 500 * 298)
    assert paper.reach_sec == pytest.approx(2.1845, abs=1e-4)
    assert paper.user_pool_bytes == 30 * 10 * 400 * 50
    assert paper.users_pool_bytes == 864_000 * 6e6
    assert paper.tenant_pool_bytes == 2**18 * 50  # full
    assert paper.tenants_pool_bytes == 86_400 * 2**18 * 50
    markdown = paper_table(paper).as_markdown()
    assert "| requests a second, in the busiest hours | 300 |" in markdown
    assert "| all users' pools | 5.2 TB |" in markdown
    rare = on_paper(costs, population, Setup(), 1, 0.001)
    assert rare.num_replicas == 1
    assert rare.received_bytes_per_sec == 0
    assert rare.user_pool_bytes == 400_000  # an empty one takes as much
    with pytest.raises(ValueError, match="requests per day above 0, got 5 and 0"):
        on_paper(costs, population, Setup(), 5, 0)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (123_456, "123 kB"), (5.2e15, "5,200 TB")],
)
def test_sizes_have_decimal_units(num_bytes: float, text: str) -> None:
    assert bytes_text(num_bytes) == text


def test_a_plot_of_fleets_is_written_as_png_and_svg(tmp_path: Path) -> None:
    cells = [A_CELL._replace(num_replicas=num) for num in (1, 10, 100)]
    paths = plot_fleet(tmp_path, "fleet", [*cells, A_CELL._replace(sharing="one")])
    assert [path.name for path in paths] == ["fleet.png", "fleet.svg"]
    assert paths[0].read_bytes().startswith(b"\x89PNG")
    assert "every 10 s" in paths[1].read_text() or "<svg" in paths[1].read_text()


# --- the command ----------------------------------------------------------------------------

OPTIONS = ["--seconds", "20", "--requests-per-sec", "0.5", "--requests", "4", "--shards", "tenant"]


def run(*args: str) -> Any:
    return CliRunner().invoke(app, ["bench", "fleet", *args], catch_exceptions=False)


@pytest.fixture
def traces(recorded: Traces, tmp_path: Path) -> str:
    path = tmp_path / "traces.safetensors"
    write_traces(path, recorded)
    return str(path)


def test_the_command_simulates_recorded_traces(traces: str, tmp_path: Path) -> None:
    path, markdown = tmp_path / "fleet.json", tmp_path / "fleet.md"
    files = ["--json", str(path), "--markdown", str(markdown), "--plot", str(tmp_path / "plots")]
    result = run(traces, *OPTIONS, "--replicas", "1,6", "--exchange-sec", "4", *files)
    assert result.exit_code == 0
    assert "Pools of a fleet, simulated" in result.stdout
    assert "On paper: 1,000,000 users" in result.stdout
    assert "| 6 | every 4 s |" in markdown.read_text()
    assert (tmp_path / "plots" / "fleet.png").exists()
    content = json.loads(path.read_text())
    labels = [(cell["num_replicas"], cell["sharing"]) for cell in content["runs"]]
    assert labels == [
        *((1, "per replica"), (1, "per tenant")),  # one replica has nobody to share with
        *((6, "per replica"), (6, "every 4 s"), (6, "one"), (6, "per tenant")),
    ]
    settings = content["settings"]
    assert settings["traces"]["name"] == "traces.safetensors"
    assert settings["traces"]["num"] == settings["num_questions"] == 9
    assert settings["population"]["seconds"] == 20
    assert settings["interrupted"] is False
    assert str(tmp_path) not in path.read_text()


def test_an_interrupted_command_shows_what_was_simulated(
    traces: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Cell] = []

    def interrupted(*args: Any, **kwargs: Any) -> Cell:
        if done:
            raise KeyboardInterrupt
        done.append(simulate(*args, **kwargs))
        return done[0]

    monkeypatch.setattr(simulation, "simulate", interrupted)
    path = tmp_path / "fleet.json"
    result = run(traces, *OPTIONS, "--replicas", "3", "--json", str(path))
    assert result.exit_code == 130
    assert "stopped after 1 of 6 simulations" in result.stderr
    content = json.loads(path.read_text())
    assert len(content["runs"]) == 1
    assert content["settings"]["interrupted"] is True


def test_lists_of_the_command_are_checked() -> None:
    labels = [sharing.label for sharing in choose_sharings("30,0.5", "user,tenant")]
    assert labels == ["per replica", "every 30 s", "every 0.5 s", "one", "per user", "per tenant"]
    assert [each.label for each in choose_sharings("", "")] == ["per replica", "one"]
    for seconds in ("0", "x", "5,5"):
        with pytest.raises(ValueError, match="--exchange-sec"):
            choose_sharings(seconds, "")
    for names in ("one", "tenant,tenant", "tenant,,user"):
        with pytest.raises(
            ValueError, match="--shards to be different ones of tenant, topic, user"
        ):
            choose_sharings("", names)
