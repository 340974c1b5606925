"""`PoolExtension`: access to the proposer in a vLLM worker from outside."""

from typing import Any


class PoolExtension:
    """Methods that vLLM adds to its workers, to be called by `collective_rpc`.

    llm = vllm.LLM(model, worker_extension_cls="lade.engines.extension.PoolExtension")
    llm.collective_rpc("lade_stats")  # a dict for each worker
    """

    model_runner: Any  # of the worker

    def lade_stats(self) -> dict[str, int | bool] | None:
        """Return `PoolProposer.stats`; None for a worker without a proposer.

        Only workers of the last pipeline stage draft.
        """
        drafter = getattr(self.model_runner, "drafter", None)
        stats = getattr(drafter, "stats", None)
        return stats() if callable(stats) else None
