"""A collector in a Ray cluster: a stand-in for Ray, and Ray itself where it is installed."""

import importlib.util
import pickle
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from lade.engines.exchange import Collector, PoolExchange
from lade.engines.ray import RayCollector
from lade.errors import MissingExtraError


class FakeRay:
    """Actors in this process; what passes between them is pickled, as by Ray."""

    def __init__(self) -> None:
        self.actors: dict[tuple[str, str], Any] = {}
        self.options: dict[str, Any] = {}
        self.timeouts: list[float] = []

    def remote(self, kind: type) -> Any:
        def options(name: str, namespace: str, get_if_exists: bool, **others: Any) -> Any:
            assert get_if_exists
            self.options = others

            def make(**arguments: Any) -> Any:
                key = (namespace, name)
                if key not in self.actors:
                    self.actors[key] = kind(**arguments)
                return FakeActor(self, key)

            return SimpleNamespace(remote=make)

        return SimpleNamespace(options=options)

    def get(self, call: Any, timeout: float) -> Any:
        self.timeouts.append(timeout)
        return pickle.loads(pickle.dumps(call()))

    def kill(self, actor: "FakeActor") -> None:
        del self.actors[actor.key]


class FakeActor:
    def __init__(self, ray: FakeRay, key: tuple[str, str]) -> None:
        self.ray, self.key = ray, key

    def __getattr__(self, name: str) -> Any:
        def remote(*args: Any) -> Any:
            sent = pickle.loads(pickle.dumps(args))
            return lambda: getattr(self.ray.actors[self.key], name)(*sent)

        return SimpleNamespace(remote=remote)


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", fake)
    return fake


def test_who_asks_for_the_same_name_shares_a_collector(fake_ray: FakeRay) -> None:
    one = PoolExchange(RayCollector("mine", capacity_tokens=500))
    two = PoolExchange(RayCollector("mine"))
    other = PoolExchange(RayCollector("others"))
    one.pool.observe([1, 2, 3])
    assert one.exchange()
    assert two.exchange()
    assert other.exchange()
    assert [len(each.pool) for each in (one, two, other)] == [3, 3, 0]
    assert two.pool.capacity_tokens == 500
    assert fake_ray.options["lifetime"] == "detached"
    assert fake_ray.options["max_restarts"] == -1
    assert fake_ray.options["num_cpus"] == 0
    assert {*fake_ray.timeouts} == {30.0}


def test_every_method_reaches_the_collector(fake_ray: FakeRay, tmp_path: Any) -> None:
    path = tmp_path / "all.pool"
    collector = RayCollector("mine", path=path, timeout_sec=3.0)
    exchange = PoolExchange(collector)
    exchange.pool.observe([1, 7, 8, 2])
    exchange.exchange()
    assert collector.stats().pool_tokens == 4
    assert collector.forget([7, 8]) == 1
    collector.save()
    assert len(Collector(path=path).join().pool) == 4
    assert {*fake_ray.timeouts} == {3.0}
    collector.kill()
    assert not fake_ray.actors
    assert not exchange.exchange()  # nobody is there, and nothing breaks


def test_without_ray_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r'pip install "lade-decoding\[ray\]"'):
        RayCollector()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed: it is no part of the environment for development")
    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
        yield ray
        ray.shutdown()


@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_real_actors_exchange_pools_and_survive_their_death(cluster: Any, tmp_path: Any) -> None:
    collector = RayCollector("test", path=str(tmp_path / "all.pool"), save_every_sec=0.0)
    one, two = PoolExchange(collector), PoolExchange(RayCollector("test"))
    one.pool.observe([1, 2, 3])
    one.pool.harvest([[-1, 1]], [[2]], [[0.5]])
    assert one.exchange()
    assert two.exchange()
    assert [text.tolist() for text in two.pool.texts()] == [[1, 2, 3]]
    cluster.kill(collector._actor, no_restart=False)
    two.pool.observe([4])
    for _ in range(20):  # while it is restarted, calls fail
        if two.exchange():
            break
    assert sorted(text.tolist() for text in PoolExchange(collector).pool.texts()) == [
        [1, 2, 3],
        [4],
    ]
    with pytest.raises(ValueError, match="bytes that PoolDelta"):
        collector.exchange(b"noise", two._cursor)
    collector.kill()
