"""Two replicas of a model under Ray Serve, whose pools learn from each other in one folder."""

import asyncio
import tempfile
from typing import Any

import ray
from ray import serve

import lade
from lade.models import encode, load
from ngram_pool import PoolStore


@serve.deployment(num_replicas=2, max_ongoing_requests=1, ray_actor_options={"num_cpus": 0})
class Replica:
    def __init__(self, folder: str) -> None:
        self.model, self.tokenizer, _ = load(dtype="float32")
        self.store = PoolStore(folder, save_every_sec=0)  # each answer is saved when it is done

    def __call__(self, question: str) -> float:
        inputs: dict[str, Any] = encode(self.tokenizer, question)
        inputs |= {"max_new_tokens": 48, "return_dict_in_generate": True}
        output = lade.generate(self.model, **inputs, pool=self.store.named("all"))
        return float(output.stats.mean_accepted_tokens)


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        replicas = serve.run(Replica.bind(folder))  # type: ignore[attr-defined]
        for _ in range(3):  # what one answered, the other drafts from
            asked = [replicas.remote("Name three planets.") for _ in range(2)]
            means = await asyncio.gather(*asked)
            print("-> tokens per forward:", *(f"{mean:.2f}" for mean in means))
        ray.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
