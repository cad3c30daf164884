"""Makes what teaches this recipe's reward model and its judge, of what a run of examples/instruct/grpo.yaml sampled.

`python recipes/judge/make_data.py RUN_DIRECTORY` writes four files to `data`. Of the samples of all steps:
`pairs.jsonl`, a right and a wrong response to one prompt, and `verdicts.jsonl`, questions as a judge reads them with
the right verdict. Of the answers to held-out prompts: `heldout-pairs.jsonl`, and `labelled.jsonl` for the agreement.

Invariants: whether a response is right says the reward of that run; no prompt is in a file to learn from and in one
that measures; the same samples always make the same bytes.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

from flotilla_core.config import RunConfig, load
from flotilla_data.samples import read_samples
from flotilla_reward.judges.form import Form

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "instruct"))

from rewards import CHECKS, words

HERE = Path(__file__).resolve().parent
INSTRUCT = HERE.parents[1] / "examples" / "instruct"
PAIRS_EACH = 12
"""The most pairs of one group."""
LABELLED = 300
Groups = dict[str, list[dict[str, Any]]]
"""Samples by the text of their prompt."""


def groups_of(samples: Iterable[dict[str, Any]]) -> Groups:
    """Return each response to a prompt once; those without a reward are left out."""
    found: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for sample in samples:
        if sample["reward"] is not None and sample["response"].strip():
            found[sample["prompt"]].setdefault(sample["response"], sample)
    return {prompt: list(each.values()) for prompt, each in found.items()}


def pairs_of(groups: Groups, draw: random.Random) -> Iterator[dict[str, str]]:
    """Yield a right and a wrong response to one prompt, which is text as the model reads it."""
    for prompt, samples in groups.items():
        right, wrong = (
            [one["response"] for one in samples if (one["reward"] >= 1) is wanted] for wanted in (True, False)
        )
        both = list(product(right, wrong))
        for chosen, rejected in draw.sample(both, min(len(both), PAIRS_EACH)):
            yield {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def reason_of(sample: dict[str, Any]) -> str:
    """Return what the judge writes before its verdict: each check, and whether the response passes it."""
    text = sample["response"].strip()
    if not words(text):
        return "no words"
    passed = {name: CHECKS[name](text, wanted) for name, wanted in sample["info"]["checks"].items()}
    return ", ".join(f"{name.replace('_', ' ')}: {'yes' if so else 'no'}" for name, so in passed.items())


def chat_of(sample: dict[str, Any], told: list[str], system: str) -> list[dict[str, str]]:
    """Return the chat that became the prompt of a sample."""
    # The longest instruction in it: one may begin as another one does.
    asked = max((text for text in told if text in sample["prompt"]), key=len)
    return [{"role": "system", "content": system}, {"role": "user", "content": asked}]


def verdict_of(sample: dict[str, Any], chat: list[dict[str, str]], form: Form) -> dict[str, Any]:
    """Return a question to the judge, with the answer that it learns."""
    question = "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in chat)
    asked = form.asked(question=question, response=sample["response"])
    said = {"reason": reason_of(sample), form.key: label_of(sample)}
    messages = [{"role": "system", "content": asked.system}, {"role": "user", "content": asked.user}]
    return {"prompt": messages, "answer": json.dumps(said)}


def label_of(sample: dict[str, Any]) -> str:
    return "yes" if sample["reward"] >= 1 else "no"


def halves(samples: list[dict[str, Any]], draw: random.Random, most: int) -> list[dict[str, Any]]:
    """Return as many right as wrong samples, in a drawn order."""
    by_label = {label: [one for one in samples if label_of(one) == label] for label in ("yes", "no")}
    each = min(most // 2, *map(len, by_label.values()))
    drawn = [one for same in by_label.values() for one in draw.sample(same, each)]
    draw.shuffle(drawn)
    return drawn


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write one file; one without rows would teach nothing."""
    if not rows:
        raise SystemExit(f"{path.name}: the run has no right and wrong response to one prompt")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(rows)} rows in {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="the directory of a run of examples/instruct/grpo.yaml")
    parser.add_argument(
        "--prompts", type=Path, default=INSTRUCT / "data", help="data of that run (%(default)s)"
    )
    parser.add_argument("--out", type=Path, default=HERE / "data", help="folder (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of what is drawn (%(default)s)")
    asked = parser.parse_args()
    run = load(RunConfig, [INSTRUCT / "grpo.yaml", HERE / "grpo-judge.yaml"], resolve_paths=True)
    form, system = Form.of(run.rewards[0]), run.data.system_prompt
    draw = random.Random(asked.seed)
    told = [
        json.loads(line)["prompt"][0]["content"]
        for name in ("train", "heldout")
        for line in (asked.prompts / f"{name}.jsonl").read_text().splitlines()
    ]
    sampled = groups_of(read_samples(asked.run, "step"))
    answers = (one for one in read_samples(asked.run, "eval") if one["set"] == "heldout")
    held_out = groups_of(answers)

    for name, groups in (("pairs", sampled), ("heldout-pairs", held_out)):
        chats = {prompt: chat_of(each[0], told, system) for prompt, each in groups.items()}
        rows = [
            {
                "prompt": chats[pair["prompt"]],
                "chosen": [{"role": "assistant", "content": pair["chosen"]}],
                "rejected": [{"role": "assistant", "content": pair["rejected"]}],
            }
            for pair in pairs_of(groups, draw)
        ]
        draw.shuffle(rows)
        write(asked.out / f"{name}.jsonl", rows)
    every = [one for each in sampled.values() for one in each]
    verdicts = [verdict_of(one, chat_of(one, told, system), form) for one in halves(every, draw, len(every))]
    write(asked.out / "verdicts.jsonl", verdicts)
    of_held_out = [one for each in held_out.values() for one in each]
    labelled = [
        {"prompt": chat_of(one, told, system), "response": one["response"], "label": label_of(one)}
        for one in halves(of_held_out, draw, LABELLED)
    ]
    write(asked.out / "labelled.jsonl", labelled)


if __name__ == "__main__":
    main()
