"""Plays episodes: the policy's turns, and between them what an environment says, until it ends the episode.

Invariants: a sample is one whole episode, or a failure with its reason that never counts as a reward. Where a generator
is lost, the turn is generated again, and the environment does not notice. Where an environment is lost, or the
coordinator was, the turns so far are played again from the start: the episode goes on where the environment says the
same again. Else it begins anew under the next attempt, and nothing of the one before is trained. The turns and tokens
of an episode and the seconds of its environment are bounded, whatever it asks for.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import numpy as np

from flotilla_coordinator.data.renders import Renders
from flotilla_coordinator.ledger.records import Branch, Episode, TokenSpan
from flotilla_coordinator.ledger.verdicts import Said, TermVerdict
from flotilla_coordinator.rollouts.batch import RolloutSample
from flotilla_coordinator.rollouts.environments import TIMEOUT, EpisodeCall, EpisodeStart
from flotilla_coordinator.rollouts.episode_messages import Asked, Ended, WrittenTokens
from flotilla_coordinator.rollouts.generation import GenerationRequest, Sampler
from flotilla_coordinator.rollouts.played_turns import PlayedTurns, SaysOtherwiseError, TurnLog
from flotilla_coordinator.rollouts.scoring import Outcome
from flotilla_coordinator.rollouts.transcript import TokenSequence, Transcript
from flotilla_core import ids
from flotilla_core.config import LARGEST_REWARD, EnvironmentConfig
from flotilla_core.errors import (
    DeadlineExceeded,
    Exhausted,
    FailedPrecondition,
    FlotillaError,
    InvalidConfig,
    Unavailable,
)
from flotilla_data.tokenizer import Tokenizer

T = TypeVar("T")


class Environments(Protocol):
    """Begins episodes of one environment."""

    def begin(self, start: EpisodeStart) -> AbstractAsyncContextManager[EpisodeCall]:
        """Begin an episode; what it holds is freed at the exit."""
        ...


ENVIRONMENT = "environment"
"""The name of its verdict among those of the rewards."""
SUM_OF_TURNS = "turns"
"""The part of that verdict that is the sum of the rewards of turns."""
COMPLETED = "completed"
MAX_TURNS, NO_ROOM, ERROR = "max_turns", "no_room", "error"
"""Endings of episodes that their environment did not end by itself, as TIMEOUT."""
BEGINNINGS = 32
"""Episodes that begin in one turn of the event loop. Hundreds begin with a step, and all others would wait for them.
With few at once their turns come one by one, and each message costs as much as one of many.
"""
MOST_BEGINNINGS = 100
"""The most beginnings of one episode: where its worlds are gone for the sake of others, which have ended by then."""


class _Lost(Exception):
    """The environment of an episode is gone, with its world."""

    def __init__(self, error: FlotillaError) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass
class _Play:
    """One attempt at an episode."""

    sample_id: str
    request: GenerationRequest
    attempt: int
    transcript: Transcript
    past: PlayedTurns
    """The turns so far, of which the first ones are played again."""
    to_repeat: int
    """The number of these."""
    last: RolloutSample | None = None
    """The last turn."""
    instance_ids: set[str] = field(default_factory=set)
    states: list[int] = field(default_factory=list)
    """The key of the state of each turn, 0 where it has no name."""
    again: bool = False
    """True where a turn was generated more than once."""
    policy_s: float = 0.0
    beside_s: list[float] = field(default_factory=list)
    """The time of each turn that neither the environment nor a generator had."""
    began_at: float = field(default_factory=time.monotonic)

    def take(self, piece: RolloutSample, state: int) -> None:
        """Take the next turn of the policy, and the key of the state in which it was asked."""
        self.last = piece
        self.states.append(state)
        self.instance_ids |= piece.instance_ids
        self.again |= piece.attempt > 0

    def sample(self, ended: Ended) -> RolloutSample:
        """Return the whole episode, with the rewards that its environment gave or the reason why there are none."""
        # Turns without tokens may be all of a sequence: nothing of it can be trained.
        all_of_them = self.transcript.sequences
        sequences = [one for one in all_of_them if one.token_ids.size]
        if not sequences and not ended.failure:
            why = "its environment ended the episode before it; see its begin() or reply()"
            if ended.ending == NO_ROOM:
                why = "there is no room for a first turn: raise environment.episode_tokens, or shorten the prompt"
            ended = replace(ended, failure=f"the policy wrote nothing: {why}")
        played = _outcome(ended, self.transcript.turns)
        ending = ERROR if played.total is None and ended.ending != TIMEOUT else ended.ending
        record = [*self.transcript.record, _last_entry(ending, ended, played)]
        starts = np.cumsum([0, *(len(one.token_ids) for one in sequences)]).tolist()
        last, states = self.last, tuple(self.states) if any(self.states) else ()
        return RolloutSample(
            sample_id=self.sample_id,
            token_ids=_joined([one.token_ids for one in sequences], np.int32),
            logprobs=_joined([one.logprobs for one in sequences], np.float32),
            text="" if last is None else last.text,
            spans=tuple(
                TokenSpan(span.version, start + span.start, start + span.end)
                for start, one in zip(starts, sequences, strict=False)
                for span in one.spans
            ),
            truncated=ending in (MAX_TURNS, NO_ROOM) or (last is not None and last.truncated),
            generator="" if last is None else last.generator,
            attempt=max(self.attempt, int(self.again)),
            trained=_joined([one.trained for one in sequences], np.bool_),
            instance_ids=frozenset(self.instance_ids),
            outcome=played if played.total is None else None,
            played=played,
            verdicts=played.verdicts,
            episode=Episode(
                ending=ending,
                turns=self.transcript.turns,
                turn_rewards=ended.turn_rewards,
                messages=json.dumps(record, ensure_ascii=False, separators=(",", ":")),
                branches=tuple(
                    Branch(start, one.prompt_token_ids) for start, one in zip(starts, sequences, strict=False)
                ),
                turn_ends=_turn_ends(starts, sequences, all_of_them) if ended.turn_rewards or states else (),
                turn_states=states,
            ),
        )


def _joined(columns: list[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    joined: np.ndarray = np.concatenate([*columns, np.empty(0, dtype)])
    return joined


def _turn_ends(
    starts: list[int], sequences: list[TokenSequence], all_of_them: list[TokenSequence]
) -> tuple[int, ...]:
    """Return the place after each turn among the tokens of all sequences, turn by turn; 0 for one without tokens."""
    ends = {turn: 0 for one in all_of_them for turn in one.turn_ends} | {
        turn: start + end if end else 0
        for start, one in zip(starts, sequences, strict=False)
        for turn, end in one.turn_ends.items()
    }
    return tuple(ends[turn] for turn in sorted(ends))


def _last_entry(ending: str, ended: Ended, played: Outcome) -> dict[str, Any]:
    """Return the end of an episode, as its conversation shows it."""
    entry = {"ended": ending, "rewards": ended.rewards, "turn_rewards": ended.turn_rewards}
    return {name: value for name, value in (entry | {"failure": played.failure}).items() if value}


class EpisodeFigures:
    """Counts what became of episodes."""

    def __init__(self) -> None:
        self._sums: Counter[str] = Counter()
        self._of_environment: defaultdict[str, list[float]] = defaultdict(list)
        self._counts: Counter[str] = Counter()
        self._seconds = np.zeros(2)
        """Of the policy and of the environment."""
        self._beside_s: list[float] = []

    def repeated(self) -> None:
        """Count an episode that began anew."""
        self._counts["episodes/repeated"] += 1

    def resumed(self, turns: int) -> None:
        """Count an episode that went on after turns that were played again."""
        self._counts["episodes/resumed"] += 1
        self._counts["episodes/resumed_turns"] += turns

    def ended(self, play: _Play, sample: RolloutSample, metrics: dict[str, float]) -> None:
        """Count one whole episode."""
        assert sample.episode is not None
        self._counts[f"episodes/ended_{sample.episode.ending}"] += 1
        self._counts["episodes/unparsed_turns"] += play.transcript.unparsed
        for reason, count in play.transcript.branches.items():
            self._counts[f"episodes/branches_{reason}"] += count
        self._sums["turns"] += sample.episode.turns
        seconds = time.monotonic() - play.began_at
        self._seconds += np.array([play.policy_s, seconds - play.policy_s])
        self._sums["episodes"] += 1
        self._beside_s += play.beside_s
        for name, value in metrics.items():
            self._of_environment[name].append(value)

    def take(self) -> dict[str, float]:
        """Return the figures since the last call."""
        sums, counts, own = self._sums, self._counts, self._of_environment
        self._sums, self._counts, self._of_environment = Counter(), Counter(), defaultdict(list)
        figures = {name: float(count) for name, count in counts.items()}
        if sums["episodes"]:
            policy_s, environment_s = (self._seconds / sums["episodes"]).tolist()
            figures |= {
                "episodes/turns_mean": sums["turns"] / sums["episodes"],
                "episodes/policy_s_mean": policy_s,
                "episodes/environment_s_mean": environment_s,
            }
        if self._beside_s:
            p50, p99 = np.percentile(self._beside_s, [50, 99]).tolist()
            figures |= {"turns/coordinator_s_p50": p50, "turns/coordinator_s_p99": p99}
        self._seconds, self._beside_s = np.zeros(2), []
        return figures | {f"environment/{name}": float(np.mean(values)) for name, values in own.items()}


class Episodes:
    """A `Sampler` whose samples are episodes of several turns."""

    def __init__(
        self,
        run_seed: int,
        config: EnvironmentConfig,
        tokenizer: Tokenizer,
        *,
        turns: Sampler,
        environments: Environments,
        lost: Callable[[tuple[str, ...], FlotillaError], None],
        log: TurnLog | None = None,
        went_on: Callable[[], None] = lambda: None,
    ) -> None:
        """`turns` makes single responses; `lost` is told of episodes that are played again; `log` records turns.

        `went_on` is told of an episode that went on after its turns so far.
        """
        self._run_seed = run_seed
        self._config = config
        self._tokenizer = tokenizer
        self._turns = turns
        self._environments = environments
        self._lost = lost
        self._log = log
        self._went_on = went_on
        self._render = Renders(tokenizer)
        self._beginnings = asyncio.Semaphore(BEGINNINGS)
        self.figures = EpisodeFigures()

    async def samples(self, request: GenerationRequest) -> AsyncGenerator[RolloutSample]:
        """Yield each episode as it ends; raise Exhausted where one has no attempts left."""
        tasks = [
            asyncio.create_task(self._whole(sample_id, request), name=f"episode {sample_id}")
            for sample_id in request.sample_ids
        ]
        try:
            for ended in asyncio.as_completed(tasks):
                yield await ended
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _whole(self, sample_id: str, request: GenerationRequest) -> RolloutSample:
        """Play an episode, as often as its environment is lost."""
        if request.priority >= 0:  # A whole step waits for those of an evaluation.
            async with self._beginnings:
                await asyncio.sleep(0)
        cause: FlotillaError | None = None
        if request.turns is None:
            past = PlayedTurns(sample_id, (), None)
        else:
            past = PlayedTurns(sample_id, request.turns.get(sample_id, ()), self._log)
        losses = 0
        gone: BaseException | None = None
        while losses < request.max_attempts and past.attempt < MOST_BEGINNINGS:
            play = self._play(request, past)
            try:
                ended = await self._played(play)
                if play.transcript.turns < play.to_repeat and ended.ending != TIMEOUT:
                    raise SaysOtherwiseError
            except SaysOtherwiseError as otherwise:
                gone = otherwise.__cause__
                self._begin_anew(past)
                continue
            except _Lost as lost:
                cause = lost.error
                losses += 1
                if not past.played:
                    self._begin_anew(past)
                self._lost((sample_id,), cause)
                continue
            if play.to_repeat:
                self.figures.resumed(play.to_repeat)
                self._went_on()
            sample = play.sample(ended)
            self.figures.ended(play, sample, ended.metrics)
            return sample
        too_often = losses < request.max_attempts
        began, lost_so = f"an episode began {past.attempt} times", f"was lost {losses} times"
        raise Exhausted(
            began if too_often else f"the environment of an episode {lost_so}",
            where=sample_id,
            why=str(gone or "its environment did not say the same again") if too_often else str(cause),
            next_step="see `flotilla logs environment`",
        )

    def _play(self, request: GenerationRequest, past: PlayedTurns) -> _Play:
        transcript = Transcript(self._tokenizer, self._render, self._config.episode_tokens)
        return _Play(past.sample_id, request, past.attempt, transcript, past, len(past.played))

    def _begin_anew(self, past: PlayedTurns) -> None:
        past.begin_anew()
        self.figures.repeated()

    async def _played(self, play: _Play) -> Ended:
        """Return the end of an episode."""
        prompt = play.request.prompt
        assert prompt is not None, "a request for episodes has its row"
        start = EpisodeStart(
            episode_id=play.sample_id,
            attempt=play.attempt + 1,
            messages=prompt.chat or [{"role": "user", "content": prompt.prompt_text}],
            answer=prompt.answer,
            info=prompt.info,
            seed=ids.derive_seed(self._run_seed, ENVIRONMENT, play.request.world),
        )
        async with AsyncExitStack() as stack:
            call = await _of_environment(stack.enter_async_context(self._environments.begin(start)))
            while (asked := await _of_environment(call.asked())) is not None:
                over = await self._turn(play, call, asked)
                if isinstance(over, Ended):
                    return over
                if over is not None:
                    return await _of_environment(call.stop(over))
            if call.ended is None:
                raise _Lost(Unavailable("the environment ended an episode without a word"))
            return call.ended

    async def _turn(self, play: _Play, call: EpisodeCall, asked: Asked) -> str | Ended | None:
        """Let the policy write one turn; return why there is none, or how the episode ended without one."""
        transcript, own = play.transcript, play.request.sampling
        asked_at = time.monotonic()
        if transcript.turns >= self._config.max_turns:
            return MAX_TURNS
        try:
            room = await transcript.hear(
                asked.messages, asked.tools or None, afresh=asked.afresh, thread=asked.thread
            )
        except (InvalidConfig, FailedPrecondition) as refused:  # the template does not take what was said
            return _failed(ERROR, refused)
        if room < 1:
            return NO_ROOM
        recorded = play.past.again(transcript.turns, asked.digest)
        piece = recorded or await self._written(play, asked, room)
        if recorded is None:
            play.past.add(asked.digest, piece)
        play.take(piece, asked.state)
        written = transcript.wrote(piece, asked.thread, state=asked.state, shown=own.shown)
        if transcript.turns == play.to_repeat:
            transcript.record.append({"resumed": transcript.turns})
        tokens = len(piece.token_ids)
        await call.written(
            written.message,
            cut=piece.truncated,
            tokens=tokens,
            tokens_left=max(room - tokens, 0),
            prompt_tokens=self._config.episode_tokens - room,
            unparsed=written.unparsed,
            one_by_one=self._one_by_one(piece) if asked.tokens else None,
        )
        if recorded is None:
            play.beside_s.append(time.monotonic() - asked_at - piece.generator_s)
        return None

    def _one_by_one(self, piece: RolloutSample) -> WrittenTokens:
        """Return the tokens of a turn, as whoever asked for them reads them."""
        token_ids = piece.token_ids.astype(np.int32, copy=False)
        assert piece.logprobs is not None, "the policy sampled it"
        texts = self._tokenizer.bytes_of(token_ids.tolist())
        return WrittenTokens(token_ids, piece.logprobs.astype(np.float32, copy=False), texts)

    async def _written(self, play: _Play, asked: Asked, room: int) -> RolloutSample:
        """Return what the policy writes now, in a turn as long as the run, the room and the environment allow."""
        transcript, own = play.transcript, play.request.sampling
        most = min(own.max_response_tokens, room, asked.max_tokens or room)
        limits = {
            "max_response_tokens": most,
            # A text that ends a turn may come earlier.
            "min_response_tokens": 0 if asked.stop else min(own.min_response_tokens, most),
            "stop": (*own.stop, *asked.stop),
        }
        request = replace(
            play.request,
            prompt_token_ids=transcript.prompt(asked.thread),
            sample_ids=(f"{play.sample_id}/{transcript.turns}",),
            sampling=own.model_copy(update=limits),
            gather_s=0.0,
            conversation=play.sample_id,
        )
        began = time.monotonic()
        try:
            async with aclosing(self._turns.samples(request)) as samples:
                (piece,) = [sample async for sample in samples]
        finally:
            play.policy_s += time.monotonic() - began
        return piece


async def _of_environment(said: Awaitable[T]) -> T:
    """Return what an environment says; raise _Lost where it is gone, which a generator's loss is not."""
    try:
        return await said
    except FailedPrecondition as gone:
        raise SaysOtherwiseError from gone
    except (Unavailable, DeadlineExceeded) as error:
        raise _Lost(error) from error


def _failed(ending: str, why: FlotillaError) -> Ended:
    return Ended(ending, {}, (), {}, failure=str(why))


def _outcome(ended: Ended, turns: int) -> Outcome:
    """Return what the rewards of an environment are worth together, or why they are worth nothing."""
    given = dict(ended.rewards)
    if ended.turn_rewards:
        given[SUM_OF_TURNS] = sum(ended.turn_rewards)
    total = sum(given.values())
    failure = ended.failure
    if not failure and SUM_OF_TURNS in ended.rewards:
        failure = f"the environment names a reward {SUM_OF_TURNS}, which is the sum of the rewards of turns"
    if not failure and ended.ending not in (COMPLETED, MAX_TURNS, NO_ROOM):
        failure = f"the environment ended with {ended.ending}"
    if not failure and len(ended.turn_rewards) not in (0, turns):
        failure = f"the environment gave {len(ended.turn_rewards)} rewards for {turns} turns"
    if not failure and not abs(total) <= LARGEST_REWARD:
        failure = f"the rewards of the environment add up to {total}"
    if not failure:
        return Outcome(total, verdicts=(TermVerdict(ENVIRONMENT, Said.SCORED, total, given),))
    said = Said.TIMEOUT if ended.ending == TIMEOUT else Said.ERROR
    verdict = TermVerdict(ENVIRONMENT, said, message=failure)
    return Outcome(
        None, failure, timed_out=said is Said.TIMEOUT, verdicts=(verdict,), traceback=ended.traceback
    )
