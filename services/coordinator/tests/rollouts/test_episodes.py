"""Episodes are played turn by turn, bounded by the run, repeated where their environment is lost, and never half."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from flotilla.common.v1.registration_pb2 import Registration
from flotilla.generator.v1 import generator_pb2 as gen
from flotilla.trainer.v1 import trainer_pb2
from flotilla_coordinator.data.prompts import Prompt
from flotilla_coordinator.ledger.records import DropReason
from flotilla_coordinator.rollouts.batch import RolloutGroup
from flotilla_coordinator.rollouts.environments import LATE_S, SILENT_S, EpisodeStart, OwnTime
from flotilla_coordinator.rollouts.episode_messages import Asked, Ended
from flotilla_coordinator.rollouts.episodes import BEGINNINGS, Episodes
from flotilla_coordinator.rollouts.generation import EVALUATION, Generation, GenerationRequest
from flotilla_coordinator.trainers.messages import fill
from flotilla_core.config import EnvironmentConfig, SamplingConfig
from flotilla_core.errors import Exhausted, FailedPrecondition, FlotillaError, Unavailable
from flotilla_core.protocol import PROTOCOL_VERSION
from flotilla_core.tensors import from_tensor, to_tensor
from flotilla_core.version import Version
from flotilla_data.tokenizer import Tokenizer
from flotilla_testing.chat_templates import CHATML, user, write_tokenizer

pytestmark = pytest.mark.usefixtures("direct_calls")

SLOTS = ("run/0/0/0", "run/0/0/1")
PROMPT = Prompt(0, 0, "Hello?", np.array([1, 2], np.int32), "yes", {"level": 1}, chat=[user("Hello?")])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_tokenizer(tmp_path_factory.mktemp("model"), CHATML))


@dataclass(eq=False)
class Generator:
    """Writes `says` and the end token to each prompt; it goes away before the answers that `dies` numbers."""

    tokenizer: Tokenizer
    says: str = "blue"
    dies: set[int] = field(default_factory=set)
    silent: set[int] = field(default_factory=set)
    """The answers without a token."""
    takes_s: float = 0.0
    """The time that it says a turn took."""
    version: int = 3
    asked: list[gen.GenerateRequest] = field(default_factory=list)
    instance_id: str = "generator-0"
    name: str = "generator-0"
    registration: Registration = field(
        default_factory=lambda: Registration(protocol_version=PROTOCOL_VERSION)
    )

    @property
    def stub(self) -> Generator:
        return self

    async def GenerateMany(
        self, parts: AsyncIterator[gen.GenerateManyRequest]
    ) -> AsyncIterator[gen.GenerateManyResponse]:
        async for part in parts:
            for request in part.requests:
                piece = self._written(request)
                yield gen.GenerateManyResponse(
                    answers=[gen.GenerateAnswer(request_id=request.request_id, samples=[piece])]
                )

    def _written(self, request: gen.GenerateRequest) -> gen.GeneratedSample:
        self.asked.append(request)
        if len(self.asked) in self.dies:
            raise Unavailable("the generator is gone")
        (slot,) = request.samples
        tokens = [*self.tokenizer.encode(self.says), self.tokenizer.eos_id]
        if len(self.asked) in self.silent:
            tokens = []
        cut = len(tokens) > request.sampling.max_tokens
        tokens = tokens[: request.sampling.max_tokens]
        piece = gen.GeneratedSample(
            sample_id=slot.sample_id,
            token_ids=to_tensor(np.array(tokens, np.int32)),
            logprobs=to_tensor(np.full(len(tokens), -0.5, np.float32)),
            finish_reason=gen.FINISH_REASON_LENGTH if cut else gen.FINISH_REASON_STOP,
        )
        piece.version_spans.add(version=Version(0, self.version).to_proto(), start=0, end=len(tokens))
        piece.timing.total.FromNanoseconds(int(self.takes_s * 1e9))
        return piece


class Pool:
    """Always hands out its one replica."""

    def __init__(self, replica: Generator) -> None:
        self.replica = replica
        self.affinities: list[str] = []

    async def acquire(self, cost: Any, *, affinity: str = "", **_options: Any) -> Generator:
        self.affinities.append(affinity)
        return self.replica

    def release(self, replica: Generator, cost: Any) -> None:
        pass

    def heard(self, replica: Generator, waiting: int) -> None:
        pass

    def eject(self, instance_id: str, why: str) -> None:
        pass


Script = Sequence[Asked | Ended | Exception]


@dataclass
class Call:
    """Plays a script: what the environment asks for and how it ends, or that it is lost."""

    script: list[Asked | Ended | Exception]
    start: EpisodeStart
    ended: Ended | None = None
    answers: list[dict[str, Any]] = field(default_factory=list)
    stopped: str = ""

    async def asked(self) -> Asked | None:
        await asyncio.sleep(0)
        if self.ended is not None:
            return None
        said = self.script.pop(0)
        if isinstance(said, Exception):
            raise said
        if isinstance(said, Ended):
            self.ended = said
            return None
        return said

    async def written(self, message: dict[str, Any], **facts: Any) -> None:
        self.answers.append({"message": message, **facts})

    async def stop(self, ending: str) -> Ended:
        self.stopped, self.ended = ending, Ended(ending, {"score": 0.25}, (), {})
        return self.ended


class Environments:
    """Begins an episode by the next script; the last one is for all that follow."""

    def __init__(self, *scripts: Script) -> None:
        self.scripts = list(scripts)
        self.calls: list[Call] = []
        self.open = 0

    @asynccontextmanager
    async def begin(self, start: EpisodeStart) -> AsyncIterator[Call]:
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        call = Call(list(script), start)
        self.calls.append(call)
        self.open += 1
        try:
            yield call
        finally:
            self.open -= 1


def asks(*texts: str, tools: list[dict[str, Any]] | None = None, **options: Any) -> Asked:
    digest = repr((texts, tools, options)).encode()
    return Asked([user(text) for text in texts], tools or [], digest=digest, **options)


def ends(turn_rewards: tuple[float, ...] = (), moves: float = 2.0, **rewards: float) -> Ended:
    return Ended("completed", rewards, turn_rewards, {"moves": moves})


DONE = ends(solved=1.0)
TWO_TURNS: Script = [asks("One?"), asks("Two?"), DONE]


@dataclass
class Played:
    samples: dict[str, Any]
    environments: Environments
    generator: Generator
    pool: Pool
    episodes: Episodes
    lost: list[tuple[str, ...]]

    @property
    def one(self) -> Any:
        return self.samples[SLOTS[0]]


Play = Callable[..., Any]


@pytest.fixture
def play(tokenizer: Tokenizer) -> Play:
    async def played(
        environments: Environments, slots: Sequence[str] = SLOTS[:1], says: str = "blue", **options: Any
    ) -> Played:
        generator = Generator(tokenizer, says, options.pop("dies", set()))
        generator.silent = options.pop("silent", set())
        generator.takes_s = options.pop("generator_s", 0.0)
        pool: Any = Pool(generator)
        lost: list[tuple[str, ...]] = []

        def tell(sample_ids: tuple[str, ...], _error: FlotillaError) -> None:
            lost.append(sample_ids)

        turns = Generation(
            "run", 0, tokenizer, pool=pool, serves=lambda *_: True, wait_limit_s=1.0, lost=lambda *_: None
        )
        sampling = SamplingConfig(max_response_tokens=options.pop("turn_tokens", 64))
        log, turns_so_far = options.pop("log", None), options.pop("turns", None)
        priority = options.pop("priority", 0)
        config = EnvironmentConfig(name="scripted", **options)
        scripted: Any = environments
        episodes = Episodes(0, config, tokenizer, turns=turns, environments=scripted, lost=tell, log=log)
        row = {"prompt": PROMPT, "world": "0/0", "turns": turns_so_far, "priority": priority}
        request = GenerationRequest(PROMPT.token_ids, tuple(slots), sampling, Version(0, 0), 5.0, 3, **row)
        async with aclosing(episodes.samples(request)) as samples:
            found: dict[str, Any] = {sample.sample_id: sample async for sample in samples}
        assert environments.open == 0
        return Played(found, environments, generator, pool, episodes, lost)

    return played


async def test_an_episode_is_one_sample_with_its_turns_and_what_was_said_between(
    play: Play, tokenizer: Tokenizer
) -> None:
    played = await play(Environments(TWO_TURNS))
    sample = played.one
    turn = [*tokenizer.encode("blue"), tokenizer.eos_id]
    assert sample.token_ids[sample.trained].tolist() == turn * 2
    assert sample.logprobs is not None and set(sample.logprobs[~sample.trained].tolist()) == {0.0}
    assert "Two?" in tokenizer.decode(sample.token_ids[~sample.trained].tolist())
    assert [(s.version.step, s.end - s.start) for s in sample.spans] == [(3, len(turn))] * 2
    assert sample.text == "blue" and sample.episode is not None
    assert (sample.episode.ending, sample.episode.turns) == ("completed", 2)
    (only,) = sample.episode.branches
    assert only.start == 0 and "One?" in tokenizer.decode(only.prompt_token_ids.tolist())
    said = json.loads(sample.episode.messages)
    assert [one.get("content") for one in said] == ["One?", "blue", "Two?", "blue", None]
    assert said[-1] == {"ended": "completed", "rewards": {"solved": 1.0}}
    assert sample.played is not None and sample.played.total == 1.0 and sample.outcome is None


async def test_each_turn_sees_exactly_the_tokens_before_it_on_the_replica_that_has_them(play: Play) -> None:
    played = await play(Environments(TWO_TURNS))
    sample = played.one
    first, second = (from_tensor(asked.prompt_token_ids).tolist() for asked in played.generator.asked)
    assert first == sample.episode.branches[0].prompt_token_ids.tolist()
    turn = int(np.flatnonzero(~sample.trained)[-1]) + 1
    assert second == first + sample.token_ids.tolist()[:turn]
    assert played.pool.affinities == [SLOTS[0]] * 2
    seeds = [asked.samples[0].seed for asked in played.generator.asked]
    assert len(set(seeds)) == 2 and not any(asked.gather.ToNanoseconds() for asked in played.generator.asked)


async def test_the_environment_gets_the_row_and_all_of_a_group_the_same_seed(play: Play) -> None:
    played = await play(Environments(TWO_TURNS), SLOTS)
    starts = [call.start for call in played.environments.calls]
    assert {start.episode_id for start in starts} == set(SLOTS) and len({start.seed for start in starts}) == 1
    assert (starts[0].messages, starts[0].answer, starts[0].info) == (PROMPT.chat, "yes", {"level": 1})


async def test_the_environment_is_told_what_was_written_and_what_is_left(play: Play) -> None:
    played = await play(Environments(TWO_TURNS), episode_tokens=1000)
    first, second = played.environments.calls[0].answers
    assert first["message"] == {"role": "assistant", "content": "blue"} and first["unparsed"] == ""
    assert not first["cut"] and first["tokens"] == len(played.one.token_ids[played.one.trained]) // 2
    assert 0 < second["tokens_left"] < first["tokens_left"] < 1000


async def test_the_tokens_of_a_turn_go_one_by_one_to_whoever_asked_for_them_and_to_nobody_else(
    play: Play, tokenizer: Tokenizer
) -> None:
    says = "sky \N{SNOWMAN}"
    played = await play(Environments([asks("One?", tokens=True), asks("Two?"), DONE]), says=says)
    first, second = played.environments.calls[0].answers
    one_by_one = first["one_by_one"]
    assert one_by_one.token_ids.tolist() == [*tokenizer.encode(says), tokenizer.eos_id]
    assert one_by_one.logprobs.tolist() == [-0.5] * len(one_by_one.token_ids)
    assert b"".join(one_by_one.texts[:-1]).decode() == says and second["one_by_one"] is None
    assert [one["prompt_tokens"] for one in (first, second)] == [
        len(asked.prompt_token_ids.data) // 4 for asked in played.generator.asked
    ]


async def test_a_generator_that_dies_costs_a_turn_and_its_environment_does_not_notice(play: Play) -> None:
    played = await play(Environments(TWO_TURNS), dies={2})
    assert len(played.environments.calls) == 1 and len(played.generator.asked) == 3
    assert played.one.episode.turns == 2 and played.one.attempt == 1 and not played.lost


GONE = Unavailable("the environment is gone")


async def test_an_environment_that_is_lost_is_told_the_same_turns_again_and_goes_on(play: Play) -> None:
    played = await play(Environments([asks("One?"), GONE], TWO_TURNS), says="sky")
    assert [call.start.attempt for call in played.environments.calls] == [1, 1]
    assert len(played.generator.asked) == 2, "what was sampled is not sampled again"
    told = [call.answers[0] for call in played.environments.calls]
    assert told[0] == told[1]
    sample = played.one
    assert sample.attempt == 0 and sample.episode.turns == 2 and sample.played.total == 1.0
    assert {"resumed": 1} in json.loads(sample.episode.messages)
    assert played.lost == [(SLOTS[0],)]
    figures = played.episodes.figures.take()
    assert figures["episodes/resumed"] == figures["episodes/resumed_turns"] == 1.0
    assert "episodes/repeated" not in figures


@pytest.mark.parametrize("again", [[asks("Uno?"), asks("Two?"), DONE], [DONE]], ids=["another", "the end"])
async def test_an_environment_that_says_something_else_begins_anew(play: Play, again: Script) -> None:
    played = await play(Environments([asks("One?"), GONE], again, TWO_TURNS), says="sky")
    assert [call.start.attempt for call in played.environments.calls] == [1, 1, 2]
    assert played.one.attempt == 1 and played.one.episode.turns == 2 and len(played.generator.asked) == 3
    figures = played.episodes.figures.take()
    assert figures["episodes/repeated"] == 1.0 and "episodes/resumed" not in figures


async def test_an_environment_that_is_lost_before_any_turn_begins_anew(play: Play) -> None:
    played = await play(Environments([GONE], TWO_TURNS))
    assert [call.start.attempt for call in played.environments.calls] == [1, 2]
    assert played.episodes.figures.take()["episodes/repeated"] == 1.0


async def test_an_environment_that_is_always_lost_ends_the_run(play: Play) -> None:
    with pytest.raises(Exhausted, match="lost 3 times"):
        await play(Environments([Unavailable("it is gone")]))


async def test_a_failed_environment_is_no_reward_and_harms_no_sibling(play: Play) -> None:
    raised = Ended("error", {}, (), {}, "/env.py:12: division by zero", "in move")
    played = await play(Environments([asks("One?"), raised], TWO_TURNS), SLOTS)
    failed = next(one for one in played.samples.values() if one.played.total is None)
    (other,) = (one for one in played.samples.values() if one is not failed)
    assert failed.drop_reason is DropReason.ENVIRONMENT_ERROR and failed.episode.ending == "error"
    assert failed.outcome.report == "/env.py:12: division by zero\nin move" and failed.outcome.failed
    (verdict,) = failed.verdicts
    assert (verdict.reward, verdict.outcome, verdict.value) == ("environment", "error", None)
    assert "division by zero" in failed.episode.messages
    assert other.played.total == 1.0 and other.drop_reason is None


@pytest.mark.parametrize(
    "ended",
    [
        ends(a=float("nan")),
        ends(a=float("inf"), b=float("-inf")),
        ends(a=1e308, b=1e308),
        ends((1.0, 2.0)),
        ends((1.0,), turns=1.0),
    ],
    ids=["nan", "inf", "overflow", "more than turns", "name of the sum of turns"],
)
async def test_rewards_that_mean_nothing_are_a_failure(play: Play, ended: Ended) -> None:
    played = await play(Environments([asks("One?"), ended]))
    assert played.one.drop_reason is DropReason.ENVIRONMENT_ERROR


async def test_rewards_of_turns_and_of_the_end_are_added(play: Play) -> None:
    ended = ends((0.25, -1.0), a=1.0, b=0.5)
    played = await play(Environments([asks("One?"), asks("Two?"), ended]))
    assert played.one.played.total == 0.75 and played.one.episode.turn_rewards == (0.25, -1.0)
    assert played.one.played.verdicts[0].parts == {"a": 1.0, "b": 0.5, "turns": -0.75}


async def test_each_reward_of_a_turn_goes_to_the_trainer_with_the_place_where_its_turn_ends(
    play: Play,
) -> None:
    played = await play(Environments([asks("One?"), asks("Two?"), ends((0.25, -1.0), a=1.0)]))
    message = trainer_pb2.TrainGroup()
    fill(message, RolloutGroup("g", "", np.array([1], np.int32), [played.one]))
    turns = message.samples[0].turns
    assert [turn.reward for turn in turns] == [0.25, -1.0]
    trained = played.one.trained
    assert [bool(trained[turn.end - 1]) for turn in turns] == [True, True]
    assert not trained[turns[0].end] and turns[1].end == len(trained)


async def test_the_state_of_a_turn_goes_to_the_trainer_with_the_place_where_its_turn_ends(play: Play) -> None:
    script = [asks("One?", state=7), asks("Two?", state=-9), asks("Three?"), ends(a=1.0)]
    played = await play(Environments(script))
    message = trainer_pb2.TrainGroup()
    fill(message, RolloutGroup("g", "", np.array([1], np.int32), [played.one]))
    turns = message.samples[0].turns
    assert [(turn.state, turn.reward) for turn in turns] == [(7, 0.0), (-9, 0.0), (0, 0.0)]
    assert all(played.one.trained[turn.end - 1] for turn in turns)
    shown = [entry.get("state") for entry in json.loads(played.one.episode.messages) if "turn" in entry]
    assert shown == [f"{7:016x}", f"{2**64 - 9:016x}", None]


async def test_a_turn_without_tokens_ends_nowhere_and_the_others_keep_their_rewards(play: Play) -> None:
    script = [asks("One?", state=7), asks("Two?", state=7), asks("Three?", state=8), ends((0.5, -1.0, 0.25))]
    played = await play(Environments(script), silent={2})
    message = trainer_pb2.TrainGroup()
    fill(message, RolloutGroup("g", "", np.array([1], np.int32), [played.one]))
    turns = message.samples[0].turns
    assert [turn.end for turn in turns] == [turns[0].end, 0, len(played.one.trained)]
    assert [turn.reward for turn in turns] == [0.5, -1.0, 0.25] and played.one.played.total == -0.25


@pytest.mark.parametrize("silent", [{1}, {2}, {1, 2}])
async def test_a_sequence_without_tokens_is_no_branch_of_an_episode(play: Play, silent: set[int]) -> None:
    script = [asks("One?"), asks("In short: blue.", afresh=True), ends((0.5, 1.0))]
    played = await play(Environments(script), silent=silent)
    wrote = {1, 2} - silent
    assert len(played.one.episode.branches) == len(wrote)
    assert [end > 0 for end in played.one.episode.turn_ends] == [turn in wrote for turn in (1, 2)]
    assert (played.one.outcome is None) is bool(wrote), "nothing is trained of an episode without a token"


async def test_an_episode_without_rewards_or_states_of_turns_sends_no_turns(play: Play) -> None:
    played = await play(Environments([asks("One?"), asks("Two?"), ends(a=1.0)]))
    message = trainer_pb2.TrainGroup()
    fill(message, RolloutGroup("g", "", np.array([1], np.int32), [played.one]))
    assert played.one.episode.turn_ends == () and not message.samples[0].turns


async def test_turns_beyond_the_limit_are_refused_and_the_environment_judges_what_there_is(
    play: Play,
) -> None:
    played = await play(Environments([asks(f"{i}?") for i in range(9)]), max_turns=3)
    assert played.one.episode.turns == 3 and played.environments.calls[0].stopped == "max_turns"
    assert played.one.episode.ending == "max_turns" and played.one.played.total == 0.25
    assert played.one.truncated


async def test_an_episode_without_room_ends_with_the_turns_that_it_has(play: Play) -> None:
    played = await play(Environments([asks("One?"), asks("x" * 600), DONE]), episode_tokens=400)
    assert played.one.episode.ending == "no_room" and played.one.episode.turns == 1
    assert played.one.trained.all(), "no context follows the last turn"


async def test_an_episode_without_room_for_a_first_turn_is_a_failure(play: Play) -> None:
    played = await play(Environments([asks("x" * 600)]), episode_tokens=100)
    assert played.one.drop_reason is DropReason.ENVIRONMENT_ERROR and len(played.one.token_ids) == 0
    assert "no room for a first turn" in played.one.outcome.failure


async def test_a_turn_is_as_long_as_the_run_the_room_and_the_environment_allow(play: Play) -> None:
    script: Script = [asks("One?"), asks("Two?", max_tokens=2, stop=("\n",)), DONE]
    played = await play(Environments(script), says="blue sky blue sky", turn_tokens=5)
    first, second = (asked.sampling for asked in played.generator.asked)
    assert (first.max_tokens, [*first.stop]) == (5, []) and (second.max_tokens, [*second.stop]) == (2, ["\n"])
    assert [answer["cut"] for answer in played.environments.calls[0].answers] == [True, True]
    assert played.one.truncated


LATE = Ended("timeout", {}, (), {}, "the environment took longer than 1 s")


@pytest.mark.parametrize("scripts", [([asks("One?"), LATE],), ([asks("One?"), asks("Two?"), GONE], [LATE])])
async def test_an_episode_that_takes_too_long_is_dropped(play: Play, scripts: list[Script]) -> None:
    played = await play(Environments(*scripts))
    assert played.one.drop_reason is DropReason.ENVIRONMENT_TIMEOUT
    assert played.one.episode.ending == "timeout" and "longer than 1 s" in played.one.outcome.failure


@pytest.mark.parametrize("in_ledger", [True, False])
async def test_turns_of_samples_that_are_in_no_ledger_are_not_recorded(play: Play, in_ledger: bool) -> None:
    log = Mock()
    await play(Environments(TWO_TURNS), log=log, turns={} if in_ledger else None)
    assert log.take.call_count == (2 if in_ledger else 0)


async def test_worlds_that_are_gone_for_the_sake_of_others_cost_no_attempt(play: Play) -> None:
    gone = FailedPrecondition("the episode cannot go on in another worker")
    played = await play(Environments(*[[asks("One?"), gone]] * 7, TWO_TURNS))
    assert [call.start.attempt for call in played.environments.calls] == [*range(1, 9)]
    assert played.one.played.total == 1.0 and not played.lost
    assert played.episodes.figures.take()["episodes/repeated"] == 7.0


async def test_an_episode_whose_world_is_always_gone_ends_the_run(play: Play) -> None:
    gone = FailedPrecondition("the episode cannot go on in another worker")
    with pytest.raises(Exhausted, match=r"an episode began 100 times.*in another worker"):
        await play(Environments([gone]))


async def test_messages_that_the_template_refuses_fail_that_episode_alone(play: Play) -> None:
    odd: Script = [asks("Weather?", tools=[{"type": "function", "function": {"name": "weather"}}])]
    played = await play(Environments(odd, TWO_TURNS), SLOTS)
    outcomes = sorted(str(one.drop_reason) for one in played.samples.values())
    assert outcomes == ["None", "environment_error"]


async def test_a_cancelled_group_frees_all_its_environments(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    environments = Environments(TWO_TURNS)
    waiting = asyncio.Event()

    async def never(_self: Call) -> None:
        if environments.open == 2:
            waiting.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Call, "asked", never)
    task = asyncio.create_task(play(environments, SLOTS))
    await waiting.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert environments.open == 0


async def test_a_rewritten_history_is_a_branch_of_the_same_sample(play: Play, tokenizer: Tokenizer) -> None:
    played = await play(Environments([asks("One?"), asks("In short: blue.", afresh=True), DONE]))
    sample = played.one
    first, second = sample.episode.branches
    assert sample.trained.all() and (first.start, second.start) == (0, len(sample.token_ids) // 2)
    assert [(span.start, span.end) for span in sample.spans] == [
        (0, second.start),
        (second.start, 2 * second.start),
    ]
    assert "In short" in tokenizer.decode(second.prompt_token_ids.tolist())
    assert sample.nbytes > second.prompt_token_ids.nbytes + first.prompt_token_ids.nbytes
    assert played.episodes.figures.take()["episodes/branches_history"] == 1.0


async def test_figures_say_how_episodes_ended_and_where_time_went(play: Play) -> None:
    played = await play(Environments(TWO_TURNS, [asks("One?"), DONE]), SLOTS)
    figures = played.episodes.figures.take()
    assert figures["episodes/ended_completed"] == 2.0 and figures["episodes/turns_mean"] == 1.5
    assert figures["environment/moves"] == 2.0 and figures["episodes/policy_s_mean"] > 0
    assert 0 < figures["turns/coordinator_s_p50"] <= figures["turns/coordinator_s_p99"]
    assert played.episodes.figures.take() == {}


async def test_the_time_that_a_generator_had_a_turn_is_no_time_of_the_coordinator(play: Play) -> None:
    played = await play(Environments(TWO_TURNS), generator_s=1000.0)
    assert played.episodes.figures.take()["turns/coordinator_s_p99"] < -990


def test_the_time_of_an_environment_has_a_clock_of_its_own_only_where_it_ends_before_silence_does() -> None:
    time = OwnTime(100.0)
    time.begin()
    assert not time.count(0.0) and time.most_s is None
    time = OwnTime(SILENT_S - LATE_S - 1.0)
    time.begin()
    assert not time.count(0.0) and time.most_s is not None and time.most_s < SILENT_S


@pytest.mark.parametrize(("priority", "most"), [(0, BEGINNINGS), (EVALUATION, 64)])
async def test_few_episodes_of_a_step_begin_in_one_turn_of_the_event_loop_and_all_of_an_evaluation(
    play: Play, priority: int, most: int
) -> None:
    environments = Environments(TWO_TURNS)
    begun = [0]

    async def count() -> None:
        while True:
            await asyncio.sleep(0)
            begun.append(len(environments.calls))

    counting = asyncio.create_task(count())
    await play(environments, [f"run/0/0/{number}" for number in range(64)], priority=priority)
    counting.cancel()
    assert begun[-1] == 64
    assert max(after - before for before, after in pairwise(begun)) == most
