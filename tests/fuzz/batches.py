"""`python -m tests.fuzz.batches`: requests that join and leave a batcher, against `generate` alone.

A session is some requests of random options, submitted at random moments to a batcher of one
model: with pools and predictions, cancelled, failing in the middle, and in a third of the sessions
with room for few tokens at once.
"""

import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any
from unittest.mock import patch

import torch

from lade.targets.joint import JointForwards
from tests.about import about
from tests.fuzz.run import deterministic, sessions, sessions_parser
from tests.lade.batches import num_wrong
from tests.lade.tiny import BLOOM, MAMBA2, tiny_model

PER_SESSION = 20
# The last ones go alone.
FAMILIES = [
    *("llama", "qwen2", "qwen3", "gpt2", "gpt_neox", "opt", "olmo2", "mistral", "gemma3_text"),
    *("phi3", "bloom", "mamba2"),
]
# Their heads may be of 32 numbers, which the kernel of attention takes in float32; of 8, only where
# vectors are short.
_OF_ANY_HEADS = {"llama", "qwen3", "mistral", "gemma3_text"}
_MORE = {"bloom": BLOOM | {"attention": "eager"}, "mamba2": MAMBA2 | {"attention": "eager"}}


def run_session(seed: int, number: int) -> tuple[int, int, Counter[str]]:
    """Return the number, how many requests of the session were wrong, and what it was made of."""
    rng = Random(f"{seed}/{number}")
    family = FAMILIES[number % len(FAMILIES)]
    dtype = rng.choice([torch.float32, torch.float64])
    max_tokens = rng.choice([None, None, 90])
    with deterministic():
        options = {**_MORE.get(family, {})}
        if family in _OF_ANY_HEADS:
            options["head_dim"] = rng.choice([8, 32])
        model = tiny_model(family, dtype=dtype, **options)
        size = rng.choice([2, 4, 8])
        run, num_joint = JointForwards._run, []

        def counted(forwards: JointForwards, parts: Any) -> list[Any]:
            num_joint.append(len(parts) > 1 and forwards.why_not is None)
            return run(forwards, parts)

        with patch.object(JointForwards, "_run", counted):
            wrong, _ = num_wrong(
                model, PER_SESSION, rng.randrange(2**31), size, max_batch_tokens=max_tokens
            )
    of_session = Counter({family: PER_SESSION, str(dtype): PER_SESSION, f"at once {size}": 1})
    of_session["joint forwards"] += sum(num_joint)
    of_session["sessions with little room"] += max_tokens is not None
    of_session["sessions with heads of 32"] += options.get("head_dim") == 32
    return number, wrong, of_session


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    arguments = sessions_parser("python -m tests.fuzz.batches", __doc__, cases=2_000).parse_args(
        argv
    )
    counts, wrong, num_done = Counter[str](), dict[int, int](), 0
    start = time.perf_counter()
    with sessions(run_session, arguments, PER_SESSION) as found:
        for number, num_of_session, of_session in found:
            num_done += PER_SESSION
            counts += of_session
            if num_of_session:
                wrong[number] = num_of_session
                print(f"session {number}: {num_of_session} wrong", flush=True)
    result = {
        "seed": arguments.seed,
        "num_requests": num_done,
        "num_wrong": sum(wrong.values()),
        "wrong_by_session": dict(sorted(wrong.items())),
        "made_of": dict(sorted(counts.items())),
        "seconds": round(time.perf_counter() - start, 1),
        **about(),
    }
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
