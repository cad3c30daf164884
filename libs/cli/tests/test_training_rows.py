"""Rows that `flotilla samples --to` makes give, read by the run that learns them, the tokens of the samples."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from flotilla_coordinator.data.given import load_given
from flotilla_coordinator.data.prompts import Prompt, load_prompts
from flotilla_coordinator.data.training_sets import training_data
from flotilla_coordinator.evaluation.evaluate import HeldOutAnswer
from flotilla_coordinator.ledger.ledger import Ledger
from flotilla_coordinator.ledger.records import Branch, Episode, GroupIssue, RunRecord, RunState, TokenSpan
from flotilla_coordinator.records.directory import RunDirectory
from flotilla_coordinator.rollouts.batch import Batch, RolloutGroup, RolloutSample
from flotilla_coordinator.rollouts.scoring import Outcome
from flotilla_core.config import DataConfig, RunConfig
from flotilla_core.version import Version
from flotilla_data.columns import Reads
from flotilla_data.tokenizer import Tokenizer
from flotilla_testing.model_folders import write_tokenizer

Command = Callable[..., tuple[int, str, str]]
RUN = "sums-1"
SPECIAL = ["<pad>", "<end>", "<begin>", "<user>", "<assistant>", "<think>", "<stop>"]
CHARACTERS = "0123456789+= abcdefghijklmnopqrstuvwxyz.?\n\x1b"
TEMPLATE = (
    "<begin>{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% if message.role == 'assistant' %}<end>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
BEGIN = SPECIAL.index("<begin>")
SUMS = {"train": "a.jsonl"}


def asks(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@dataclasses.dataclass
class Run:
    """A run on disk, whose fleet is down, in the directory of the command."""

    folder: Path
    tokenizer: Tokenizer
    config: dict[str, Any]
    groups: list[RolloutGroup] = dataclasses.field(default_factory=list)
    written: bool = True
    """False where the ledger keeps no tokens."""

    def prompts(self, *prompts: Any) -> list[Prompt]:
        """The prompts as a run reads them, from texts or messages."""
        path = self.folder / "prompts.jsonl"
        path.write_text("".join(json.dumps({"prompt": one}) + "\n" for one in prompts))
        return load_prompts(path, DataConfig(train=path), self.tokenizer).prompts

    def draw(self, prompt: Prompt, *answers: tuple[str, float], epoch: int = 0, **facts: Any) -> list[RolloutSample]:
        """Samples of a prompt with their rewards; what an answer ends with is a token like the others."""
        group = f"{RUN}/{epoch}/{prompt.index}"
        samples = []
        for number, (text, reward) in enumerate(answers):
            tokens = self.tokenizer.encode(text)
            samples.append(
                RolloutSample(
                    f"{group}/{number}",
                    np.array(tokens, np.int32),
                    np.full(len(tokens), -1, np.float32),
                    self.tokenizer.decode(tokens),
                    (TokenSpan(Version(0, 0), 0, len(tokens)),),
                    reward=reward,
                    reward_terms=(reward,),
                    **facts,
                )
            )
        self.groups.append(RolloutGroup(group, prompt.prompt_text, prompt.token_ids, samples, answer="", info={}))
        return samples

    def record(self) -> None:
        directory = RunDirectory.create(self.folder / ".flotilla" / "local" / "runs" / RUN)

        async def store() -> None:
            ledger = Ledger.open(self.folder / ".flotilla" / "local" / "ledger.sqlite")
            text = yaml.safe_dump(self.config)
            await ledger.save_run(RunRecord(RUN, "sums", RunState.RUNNING, text, str(directory.path), time.time()))
            for group in self.groups:
                ids = tuple(sample.sample_id for sample in group.samples)
                prompt = group.prompt_token_ids
                await ledger.group_issued(GroupIssue(RUN, group.group_id, ids, 0, 0, group.prompt_text, prompt))
                await ledger.group_scored(group.samples)
            ledger.close()

        asyncio.run(store())
        directory.write_samples(Batch(0, self.groups, {}), ["exact"])

    def tokens(self) -> list[list[int]]:
        """The tokens of all samples, each with its prompt."""
        return [
            [*group.prompt_token_ids.tolist(), *sample.token_ids.tolist()]
            for group in self.groups
            for sample in group.samples
        ]


@pytest.fixture
def run(flotilla: Command, tmp_path: Path) -> Run:
    """A run without samples; its tokenizer puts a token before a plain text, and its template writes the same one."""
    folder = write_tokenizer(
        tmp_path / "model", [*SPECIAL, *CHARACTERS], special=SPECIAL, template=TEMPLATE, eos_token="<end>"
    )
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = TemplateProcessing(single="<begin> $A", special_tokens=[("<begin>", BEGIN)])
    backend.save(str(folder / "tokenizer.json"))
    (tmp_path / "stack.yaml").write_text("name: local\nmodel: model\n")
    config = {"name": "sums", "steps": 1, "data": SUMS, "rewards": [{"reward": "exact"}]}
    return Run(tmp_path, Tokenizer.load(folder), config)


def learned(run: Run, reads: Reads, file: str = "rows.jsonl") -> list[list[int]]:
    """The tokens of each answer with its prompt, as the run that learns the rows reads them."""
    algorithm = {"type": "sft" if reads is Reads.answers else "dpo"}
    config = RunConfig.model_validate(
        {"name": "taught", "steps": 1, "data": {"train": file}, "algorithm": algorithm, "rewards": []}
    )
    prompts = training_data(config)(run.folder / file, config.data, run.tokenizer).prompts
    return [[*one.token_ids.tolist(), *given.token_ids.tolist()] for one in prompts for given in one.given]


def rows_of(run: Run, flotilla: Command, *options: str) -> tuple[list[dict[str, Any]], str]:
    code, out, err = flotilla("samples", RUN, "-o", "rows.jsonl", *options)
    assert code == 0, err
    assert out.startswith("rows.jsonl: ")
    return [json.loads(line) for line in (run.folder / "rows.jsonl").read_text().splitlines()], err


@pytest.mark.parametrize("prompt", ["1+1=", [asks("1+1=")]], ids=["plain", "chat"])
def test_an_answer_is_learned_with_the_tokens_that_the_policy_read_and_wrote(
    run: Run, flotilla: Command, prompt: Any
) -> None:
    (read,) = run.prompts(prompt)
    assert read.token_ids.tolist().count(BEGIN) == 1
    run.draw(read, ("2<end>", 1.0))
    run.record()
    rows, err = rows_of(run, flotilla, "--to", "sft")
    assert [row["answer"] for row in rows] == ["2"] and (rows[0]["reward"], rows[0]["sample_id"]) == (
        1.0,
        f"{RUN}/0/0/0",
    )
    assert learned(run, Reads.answers) == run.tokens()
    assert "no record" not in err


@pytest.mark.parametrize("answer", ["<think>a<think>2<end>", "a\x1b\n b<end>", "2<stop>"])
def test_special_tokens_control_characters_and_stop_texts_are_learned_too(
    run: Run, flotilla: Command, answer: str
) -> None:
    run.config["rollout"] = {"sampling": {"stop": ["<stop>"]}}
    run.draw(run.prompts("1+1=")[0], (answer, 1.0))
    run.record()
    rows_of(run, flotilla, "--to", "sft")
    assert "\x1b" not in (run.folder / "rows.jsonl").read_text()
    end = [] if answer.endswith("<end>") else [run.tokenizer.eos_id]
    assert learned(run, Reads.answers) == [run.tokens()[0] + end]
