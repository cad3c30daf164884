"""Writes recorded samples as OpenEnv's `TrainingTrace`, version 1: one engine call after the other, with its mask.

Invariants: tokens, log-probabilities and masks are those of the record, never made from text. A turn is a stretch of
tokens that the policy wrote; its prompt is all that the policy read before it in that sequence. So each sampled token
is in the completion of exactly one turn, and no other token is.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import numpy as np

from flotilla_coordinator.data.prompts import Prompt, RecordedSample
from flotilla_coordinator.data.recorded import open_recorded
from flotilla_coordinator.data.recorded_rows import prompt_of

SCHEMA_VERSION = 1


def traces(record: Path, wanted: Collection[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the id and the trace of each sample of a record that is wanted."""
    groups = open_recorded(record, "train")
    for number, rows in groups.written(range(groups.rows)):
        if not any(row.values["sample_id"] in wanted for row in rows):
            continue
        prompt = prompt_of(number, rows)
        for row, sample in zip(rows, prompt.recorded, strict=True):
            if row.values["sample_id"] in wanted:
                yield row.values["sample_id"], training_trace(row.values, prompt, sample)


def training_trace(row: dict[str, Any], prompt: Prompt, sample: RecordedSample) -> dict[str, Any]:
    """Return the trace of one sample; what is about the whole sample stands in the metadata of each turn."""
    about = {name: row.get(name) for name in ("sample_id", "group_id", "run_id", "step", "reward")}
    about |= {"truncated": sample.truncated, "ending": sample.ending or None}
    messages = _before_first_turn(sample.messages) if sample.messages else prompt.chat
    turns = [
        {
            "node_id": f"{row['sample_id']}/{place}",
            "prompt_token_ids": before.tolist(),
            "completion_token_ids": written.tolist(),
            "per_token_logps": [float(one) for one in logprobs],
            "loss_mask": [0] * len(before) + [1] * len(written),
            "request": {},
            "response": {},
            "metadata": about | {"sequence": sequence},
        }
        for place, (sequence, before, written, logprobs) in enumerate(_turns(prompt, sample))
    ]
    if turns:
        turns[0]["request"] = {"messages": messages} if messages else {"prompt": prompt.prompt_text}
        turns[-1]["response"] = {"content": sample.text}
    return {"schema_version": SCHEMA_VERSION, "turns": turns}


def _before_first_turn(transcript: str) -> list[dict[str, Any]]:
    """Return the messages of a transcript that the first turn answers; it has tools and rewritten histories as well."""
    before = takewhile(lambda entry: "turn" not in entry, json.loads(transcript))
    return [entry for entry in before if "role" in entry]


def _turns(
    prompt: Prompt, sample: RecordedSample
) -> Iterator[tuple[int, np.ndarray, np.ndarray, np.ndarray]]:
    """Yield the stretches that the policy wrote: the number of the sequence, what is before it, tokens, logprobs."""
    starts = [branch.start for branch in sample.branches] or [0]
    prompts = [branch.prompt_token_ids for branch in sample.branches] or [prompt.token_ids]
    count = len(sample.token_ids)
    trained = np.ones(count, np.bool_) if sample.trained is None else sample.trained
    for sequence, (own, (first, end)) in enumerate(zip(prompts, pairwise([*starts, count]), strict=True)):
        flags = np.concatenate([[False], trained[first:end], [False]]).astype(np.int8)
        edges = np.flatnonzero(np.diff(flags)) + first
        for begin, stop in edges.reshape(-1, 2).tolist():
            before = np.concatenate([own, sample.token_ids[first:begin]])
            yield sequence, before, sample.token_ids[begin:stop], sample.logprobs[begin:stop]
