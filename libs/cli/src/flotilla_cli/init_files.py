"""Writes the texts of the files that `flotilla init` makes, with the reasons beside the keys.

Invariants: a key is written where it has to be named or says something about this model, these data or this host; the
rest is left to its default. Paths mean the same to the commands that follow in the folder of the files.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from flotilla_cli.init_environment import Episodes
from flotilla_core.config.model import HUB
from flotilla_core.generated_tasks import TaskSource
from flotilla_data.recognition import Answers, Fields

GROUPS = {"gpus": 64, "cpu": 8}
"""Prompts, answers or pairs of a step."""
SAMPLES = 8
EPOCHS = 3
MOST_STEPS = {"gpus": 200, "cpu": 50}
EVALUATIONS = 5
HELD_OUT_ON_CPU = 100
LONGEST_NAME = 31
TRAIN, HELDOUT = "split/train.jsonl", "split/heldout.jsonl"
SPLIT_FROM = 20
"""The least number of different prompts of which some are held out."""
HELD_OUT_SHARE = 10
"""One row in so many is held out."""
HELD_OUT_MOST = 500
ANSWER_IN_TAGS = "Think step by step, then write the final answer alone between <answer> and </answer>."
FROM_PAIRS = ("dpo", "reward_model")
RATES = ((500e6, 1e-5), (4e9, 3e-6), (float("inf"), 1e-6))
"""Learning rates by the most parameters of a model that learns from rewards or preferences."""
IMITATION_RATE = {"sft": 10, "reward_model": 10}
ADAPTERS_RATE = 10
"""Factors of these rates: gradients of given answers, and adapters, want more."""
PLAIN = re.compile(r"(?:[A-Za-z/]|\.\.?/)[\w./:@-]*[/.][\w./:@-]*\w")
"""Paths and hub names that YAML takes for text without quotes."""

BUILT_IN = {
    Answers.numbers: ("numeric", "every answer is a number"),
    Answers.formulas: ("math", "answers are formulas"),
    Answers.short: ("exact", "answers are short texts"),
    Answers.tasks: ("reasoning_gym", "each task says itself what an answer is worth"),
}
"""The reward for each kind of answers, and why."""
OWN = {
    Answers.missing: (
        "the data have no answers",
        '''\
"""The reward of run.yaml. The data have no answers, so only you can say what a good response is."""


def reward(prompt: str, response: str, answer: str, info: dict) -> float:
    """Return one finite number: more is better. `info` has the other columns of the row."""
    # A start: a response of 1 to 50 words is good. Write here what you want instead.
    return 1.0 if 1 <= len(response.split()) <= 50 else 0.0
''',
    ),
    Answers.marked: (
        "a number follows #### in every answer",
        '''\
"""The reward of run.yaml. In an answer of the data the final number follows ####."""

import re

NUMBER = re.compile(r"-?\\d[\\d,]*(?:\\.\\d+)?")


def reward(prompt: str, response: str, answer: str, info: dict) -> float:
    """Return 1 where the last number of the response is the one after ####, else 0."""
    found = NUMBER.findall(response)
    return 1.0 if found and value(found[-1]) == value(answer.rpartition("####")[2]) else 0.0


def value(text: str) -> float:
    return float(text.replace(",", ""))
''',
    ),
    Answers.long: (
        "answers are long texts, which no response repeats",
        '''\
"""The reward of run.yaml. No response repeats a long answer, so this compares their words."""

from collections import Counter


def reward(prompt: str, response: str, answer: str, info: dict) -> float:
    """Return the share of words that response and answer have in common (F1), from 0 to 1."""
    # A start: it pays for the right words in any order. Write here what you want instead.
    ours, theirs = Counter(response.lower().split()), Counter(answer.lower().split())
    return 2 * (ours & theirs).total() / max(1, ours.total() + theirs.total())
''',
    ),
}
"""The reason why each kind of answers has no built-in reward, and the content of rewards.py."""


@dataclass(frozen=True)
class Host:
    """The host, as far as the files depend on it."""

    gpus: bool
    bfloat16: bool
    """True where its processor computes in bfloat16, which counts where there are no GPUs."""


@dataclass(frozen=True)
class Draft:
    """Everything that the files say."""

    folder: Path
    model: str
    data: str
    held_out: str
    """Empty where there are no held-out data."""
    algorithm: str
    gangs: tuple[str, ...]
    """Sections of the gangs that the algorithm needs beside the policy's."""
    fields: Fields
    held_out_fields: Fields
    chat: bool
    """The prompts are text, and the model has a chat template."""
    host: Host
    parameters: int
    longest_sequence: int
    """The most tokens that the model allows."""
    rows: int
    prompt_tokens: int
    response_tokens: int
    model_tokens: int
    """Longest prompt and response, or given answer, together."""
    answers: Answers | None
    """The kind that the reward judges; None where there is no reward."""
    adapters: bool = False
    tasks: tuple[TaskSource, ...] = ()
    """The tasks that stand for files."""
    episodes: Episodes | None = None
    """The environment that plays them; its rewards are those of the run."""
    split: dict[str, list[str]] = field(default_factory=dict)
    """The lines to train and those to hold out, where some of the data are held out."""

    @property
    def holds_out(self) -> bool:
        """True where evaluations have data of their own."""
        return bool(self.held_out or self.split)

    @property
    def tagged(self) -> bool:
        """True where the system prompt asks for tags around an answer."""
        return bool(self.tasks) and self.chat and self.algorithm != "sft"

    @property
    def stack(self) -> Path:
        """The path of the stack file."""
        return self.folder / "stack.yaml"

    @property
    def run(self) -> Path:
        """The path of the run file."""
        return self.folder / "run.yaml"

    @property
    def files(self) -> dict[Path, str]:
        """The text of each file by its path."""
        made = {self.stack: stack_text(self), self.run: run_text(self)}
        if self.answers in OWN:
            made[self.folder / "rewards.py"] = OWN[self.answers][1]
        if self.episodes and self.episodes.file:
            made[self.episodes.file] = self.episodes.start
        for name, lines in self.split.items():
            made[self.folder / name] = "".join(f"{line}\n" for line in lines)
        return made

    @property
    def reward(self) -> tuple[str, str]:
        """The reward as the run file names it, and why; empty where there is none."""
        if self.answers is None:
            return "", ""
        if self.answers in BUILT_IN:
            return BUILT_IN[self.answers]
        return f"{self.path('rewards.py', of_folder=True)}:reward", OWN[self.answers][0]

    @property
    def name(self) -> str:
        """The name of the folder, in the letters that names of stacks and runs may have."""
        letters = re.sub(r"[^a-z0-9]+", "-", self.folder.absolute().name.lower()).strip("-")
        return letters[:LONGEST_NAME].rstrip("-") or "local"

    @property
    def steps(self) -> int:
        """The steps of the run."""
        return max(1, min(MOST_STEPS[self._place], EPOCHS * self.rows // self.groups))

    @property
    def groups(self) -> int:
        """The prompts, answers or pairs of a step."""
        return min(GROUPS[self._place], self.rows - len(self.split.get(HELDOUT, ())))

    @property
    def _place(self) -> str:
        return "gpus" if self.host.gpus else "cpu"

    def path(self, name: str, *, of_folder: bool = False) -> str:
        """Return a path, or hub name, that means the same to commands that are given in the folder of the files."""
        path = self.folder / name if of_folder else Path(name)
        if self.folder.absolute() == Path.cwd():
            return str(path)
        on_disk = (
            of_folder or os.path.exists(path) or (any(sign in name for sign in "*?[") and HUB not in name)
        )
        return str(path.absolute()) if on_disk else name


def held_out_of(task: TaskSource) -> TaskSource:
    """Return the held-out tasks beside those to train: of another split, so none is in both."""
    return replace(task, size=max(SPLIT_FROM, task.size // HELD_OUT_SHARE))


def stack_text(draft: Draft) -> str:
    """Return the text of the stack file."""
    longest = "episode" if draft.episodes else "prompt and response together"
    head = f"""\
# The fleet, for `flotilla up`. All keys: flotilla config schema stack
name: {draft.name}
model: {_quoted(draft.path(draft.model))}

generator:
  # Longest {longest}; the model allows {draft.longest_sequence:,}.
  max_model_tokens: {draft.model_tokens}
"""
    plays = draft.episodes.stack_sections() if draft.episodes else ""
    if draft.host.gpus:
        gangs = "".join(f"\n{section}:\n  replicas: 1\n" for section in draft.gangs)
        return f"""{head}{gangs}{plays}
# `flotilla up` decides by the GPUs of the host what this file leaves out: dtype, trainer.nproc,
# generator.replicas, generator.tensor_parallel_size and placement.
"""
    dtype, can = (
        ("bfloat16", "computes in") if draft.host.bfloat16 else ("float32", "has no instructions for")
    )
    gangs = "".join(f"\n{section}:\n  replicas: 1\n  dtype: {dtype}\n" for section in draft.gangs)
    return f"""{head}\
  # Without GPUs `flotilla up` decides nothing. This processor {can} bfloat16.
  replicas: 1
  dtype: {dtype}

trainer:
  nproc: 1
  dtype: {dtype}
{gangs}{plays}"""


def run_text(draft: Draft) -> str:
    """Return the text of the run file."""
    head = f"""\
# A run, for `flotilla run start`. All keys: flotilla config schema run
name: {draft.name}
steps: {draft.steps}

algorithm:
  type: {draft.algorithm}
"""
    plays = draft.episodes.section(draft.model_tokens) if draft.episodes else ""
    parts = (
        head,
        _data(draft),
        plays,
        _rollout(draft),
        _rewards(draft),
        _learning(draft),
        _evaluation(draft),
    )
    return "\n".join(part for part in parts if part)


def _data(draft: Draft) -> str:
    fields = draft.fields
    train = draft.path(TRAIN, of_folder=True) if draft.split else draft.path(draft.data)
    lines = (
        ["data:", *_sources("train", draft.tasks)] if draft.tasks else ["data:", f"  train: {_quoted(train)}"]
    )
    if fields.layout:
        lines.append(f"  # {_sentence(fields.layout)}")
    else:
        lines += [f"  prompt_field: {fields.prompt}"] if fields.prompt != "prompt" else []
        lines += [f"  answer_field: {fields.answer}"] if fields.answer not in ("", "answer") else []
    if draft.chat:
        lines.append("  # Texts become chat messages; a base model wants them as they are.")
        lines.append("  apply_chat_template: true")
    lines += [f"  system_prompt: {json.dumps(ANSWER_IN_TAGS)}"] if draft.tagged else []
    lines += ["  # Longer prompts are left out.", f"  max_prompt_tokens: {draft.prompt_tokens}"]
    return "\n".join(lines) + "\n"


def _sources(key: str, tasks: Sequence[TaskSource]) -> list[str]:
    """Write tasks, whose rows of a split the section chooses."""
    if len(tasks) == 1:
        return [f"  {key}: {json.dumps(str(tasks[0]))}"]
    return [f"  {key}:", *(f"    - path: {json.dumps(str(one))}" for one in tasks)]


def _rollout(draft: Draft) -> str:
    lines = ["rollout:"]
    if draft.algorithm in FROM_PAIRS:
        lines.append("  # Pairs of a step.")
    elif draft.algorithm == "sft":
        lines.append("  # Answers of a step.")
    lines.append(f"  prompts_per_step: {draft.groups}")
    if draft.algorithm not in (*FROM_PAIRS, "sft"):
        lines.append(f"  samples_per_prompt: {SAMPLES}")
    if draft.algorithm not in FROM_PAIRS:
        lines += ["  sampling:", f"    max_response_tokens: {draft.response_tokens}"]
    return "\n".join(lines) + "\n"


def _rewards(draft: Draft) -> str:
    name, why = draft.reward
    use = "For evaluations: " if draft.algorithm == "sft" else ""
    whole = (
        "    # Answers stand in no tags.\n    parameters: {tag: ''}\n"
        if draft.tasks and not draft.tagged
        else ""
    )
    return f"rewards:\n  # {_sentence(use + why)}\n  - reward: {_quoted(name)}\n{whole}" if name else ""


def _learning(draft: Draft) -> str:
    rate = next(rate for most, rate in RATES if draft.parameters < most)
    rate *= IMITATION_RATE.get(draft.algorithm, 1) * (ADAPTERS_RATE if draft.adapters else 1)
    mantissa, exponent = f"{rate:.1e}".split("e")
    optimizer = f"""\
optimizer:
  learning_rate: {mantissa}e{int(exponent)}
  warmup_updates: {min(5, draft.steps // 10)}
"""
    if not draft.adapters:
        return optimizer
    return f"""\
# All weights and their moments do not fit on this host: adapters learn, the weights stay.
lora:
  rank: 32
  alpha: 64

{optimizer}"""


def _evaluation(draft: Draft) -> str:
    if not draft.holds_out:
        return ""
    held_out = draft.path(HELDOUT, of_folder=True) if draft.split else draft.path(draft.held_out)
    found, lines = draft.held_out_fields, ["evaluation:", f"  data: {_quoted(held_out)}"]
    if draft.tasks:
        lines = ["evaluation:", *_sources("data", [held_out_of(one) for one in draft.tasks])]
    if not found.layout and found.prompt != draft.fields.prompt:
        lines.append(f"  prompt_field: {found.prompt}")
    if not found.layout and found.answer not in ("", draft.fields.answer):
        lines.append(f"  answer_field: {found.answer}")
    lines.append(f"  every_steps: {max(1, draft.steps // EVALUATIONS)}")
    lines += [] if draft.host.gpus else [f"  max_prompts: {HELD_OUT_ON_CPU}"]
    return "\n".join(lines) + "\n"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _quoted(text: str) -> str:
    """Write a text as YAML reads it back."""
    plain = PLAIN.fullmatch(text) or text in dict(BUILT_IN.values())
    return text if plain else json.dumps(text, ensure_ascii=False)
