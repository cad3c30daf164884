"""Rows that `flotilla samples --to` makes give, read by the run that learns them, the tokens of the samples."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from flotilla_coordinator.data.given import load_given
from flotilla_coordinator.data.prompts import Prompt, load_prompts
from flotilla_coordinator.data.renders import Renders
from flotilla_coordinator.data.training_sets import training_data
from flotilla_coordinator.evaluation.evaluate import HeldOutAnswer
from flotilla_coordinator.ledger import run_rows
from flotilla_coordinator.ledger.ledger import Ledger
from flotilla_coordinator.ledger.records import Branch, Episode, GroupIssue, RunRecord, RunState, TokenSpan
from flotilla_coordinator.records.directory import RunDirectory
from flotilla_coordinator.records.rollouts import RolloutRecord
from flotilla_coordinator.rollouts.batch import Batch, RolloutGroup, RolloutSample
from flotilla_coordinator.rollouts.scoring import Outcome
from flotilla_coordinator.rollouts.transcript import Transcript
from flotilla_core.config import DataConfig, RunConfig
from flotilla_core.version import Version
from flotilla_data.columns import Reads
from flotilla_data.samples import ROLLOUTS
from flotilla_data.tokenizer import Tokenizer
from flotilla_testing.model_folders import write_tokenizer

Command = Callable[..., tuple[int, str, str]]
RUN = "sums-1"
SPECIAL = ["<pad>", "<end>", "<begin>", "<user>", "<assistant>", "<think>", "<stop>", "<tool>"]
NEVER = "ab"
"""A token that the tokenizer makes of no text: it takes each letter alone."""
CHARACTERS = '0123456789+= abcdefghijklmnopqrstuvwxyz.?\n\x1b{}<>/_,:"'
TEMPLATE = (
    "<begin>{% for tool in tools or [] %}<user>{{ tool | tojson }}{% endfor %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
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

    def prompts(self, *prompts: Any) -> list[Prompt]:
        """The prompts as a run reads them, from texts or messages."""
        path = self.folder / "prompts.jsonl"
        path.write_text("".join(json.dumps({"prompt": one}) + "\n" for one in prompts))
        return load_prompts(path, DataConfig(train=path), self.tokenizer).prompts

    def draw(
        self, prompt: Prompt, *answers: tuple[str, float], epoch: int = 0, **facts: Any
    ) -> list[RolloutSample]:
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
        self.groups.append(
            RolloutGroup(group, prompt.prompt_text, prompt.token_ids, samples, answer="", info={})
        )
        return samples

    def record(self) -> None:
        directory = RunDirectory.create(self.folder / ".flotilla" / "local" / "runs" / RUN)

        async def store() -> None:
            ledger = Ledger.open(self.folder / ".flotilla" / "local" / "ledger.sqlite")
            text = yaml.safe_dump(self.config)
            await ledger.save_run(
                RunRecord(RUN, "sums", RunState.SUCCEEDED, text, str(directory.path), time.time())
            )
            for group in self.groups:
                ids = tuple(sample.sample_id for sample in group.samples)
                prompt = group.prompt_token_ids
                await ledger.group_issued(
                    GroupIssue(RUN, group.group_id, ids, 0, 0, group.prompt_text, prompt)
                )
                await ledger.group_scored(group.samples)
            ledger.close()

        asyncio.run(store())
        directory.write_samples(Batch(0, self.groups, {}), ["exact"])

    def forget_tokens(self) -> None:
        """Delete what retention deletes of a run that has ended."""
        with closing(sqlite3.connect(self.folder / ".flotilla" / "local" / "ledger.sqlite")) as db:
            run_rows.forget_payloads(db, RUN)
            db.commit()

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
        tmp_path / "model",
        [*SPECIAL, *CHARACTERS, NEVER],
        special=SPECIAL,
        template=TEMPLATE,
        eos_token="<end>",
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
    assert "on record" not in err


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


def test_the_best_right_answer_of_each_prompt_is_learned_once(run: Run, flotilla: Command) -> None:
    one, two, three, four = run.prompts("1+1=", "2+2=", "3+3=", "1+1=")
    run.draw(one, ("3<end>", 0.0), ("2<end>", 1.0), ("two<end>", 1.5))
    run.draw(one, ("2<end>", 1.0), ("2.<end>", 1.0), epoch=1)
    run.draw(two, ("5<end>", 0.5))
    run.draw(three, ("six six", 1.0), truncated=True)
    run.draw(four, ("two<end>", 1.0))
    run.record()
    rows, err = rows_of(run, flotilla, "--to", "sft")
    assert [row["answer"] for row in rows] == ["two"]
    assert (
        "3 prompts have no row: 1: no reward of at least 1; 1: the response was cut off; 1: equal to" in err
    )
    rows, _ = rows_of(run, flotilla, "--to", "sft", "--best", "9", "--at-least", "0.5", "--force")
    assert [row["answer"] for row in rows] == ["two", "2", "2.", "5"]
    rows, _ = rows_of(run, flotilla, "--to", "sft", "--contains", "2+2", "--at-least", "0", "--force")
    assert [row["answer"] for row in rows] == ["5"]


def test_a_run_whose_evaluation_says_what_is_right_teaches_what_is_right(run: Run, flotilla: Command) -> None:
    run.config["evaluation"] = {"data": "held.jsonl", "success_at": 0.5}
    run.draw(run.prompts("1+1=")[0], ("2<end>", 0.6))
    run.record()
    assert len(rows_of(run, flotilla, "--to", "sft")[0]) == 1


@pytest.mark.parametrize("prompt", ["1+1=", [asks("1+1=")]], ids=["plain", "chat"])
def test_a_pair_is_the_best_and_the_worst_answer_of_a_group(run: Run, flotilla: Command, prompt: Any) -> None:
    read, *others = run.prompts(prompt, "2+2=", "3+3=", "4+4=")
    run.draw(read, ("3<end>", 0.5), ("2<end>", 1.0), ("4<end>", 0.0))
    expected = [run.tokens()[1], run.tokens()[2]]
    run.draw(others[0], ("4<end>", 1.0), ("four<end>", 1.0))
    run.draw(others[1], ("6<end>", 1.0), ("7<end>", 0.9))
    run.draw(others[2], ("8<end>", 1.0))
    run.draw(read, ("5<end>", 0.0), epoch=1)
    run.record()
    rows, err = rows_of(run, flotilla, "--to", "pairs", "--margin", "0.5")
    (row,) = rows
    assert {**row, "prompt": ""} == {
        "prompt": "",
        "chosen": "2",
        "rejected": "4",
        "chosen_reward": 1.0,
        "rejected_reward": 0.0,
    }
    assert learned(run, Reads.pairs) == expected
    for words in ("2: there is no other sample", "1: all rewards are equal", "1: the rewards differ by less"):
        assert words in err


def test_what_no_text_says_is_left_out_with_its_reason(run: Run, flotilla: Command) -> None:
    cut, odd, good = run.prompts("1+1+1+1=", "2+2=", "3+3=")
    run.draw(dataclasses.replace(cut, token_ids=cut.token_ids[-4:]), ("4<end>", 1.0))
    (sample,) = run.draw(odd, ("4.<end>", 1.0))
    sample.token_ids[1] = len(SPECIAL) + len(CHARACTERS)
    sample.text = f"4{NEVER}"
    run.draw(good, ("6<end>", 1.0))
    run.record()
    rows, err = rows_of(run, flotilla, "--to", "sft")
    assert [row["answer"] for row in rows] == ["6"]
    assert learned(run, Reads.answers) == run.tokens()[2:]
    assert "1: the prompt was cut" in err and "1: the text gives other tokens" in err


def test_tokens_that_are_not_on_record_any_more_are_counted(run: Run, flotilla: Command) -> None:
    plain, chat, odd = run.prompts("1+1=", [asks("2+2=")], "3+3=")
    run.draw(plain, ("2<end>", 1.0))
    run.draw(chat, ("4<end>", 1.0))
    run.draw(odd, ("<think>6<end>", 1.0))
    run.record()
    run.forget_tokens()
    _, err = rows_of(run, flotilla, "--to", "sft")
    assert learned(run, Reads.answers) == run.tokens()[:2]
    assert "the tokens of 2 rows are not on record" in err and "1: the text gives other tokens" in err


ADDS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><end>'


def episode(run: Run, *turns: str, tools: bool = False, rewrites: bool = False) -> RolloutSample:
    """An episode whose policy wrote these turns, between which it was asked for the next one."""

    async def play() -> RolloutSample:
        transcript = Transcript(run.tokenizer, Renders(run.tokenizer), 200)
        given = [{"role": "assistant", "content": "0"}]
        heard: list[dict[str, Any]] = [asks("0?"), *given, asks("1+1=")]
        for place, turn in enumerate(turns):
            await transcript.hear(heard, ADDS if tools else None, afresh=rewrites and place > 0)
            tokens = np.array(run.tokenizer.encode(turn), np.int32)
            spans = (TokenSpan(Version(0, 0), 0, len(tokens)),)
            logprobs = np.full(len(tokens), -1, np.float32)
            transcript.wrote(RolloutSample("", tokens, logprobs, "", spans, truncated=turn[-1] != ">"))
            heard = [{"role": "tool", "content": "2"} if "call>" in turn else asks("more?")]
        branches, start = [], 0
        for one in transcript.sequences:
            branches.append(Branch(start, one.prompt_token_ids))
            start += len(one.token_ids)
        tokens = np.concatenate([one.token_ids for one in transcript.sequences])
        return RolloutSample(
            f"{RUN}/0/0/0",
            tokens,
            np.full(len(tokens), -1, np.float32),
            "shown",
            (TokenSpan(Version(0, 0), 0, len(tokens)),),
            reward=1.0,
            trained=np.concatenate([one.trained for one in transcript.sequences]),
            truncated=turns[-1][-1] != ">",
            episode=Episode("completed", len(turns), (), json.dumps(transcript.record), tuple(branches)),
        )

    return asyncio.run(play())


def play(run: Run, *samples: RolloutSample) -> None:
    run.config["environment"] = {"name": "calculator"}
    own = [dataclasses.replace(one, sample_id=f"{RUN}/0/0/{n}") for n, one in enumerate(samples)]
    (row,) = run.prompts("a row")
    run.groups.append(RolloutGroup(f"{RUN}/0/0", "a row", row.token_ids, own, answer="", info={}))
    run.record()


def test_an_episode_is_learned_as_a_chat_turn_by_turn(run: Run, flotilla: Command) -> None:
    sample = episode(run, "2<end>", " 4 .<end>")
    play(run, sample)
    rows, _ = rows_of(run, flotilla, "--to", "sft")
    said = [(one["role"], one["content"], one.get("weight")) for one in rows[0]["messages"]]
    assert said == [
        ("user", "0?", None),
        ("assistant", "0", 0),
        ("user", "1+1=", None),
        ("assistant", "2", None),
        ("user", "more?", None),
        ("assistant", " 4 .", None),
    ]
    assert sample.episode is not None and sample.trained is not None
    prompt = sample.episode.branches[0].prompt_token_ids.tolist()
    assert learned(run, Reads.answers) == [[*prompt, *sample.token_ids.tolist()]]
    config = DataConfig(train=run.folder / "rows.jsonl")
    (read,) = load_given(config.train, config, run.tokenizer, reads=Reads.answers).prompts
    assert read.given[0].trained is not None
    assert read.given[0].trained.tolist() == sample.trained.tolist()


@pytest.mark.parametrize(("call", "written"), [(CALL, True), (CALL.replace(": ", ":"), False)])
def test_calls_of_tools_are_learned_where_the_template_writes_them_as_the_policy_did(
    run: Run, flotilla: Command, call: str, written: bool
) -> None:
    sample = episode(run, call, "2<end>", tools=True)
    play(run, sample)
    code, _, err = flotilla("samples", RUN, "--to", "sft", "-o", "rows.jsonl")
    assert (code == 0) == written, err
    assert written or "the text gives other tokens" in err
    if written and sample.episode is not None:
        prompt = sample.episode.branches[0].prompt_token_ids.tolist()
        assert learned(run, Reads.answers) == [[*prompt, *sample.token_ids.tolist()]]


def test_pairs_of_episodes_are_compared_from_where_they_differ(run: Run, flotilla: Command) -> None:
    good, bad = episode(run, "2<end>", "4<end>"), episode(run, "2<end>", "5<end>")
    bad.reward = 0.0
    play(run, good, bad)
    rows_of(run, flotilla, "--to", "pairs")
    prompt = good.episode.branches[0].prompt_token_ids.tolist() if good.episode else []
    assert learned(run, Reads.pairs) == [[*prompt, *one.token_ids.tolist()] for one in (good, bad)]


@pytest.mark.parametrize(
    ("turns", "options", "reason"),
    [
        (("2<end>", "4<end>"), {"rewrites": True}, "the history of the episode was rewritten"),
        (("2<end>", "4"), {}, "the response was cut off"),
        (("2<stop>", "4<end>"), {}, "the text gives other tokens"),
        (("2 \n<end>",), {"forgotten": True}, "is not on record any more"),
    ],
)
def test_an_episode_that_no_chat_tells_is_refused_by_name(
    run: Run, flotilla: Command, turns: tuple[str, ...], options: dict[str, bool], reason: str
) -> None:
    forgotten = options.pop("forgotten", False)
    play(run, episode(run, *turns, **options))
    if forgotten:
        run.forget_tokens()
    code, _, err = flotilla("samples", RUN, "--to", "sft", "-o", "rows.jsonl")
    assert (code, Path("rows.jsonl").exists()) == (2, False) and reason in " ".join(err.split()), err


@pytest.mark.parametrize("recorded", [True, False])
def test_a_conversation_that_the_ledger_has_forgotten_comes_from_the_record_or_is_said_to_be_gone(
    run: Run, flotilla: Command, recorded: bool
) -> None:
    sample = episode(run, "2<end>", " 4 .<end>")
    run.config["rollout"] = {"record": recorded}
    play(run, sample)
    run.forget_tokens()
    if recorded:
        folder = run.folder / ".flotilla" / "local" / "runs" / RUN / ROLLOUTS
        record = RolloutRecord(folder, RUN, 1.0, run.tokenizer.digest)
        record.write(Batch(0, run.groups, {}), Version(0, 0))
    code, shown, _ = flotilla("samples", RUN, "--full")
    assert code == 0
    if recorded:
        assert "--- assistant (turn 2, 5 tokens" in shown and "not on record" not in shown
        _, err = rows_of(run, flotilla, "--to", "sft")
        assert sample.episode is not None and "not on record" not in err
        prompt = sample.episode.branches[0].prompt_token_ids.tolist()
        assert learned(run, Reads.answers) == [[*prompt, *sample.token_ids.tolist()]]
        return
    assert "--- the conversation is not on record any more" in shown and "rollout.record: true" in shown
    code, _, err = flotilla("samples", RUN, "--to", "sft", "-o", "rows.jsonl")
    assert code == 2 and "checkpoint.every_steps: 0" in err and "--full" not in err


def test_answers_to_held_out_prompts_are_written_with_a_warning(run: Run, flotilla: Command) -> None:
    prompts = run.prompts("1+1=", [asks("2+2=")])
    samples = [run.draw(one, (f"{text}<end>", 1.0))[0] for one, text in zip(prompts, "24", strict=True)]
    run.record()
    answers = [
        HeldOutAnswer("heldout", one, sample, Outcome(1.0))
        for one, sample in zip(prompts, samples, strict=True)
    ]
    directory = RunDirectory(run.folder / ".flotilla" / "local" / "runs" / RUN)
    directory.write_answers(0, [answer.record(0, Version(0, 0)) for answer in answers])
    _, err = rows_of(run, flotilla, "--to", "sft", "--evaluation")
    assert learned(run, Reads.answers) == run.tokens() and "these are held-out prompts" in err


def test_a_file_is_overwritten_by_force_alone_and_told_as_json(run: Run, flotilla: Command) -> None:
    run.draw(run.prompts("1+1=")[0], ("2<end>", 1.0))
    run.draw(run.prompts("1+1=", "2+2=")[1], ("5<end>", 0.0))
    run.record()
    (run.folder / "rows.jsonl").write_text("mine")
    asked = ("samples", RUN, "--to", "sft", "-o", "rows.jsonl")
    code, _, err = flotilla(*asked)
    assert code == 2 and "overwrite by --force" in err and (run.folder / "rows.jsonl").read_text() == "mine"
    code, out, err = flotilla(*asked, "--force", "--json")
    assert code == 0, err
    assert json.loads(out) == {
        "run_id": RUN,
        "file": "rows.jsonl",
        "to": "sft",
        "rows": 1,
        "prompts": 1,
        "left_out": {"no reward of at least 1": 1},
        "by_numbers": 0,
        "longest_prompt": 5,
    }


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--to", "sft"), "--to and -o go together"),
        (("-o", "rows.jsonl"), "--to and -o go together"),
        (("--to", "sft", "-o", "rows.jsonl", "--margin", "1"), "--margin chooses rows of --to pairs"),
        (("--best", "2"), "--best chooses rows of --to sft"),
        (("--to", "pairs", "-o", "rows.jsonl", "--parquet", "a"), "write different files"),
        (("--to", "sft", "-o", "rows.jsonl", "--at-least", "2"), "the best reward is 1: name a lower one"),
        (("--to", "sft", "-o", "rows.jsonl", "--step", "9"), "there are no such samples"),
    ],
)
def test_wrong_use_of_rows_says_so(run: Run, flotilla: Command, options: tuple[str, ...], words: str) -> None:
    run.draw(run.prompts("1+1=")[0], ("2<end>", 1.0))
    run.record()
    code, _, err = flotilla("samples", RUN, *options)
    assert (code, words in err) == (2, True), err
