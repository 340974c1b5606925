"""What vLLM's workers are asked of the proposer, without vLLM."""

from types import SimpleNamespace

from lade.engines.extension import PoolExtension
from lade.engines.vllm import PoolProposer

CONFIG = SimpleNamespace(
    additional_config={},
    speculative_config=SimpleNamespace(num_speculative_tokens=4),
    model_config=SimpleNamespace(max_model_len=32, get_vocab_size=lambda: 64),
    scheduler_config=SimpleNamespace(max_num_seqs=2),
)


class Worker(PoolExtension):
    def __init__(self, **runner: object) -> None:
        self.model_runner = SimpleNamespace(**runner)


def test_a_worker_tells_what_its_proposer_counted() -> None:
    proposer = PoolProposer(CONFIG)
    stats = Worker(drafter=proposer).lade_stats()
    assert stats == proposer.stats()
    assert stats is not None
    assert stats["failures"] == 0


def test_a_worker_that_drafts_otherwise_or_not_at_all_tells_nothing() -> None:
    assert Worker().lade_stats() is None
    assert Worker(drafter=object()).lade_stats() is None


def test_it_has_no_name_that_a_worker_may_have() -> None:
    """VLLM refuses to add a method that its worker has."""
    assert [name for name in dir(PoolExtension) if not name.startswith("__")] == ["lade_stats"]
