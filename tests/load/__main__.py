"""Run the load; see `run.py`.

python -m tests.load --clients 1000 --seconds 1200 --out docs/results/load.json
"""

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path

from lade.bench.environment import environment
from tests.load.run import Plan, load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=1200)
    parser.add_argument("--max-queue", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--attackers", type=int, default=0, help="that send what takes much")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    plan = Plan(
        asked.clients,
        asked.seconds,
        asked.max_queue,
        asked.max_tokens,
        asked.seed,
        asked.attackers,
    )
    with tempfile.TemporaryDirectory() as folder:
        report = asyncio.run(load(plan, Path(folder)))
    report["environment"] = environment()
    text = json.dumps(report, indent=2) + "\n"
    print(text, end="")
    if asked.out is not None:
        asked.out.write_text(text)
    failed = {"500"} & {*report["statuses"], *report["attack_statuses"]}
    if report["num_wrong"] or report["num_mixed"] or report["num_lost"] or failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
