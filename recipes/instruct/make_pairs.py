"""Makes pairs of a chosen and a rejected response from what a run has sampled, for dpo.yaml.

`python recipes/instruct/make_pairs.py RUN_DIRECTORY` writes `data/pairs.jsonl`. Of the samples of a prompt in one step,
the ones that the reward took for right are chosen, and as many of the others are rejected. Only the first `--steps`
steps are taken, whose responses are close to what the untrained model writes.

Invariants: both responses of a pair answer the same prompt, and each response is in one pair at most.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flotilla_data.samples import read_samples

HERE = Path(__file__).resolve().parent
PROMPTS = HERE.parents[1] / "examples" / "instruct" / "data" / "train.jsonl"


def pairs(run: Path, steps: int, instructions: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the pairs of the first steps of a run."""
    groups: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    for sample in read_samples(run, "step", range(steps)):
        groups[sample["step"], sample["group_id"]].append(sample)
    for group in groups.values():
        # A sample holds its prompt as the chat template rendered it: the instruction alone is wanted.
        told = max((text for text in instructions if text in group[0]["prompt"]), key=len, default="")
        if not told:
            raise SystemExit(f"no prompt of --prompts is in this one of the run: {group[0]['prompt']!r}")
        right = [sample["response"] for sample in group if sample["reward"] >= 1]
        wrong = [sample["response"] for sample in group if sample["reward"] < 1]
        for chosen, rejected in zip(right, wrong, strict=False):
            prompt, *answers = (
                {"role": role, "content": text}
                for role, text in (("user", told), ("assistant", chosen), ("assistant", rejected))
            )
            yield {"prompt": [prompt], "chosen": [answers[0]], "rejected": [answers[1]]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="the directory of a run of examples/instruct/grpo.yaml")
    parser.add_argument("--steps", type=int, default=50, help="first steps to take (%(default)s)")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="data of that run (%(default)s)")
    parser.add_argument("--out", type=Path, default=HERE / "data" / "pairs.jsonl", help="file (%(default)s)")
    asked = parser.parse_args()
    instructions = [
        json.loads(line)["prompt"][0]["content"] for line in asked.prompts.read_text().splitlines()
    ]
    lines = [json.dumps(pair) for pair in pairs(asked.run, asked.steps, instructions)]
    if not lines:
        raise SystemExit(
            f"{asked.run}: no prompt of the first {asked.steps} steps has a right and a wrong response"
        )
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text("\n".join(lines) + "\n")
    print(f"{len(lines)} pairs in {asked.out}")


if __name__ == "__main__":
    main()
