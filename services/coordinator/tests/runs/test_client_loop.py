"""A client's calls: each acts once and is recorded once, and none outlives the loop."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flotilla.common.v1.chat_pb2 import Message, Tool
from flotilla.coordinator.v1 import loop_pb2, run_pb2
from flotilla.trainer.v1 import trainer_pb2 as train
from flotilla_client.groups import Prompt as ClientSide
from flotilla_coordinator.api.loop_servicer import LoopServicer
from flotilla_coordinator.data.chat_turns import Chat, prompt_text
from flotilla_coordinator.fleet.autoscale import IdleShares
from flotilla_coordinator.ledger.ledger import Ledger
from flotilla_coordinator.ledger.records import DropReason, RunRecord, RunState
from flotilla_coordinator.records.directory import RunDirectory
from flotilla_coordinator.rollouts.batch import Batch, RolloutGroup, RolloutSample
from flotilla_coordinator.rollouts.generation import GenerationRequest
from flotilla_coordinator.rollouts.scoring import Outcome
from flotilla_coordinator.runs import executor as serve_client_module
from flotilla_coordinator.runs.active import RunHandle
from flotilla_coordinator.runs.checkpoints import Progress
from flotilla_coordinator.runs.client import calls
from flotilla_coordinator.runs.client.loop import ClientLoop
from flotilla_coordinator.runs.client.sampling import ClientPrompt, ClientSampling
from flotilla_coordinator.runs.context import RunContext
from flotilla_coordinator.runs.control import RunControl
from flotilla_coordinator.runs.events import EventLog
from flotilla_coordinator.runs.status import RunStatus
from flotilla_coordinator.trainers.learners import Learners, StepUpdates
from flotilla_core import ids
from flotilla_core.agreement import AgreementLimits
from flotilla_core.config import RunConfig, StackConfig
from flotilla_core.errors import Cancelled, FlotillaError, InvalidConfig, InvalidRequest, Unavailable
from flotilla_core.service import Activities
from flotilla_core.tensors import to_tensor
from flotilla_core.version import Version
from flotilla_data.chats import chat_of, tools_of
from flotilla_data.tokenizer import Tokenizer
from flotilla_testing import chat_templates
from flotilla_testing.ledger_counts import counts_of

RUN = "run-1"
CONFIG = {
    "name": "run",
    "steps": 3,
    "loop": "client",
    "data": {"train": "x.jsonl"},
    "rewards": [{"reward": "exact"}],
}
TOKENIZER = SimpleNamespace(decode=lambda token_ids: "2")
PROMPT = ClientPrompt("1+1=", np.array([1, 2, 3], np.int32))


class Trainer:
    """Makes steps of what was added, each request once; an answer may get lost on its way."""

    def __init__(self) -> None:
        self.version = Version(0, 0)
        self.agreement = AgreementLimits(None, None)
        self.waiting: list[str] = []
        self.seen: list[str] = []
        self.limits: list[float | None] = []
        self.skips = ""
        self.lose_answer: FlotillaError | None = None
        self._replies: dict[str, train.OptimStepResponse] = {}

    @property
    def stub(self) -> Trainer:
        return self

    async def lost(self) -> bool:
        return False

    async def ForwardBackward(self, request: train.ForwardBackwardRequest) -> train.ForwardBackwardResponse:
        self.seen.append(request.request_id)
        self.waiting += [sample.sample_id for group in request.groups for sample in group.samples]
        return train.ForwardBackwardResponse()

    async def OptimStep(self, request: train.OptimStepRequest) -> train.OptimStepResponse:
        self.limits.append(request.refuse_above if request.HasField("refuse_above") else None)
        if request.request_id not in self._replies:
            moved = self.version if self.skips else Version(self.version.lineage, self.version.step + 1)
            self._replies[request.request_id] = train.OptimStepResponse(
                policy_version=moved.to_proto(), sample_ids=self.waiting, skipped=self.skips
            )
            self.waiting = []
        if self.lose_answer is not None:
            error, self.lose_answer = self.lose_answer, None
            raise error
        return self._replies[request.request_id]


class Generators:
    """Answer every slot with two tokens, when they may."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.ended = asyncio.Event()

    async def samples(self, request: GenerationRequest) -> AsyncGenerator[RolloutSample]:
        self.asked.set()
        try:
            await self.may_answer.wait()
            for sample_id in request.sample_ids:
                tokens, logprobs = np.array([4, 5], np.int32), np.array([-1.0, -1.0], np.float32)
                yield RolloutSample(sample_id, tokens, logprobs, "2")
        finally:
            self.ended.set()


class Bench:
    def __init__(self, ledger: Ledger, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ledger, self.trainer, self.generators = ledger, Trainer(), Generators()
        self.config = RunConfig.model_validate(CONFIG)
        self.checkpoints: Any = SimpleNamespace(take_metrics=dict, wanted=False)
        self.directory = RunDirectory(folder)
        self.scorer: Any = SimpleNamespace()
        self.monkeypatch = monkeypatch

    def loop(self, tokenizer: Any = TOKENIZER) -> ClientLoop:
        trainer: Any = self.trainer
        generators: Any = self.generators
        prompts: Any = SimpleNamespace(cursor={"position": 0})
        context: Any = RunContext(
            run_id=RUN,
            config=self.config,
            stack=StackConfig(),
            control=RunControl(self.config),
            learners=Learners(trainer),
            source=SimpleNamespace(samples_from_policy=True),  # type: ignore[arg-type]
            sync=SimpleNamespace(version=Version(0, 0)),  # type: ignore[arg-type]
            evaluator=None,
            checkpoints=self.checkpoints,
            ledger=self.ledger,
            directory=self.directory,
            status=RunStatus(run_pb2.Run(run_id=RUN), EventLog(lambda event: None)),
            activities=Activities(),
            idle=IdleShares(list),
        )
        sampling = ClientSampling(RUN, self.config.rollout, 0, tokenizer, generators, self.ledger)
        return ClientLoop(context, prompts, sampling, self.scorer, lambda error: None)


@pytest.fixture
async def bench(tmp_path: Path, direct_calls: None, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    ledger = Ledger.open(tmp_path / "ledger.sqlite")
    await ledger.save_run(RunRecord(RUN, "run", RunState.RUNNING, "", str(tmp_path), 0.0))
    yield Bench(ledger, tmp_path, monkeypatch)
    ledger.close()


async def sample(loop: ClientLoop) -> RolloutGroup:
    [(_, group)] = [item async for item in loop.groups([PROMPT], 2, {})]
    return group


def gradients(group: RolloutGroup) -> loop_pb2.AddGradientsRequest:
    samples = [train.TrainSample(sample_id=s.sample_id, reward=1.0) for s in group.samples]
    return loop_pb2.AddGradientsRequest(run_id=RUN, groups=[train.TrainGroup(samples=samples)])


async def test_a_step_whose_answer_was_lost_is_recorded_with_its_samples_when_it_is_asked_again(
    bench: Bench,
) -> None:
    loop = bench.loop()
    await loop.add_gradients(gradients(await sample(loop)))
    bench.trainer.lose_answer = Unavailable("the connection broke")
    with pytest.raises(Unavailable):
        await loop.step_optimizer("step", 0.0)
    await loop.step_optimizer("step", 0.0)
    await loop.step_optimizer("step", 0.0)
    assert counts_of(bench.ledger.path, RUN).trained == 2
    assert loop.run.steps_done == 1 and loop.run.policy.version == Version(0, 1)


async def test_a_step_that_could_not_be_recorded_is_recorded_before_the_next_one(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = bench.loop()
    await loop.add_gradients(gradients(await sample(loop)))
    with monkeypatch.context() as broken:
        broken.setattr(RunDirectory, "write_samples", lambda *_: (_ for _ in ()).throw(OSError("full")))
        with pytest.raises(OSError, match="full"):
            await loop.step_optimizer("first", 0.0)
    assert loop.run.steps_done == 0 and loop.run.policy.version == Version(0, 1)
    await loop.add_gradients(gradients(await sample(loop)))
    await loop.step_optimizer("second", 0.0)
    assert counts_of(bench.ledger.path, RUN).trained == 4
    assert loop.run.steps_done == 2 and len(list(bench.directory.read_samples())) == 4


async def test_a_step_is_refused_by_what_the_run_has_measured_of_rounding(bench: Bench) -> None:
    loop = bench.loop()
    for number, limit in enumerate((None, 0.25, 0.5)):
        bench.trainer.agreement = AgreementLimits(None, limit)
        await loop.add_gradients(gradients(await sample(loop)))
        await loop.step_optimizer(f"step {number}", 0.0)
    assert bench.trainer.limits == [None, 0.25, 0.5]


async def test_gradients_without_an_id_reach_the_trainer_under_one_of_their_own(bench: Bench) -> None:
    loop = bench.loop()
    group = await sample(loop)
    for _ in range(2):
        await loop.add_gradients(gradients(group))
    assert all(bench.trainer.seen) and len(set(bench.trainer.seen)) == 2


async def test_sampling_ends_with_the_loop_and_says_so(bench: Bench) -> None:
    loop = bench.loop()
    bench.generators.may_answer.clear()
    sampling = asyncio.create_task(sample(loop))
    await asyncio.wait_for(bench.generators.asked.wait(), 5)
    await asyncio.wait_for(loop.close(), 5)
    assert bench.generators.ended.is_set()
    with pytest.raises(Cancelled, match="no further calls"):
        await asyncio.wait_for(sampling, 5)


async def test_sampling_ends_with_its_caller(bench: Bench) -> None:
    loop = bench.loop()
    bench.generators.may_answer.clear()
    sampling = asyncio.create_task(sample(loop))
    await asyncio.wait_for(bench.generators.asked.wait(), 5)
    sampling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(sampling, 5)
    assert bench.generators.ended.is_set()


@pytest.mark.parametrize("call", ["scores", "logprobs"])
async def test_scores_and_logprobs_end_with_the_loop(bench: Bench, call: str) -> None:
    asked = asyncio.Event()

    async def never(*_: Any) -> None:
        asked.set()
        await asyncio.Event().wait()

    bench.scorer.score = never
    bench.trainer.ComputeLogprobs = never  # type: ignore[attr-defined]
    loop = bench.loop()
    calling = asyncio.create_task(loop.scores([]) if call == "scores" else loop.logprobs([], 1.0))  # type: ignore[arg-type]
    await asyncio.wait_for(asked.wait(), 5)
    await asyncio.wait_for(loop.close(), 5)
    with pytest.raises(Cancelled, match="no further calls"):
        await asyncio.wait_for(calling, 5)


async def test_sampling_that_cannot_be_is_refused_by_name_before_anything_is_drawn(bench: Bench) -> None:
    loop = bench.loop()
    with pytest.raises(InvalidRequest, match="temperature"):
        _ = [group async for group in loop.groups([PROMPT], 2, {"temperature": -1.0})]
    assert counts_of(bench.ledger.path, RUN).admitted == 0


async def test_a_call_that_asks_for_too_much_is_refused_with_its_limit(bench: Bench) -> None:
    loop = bench.loop()
    with pytest.raises(InvalidRequest, match=r"4,294,967,295 prompts.*\(count\): 100,000 is the limit"):
        loop.draw(2**32 - 1)
    with pytest.raises(InvalidRequest, match=r"\(samples_per_prompt\): 2,000,000 is the limit"):
        _ = [group async for group in loop.groups([PROMPT], 2**32 - 1, {})]
    with pytest.raises(InvalidRequest, match="temperature"):
        _ = [group async for group in loop.groups([PROMPT], 2, {"temperature": 1e308})]
    for rate in (1000.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InvalidRequest, match="learning rate"):
            await loop.step_optimizer("step", rate)


async def test_samples_of_a_skipped_step_are_recorded_with_the_step_that_trains_them(bench: Bench) -> None:
    loop = bench.loop()
    group = await sample(loop)
    bench.trainer.skips = "the gradients are not finite"
    await loop.add_gradients(gradients(group))
    await loop.step_optimizer("skipped", 0.0)
    assert counts_of(bench.ledger.path, RUN).in_flight == 2
    bench.trainer.skips = ""
    await loop.add_gradients(gradients(group))
    await loop.step_optimizer("made", 0.0)
    assert counts_of(bench.ledger.path, RUN).trained == 2


async def test_a_loop_that_nobody_calls_saves_and_ends_as_stopped_with_the_reason(bench: Bench) -> None:
    saved = []

    async def save(progress: Progress) -> None:
        saved.append(progress.steps_done)

    async def nothing(*_: Any) -> None:
        await asyncio.sleep(0)

    bench.config = bench.config.model_copy(update={"loop_idle_timeout_s": 0.01, "export_final": False})
    bench.checkpoints.wanted, bench.checkpoints.save = True, save
    bench.checkpoints.settle = bench.checkpoints.copied = nothing
    bench.checkpoints.shelf = SimpleNamespace(names=list)
    loop = bench.loop()
    loop.run.sync.publish = nothing  # type: ignore[method-assign,assignment]
    loop.run.sync.settled = nothing  # type: ignore[method-assign]
    events = EventLog(lambda event: None)
    active = RunHandle(RUN, RunControl(bench.config), loop.run.status, events, context=loop.run, client=loop)
    start_point: Any = SimpleNamespace()
    bench.monkeypatch.setattr(serve_client_module, "restore", nothing)
    await asyncio.wait_for(serve_client_module.serve_client(loop, start_point, active), 5)
    assert saved == [0] and active.control.stop_requested and "loop_idle_timeout_s" in active.stop_reason.what
    with pytest.raises(Cancelled):
        loop.draw(1)


async def test_a_loop_whose_call_takes_long_is_not_idle(bench: Bench) -> None:
    waited, waits = asyncio.Event(), []

    async def wait_for(work: Any, limit_s: float) -> None:
        work.close()
        waits.append(limit_s)
        if len(waits) == 3:
            loop.calls.end()
        raise TimeoutError

    async def score(*_: Any) -> dict[str, Outcome]:
        await waited.wait()
        return {}

    bench.config = bench.config.model_copy(update={"loop_idle_timeout_s": 1e-9})
    bench.scorer.score = score
    loop = bench.loop()
    scoring = asyncio.create_task(loop.scores([]))
    await asyncio.sleep(0)
    bench.monkeypatch.setattr(calls.asyncio, "wait_for", wait_for)
    assert await loop.serve() == "" and waits == [1e-9] * 3
    waited.set()
    await scoring


async def test_a_chat_is_rendered_and_gets_no_further_special_tokens(bench: Bench) -> None:
    asked: list[tuple[str, bool]] = []

    def encode(text: str, *, special: bool) -> list[int]:
        asked.append((text, special))
        return [7]

    tokenizer: Any = SimpleNamespace(
        render_chats=lambda chats: [
            "".join(f"<{one['role']}>{one['content']}" for one in chat.messages) for chat in chats
        ],
        encode=encode,
    )
    nothing: Any = None
    sampling = ClientSampling(RUN, bench.config.rollout, 0, tokenizer, nothing, nothing)
    chat = Chat([{"role": "user", "content": "1+1?"}], None, "")
    prompt = sampling.prompt("", None, chat=chat, answer="2", info={"level": 1})
    assert (prompt.text, prompt.token_ids.tolist()) == ("<user>1+1?", [7])
    assert (prompt.answer, prompt.info) == ("2", {"level": 1})
    assert sampling.prompt("1+1=", None).text == "1+1="
    assert asked == [("<user>1+1?", False), ("1+1=", True)]


async def asked_by_a_client(bench: Bench, folder: Path, *prompts: loop_pb2.LoopPrompt) -> list[str]:
    """Return the texts that a loop samples from, for a model whose template writes calls and tools."""
    opened = asyncio.Event()
    opened.set()
    loop = bench.loop(Tokenizer.load(chat_templates.write_tokenizer(folder, chat_templates.QWEN25)))
    runs: Any = SimpleNamespace(active=lambda run_id: SimpleNamespace(client=loop, opened=opened))
    request = loop_pb2.SampleGroupsRequest(run_id=RUN, prompts=prompts, samples_per_prompt=1)
    context: Any = None
    replies = [reply async for reply in LoopServicer(runs).SampleGroups(request, context)]
    return [reply.group.prompt.text for reply in sorted(replies, key=lambda reply: reply.index)]


async def test_a_chat_of_a_client_reads_as_that_of_a_row_with_its_calls_and_tools(
    bench: Bench, tmp_path: Path
) -> None:
    called = {"name": "weather", "arguments": '{"unit": "C", "city": "Paris"}'}
    chat = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": called}]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ]
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "a": 1}}}
    given = (ClientSide(messages=chat, tools=[tool]).to_proto(), ClientSide.of(chat[:1]).to_proto())
    texts = await asked_by_a_client(bench, tmp_path / "model", *given)
    messages = chat_of(chat, "")
    assert messages is not None
    tokenizer = Tokenizer.load(tmp_path / "model")
    assert texts[0] == prompt_text(Chat(messages, tools_of([tool], ""), ""), tokenizer)
    assert '"arguments": {"unit": "C", "city": "Paris"}' in texts[0] and '"parameters": {"type"' in texts[0]
    assert texts[1] == prompt_text(Chat(messages[:1], None, ""), tokenizer)


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        (loop_pb2.LoopPrompt(), "the prompt is empty (prompt 0)"),
        (loop_pb2.LoopPrompt(chat=[Message(content="x")]), "a chat message has no role (prompt 0)"),
        (
            loop_pb2.LoopPrompt(text="x", tools=[Tool(function='{"name": "f"}')]),
            "the tools have no chat",
        ),
        (loop_pb2.LoopPrompt(chat=[Message(role="user")], tools=[Tool(function="{}")]), "a tool has no name"),
    ],
)
async def test_a_chat_from_which_something_would_be_lost_is_refused(
    bench: Bench, tmp_path: Path, prompt: loop_pb2.LoopPrompt, says: str
) -> None:
    with pytest.raises((InvalidRequest, InvalidConfig), match=re.escape(says)):
        await asked_by_a_client(bench, tmp_path / "model", prompt)


async def test_a_reason_why_samples_have_no_reward_is_told_once(bench: Bench) -> None:
    run = bench.loop().run
    told: list[str] = []
    bench.monkeypatch.setattr(run.status, "notice", lambda finding: told.append(finding.what))
    for step, why in enumerate(["boom", "boom", "bang"]):
        made = Version(0, step + 1)
        update = train.UpdateResult(update_id=ids.update_id(RUN, made), policy_version=made.to_proto())
        bench.trainer.version = made
        batch = Batch(step, [], {}, unscored=f"1 of 6 samples of step {step} could not be scored: {why}")
        await run.record_update(step, Version(0, step), batch, StepUpdates(update))
    assert [text.rpartition(": ")[2] for text in told] == ["boom", "bang"]


async def test_a_sample_that_the_client_rejects_keeps_the_reward_of_the_run(bench: Bench) -> None:
    async def score(items: list[Any]) -> dict[str, Outcome]:
        return {item.sample_id: Outcome(0.25 + number / 4) for number, item in enumerate(items)}

    bench.scorer.score = score
    loop = bench.loop()
    group = await sample(loop)
    items: Any = [SimpleNamespace(sample_id=one.sample_id) for one in group.samples]
    await loop.scores(items)
    kept = gradients(group)
    del kept.groups[0].samples[1]
    await loop.add_gradients(kept)
    await loop.step_optimizer("step", 0.0)
    await loop.close()
    await bench.ledger.drop_in_flight(RUN, DropReason.RUN_ENDED)
    found = await bench.ledger.samples(RUN)
    assert {one.sample_id: one.reward for one in found} == {
        group.samples[0].sample_id: 1.0,
        group.samples[1].sample_id: 0.5,
    }


async def test_a_sample_of_several_turns_is_recorded_with_all_of_them(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = bench.loop()
    group = await sample(loop)
    monkeypatch.setattr(TOKENIZER, "decode", lambda tokens: " ".join(map(str, tokens)))
    asked = gradients(group)
    asked.groups[0].samples[0].token_ids.CopyFrom(to_tensor(np.array([4, 5, 9, 9, 6], np.int32)))
    asked.groups[0].samples[1].token_ids.CopyFrom(to_tensor(np.array([4, 5], np.int32)))
    await loop.add_gradients(asked)
    await loop.step_optimizer("step", 0.0)
    assert [one["response"] for one in bench.directory.read_samples()] == ["4 5 9 9 6", "2"]
