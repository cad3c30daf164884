"""Updates that options are meant for: sampled groups, and the policies that look at them.

Invariant: what goes over the wire in float32 is rounded to it here, so that both sides compute from the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch

from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_coordinator.ledger.records import Branch, Episode, TokenSpan
from flotilla_coordinator.rollouts.batch import RolloutGroup, RolloutSample
from flotilla_coordinator.trainers.messages import fill
from flotilla_core.config.data import DynamicSamplingConfig
from flotilla_core.roles import teacher_role
from flotilla_core.tensors import to_tensor
from flotilla_core.version import Version
from flotilla_testing.exact_update import Policies, Rollouts
from flotilla_trainer.batch.tokens import ModelLimits
from flotilla_trainer.batch.update_batch import StepPlan, UpdateBatch
from option_pairs.axes import LIMIT

VOCABULARY = 5
VERSION = Version(0, 3)
TEACHERS = ("math", "code")


@dataclass(frozen=True, eq=False)
class Drawn:
    """The groups that are drawn for one update, who looks at them, and in how many mini-batches it is made."""

    rollouts: Rollouts
    policies: Policies
    wanted: int
    plan: StepPlan

    def of_groups(self, groups: np.ndarray) -> Drawn:
        samples = np.isin(self.rollouts.group_of_sample, groups)
        tokens = samples[self.rollouts.sample_of_token]
        return replace(
            self, rollouts=self.rollouts.of_samples(samples), policies=self.policies.of_tokens(tokens)
        )


def drawn(rewards: list[list[float]], wanted: int, plan: StepPlan, seed: int) -> Drawn:
    """Groups of samples with these rewards; some of their tokens are old, some are context, some samples cut off.

    A history that was rewritten divides some of the samples into several sequences.
    """
    rng = np.random.default_rng(seed)
    sizes = [len(group) for group in rewards]
    samples = sum(sizes)
    lengths = rng.integers(1, LIMIT + 1, samples)
    count = int(lengths.sum())
    starts = np.cumsum(lengths) - lengths
    trained = rng.random(count) < 0.8
    trained[starts[rng.random(samples) < 0.9]] = True
    sampled = torch.from_numpy(1.2 * rng.normal(size=(count, VOCABULARY)))

    def moved(distance: float) -> torch.Tensor:
        return sampled + torch.from_numpy(distance * rng.normal(size=(count, VOCABULARY)))

    weights = np.exp(torch.log_softmax(sampled, -1).numpy())
    tokens = np.array([rng.choice(VOCABULARY, p=row / row.sum()) for row in weights])
    own = torch.log_softmax(sampled, -1).numpy()[np.arange(count), tokens]
    total = np.array([reward for group in rewards for reward in group])
    bonus = rng.integers(0, 3, samples) / 2
    before = moved(0.4)
    steps = [before, before + torch.from_numpy(0.7 * rng.normal(size=(count, VOCABULARY)))]
    values = rng.normal(size=count)
    # Other numbers than the rest, so that these stay as they were.
    named = np.random.default_rng(seed + 1000)
    branches = np.random.default_rng(seed + 3000).random(count) < 0.15
    branches[starts] = False
    teacher = torch.log_softmax(
        sampled + torch.from_numpy(np.random.default_rng(seed + 2000).normal(0, 0.8, sampled.shape)), -1
    ).sort(-1, descending=True)
    return Drawn(
        rollouts=Rollouts(
            group_of_sample=np.repeat(np.arange(len(sizes)), sizes),
            sample_of_token=np.repeat(np.arange(samples), lengths),
            tokens=tokens,
            trained=trained,
            branches=branches,
            staleness=np.concatenate([np.where(np.arange(n) < n // 2, n % 3, 0) for n in lengths]),
            rollout_logprobs=single(own),
            teacher_logprobs=single(own + rng.normal(0, 0.7, count)),
            named_teachers={name: single(own + named.normal(0, 0.7, count)) for name in TEACHERS},
            teacher_of_group=np.array([TEACHERS[group % 2] for group in range(len(sizes))]),
            teacher_ids=teacher.indices.numpy(),
            teacher_id_logprobs=single(teacher.values.numpy()),
            values=single(values),
            values_after=single(rng.normal(size=samples)),
            truncated=rng.random(samples) < 0.4,
            rewards=total,
            turn_rewards=rewards_of_turns(trained, branches, starts, seed),
            turn_states=states_of_turns(trained, branches, starts, seed),
            terms=np.stack([total - 0.5 * bonus, bonus], axis=1),
            greedy_rewards=rng.integers(0, 3, len(sizes)) / 2,
        ),
        policies=Policies(
            steps=steps,
            reference=moved(0.5),
            critic=[
                torch.from_numpy(single(values)),
                torch.from_numpy(single(values + rng.normal(0, 0.3, count))),
            ],
        ),
        wanted=wanted,
        plan=plan,
    )


def rewards_of_turns(trained: np.ndarray, branches: np.ndarray, starts: np.ndarray, seed: int) -> np.ndarray:
    """What the environment gave for most of the turns, each at the last token of its turn."""
    rng = np.random.default_rng(seed + 4000)
    given = rng.integers(-2, 3, len(trained)) / 4
    rewarded: np.ndarray = np.where(
        ends_of_turns(trained, branches, starts) & (rng.random(len(trained)) < 0.7), given, 0.0
    )
    return rewarded


def states_of_turns(trained: np.ndarray, branches: np.ndarray, starts: np.ndarray, seed: int) -> np.ndarray:
    """In which of two states each turn was asked, at its last token; 0 where it has no name."""
    drawn = np.random.default_rng(seed + 5000).integers(0, 5, len(trained))
    states: np.ndarray = np.where(ends_of_turns(trained, branches, starts), (drawn + 1) // 2, 0)
    return states


def ends_of_turns(trained: np.ndarray, branches: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Which tokens are the last ones of turns."""
    goes_on = np.append(trained[1:] & ~branches[1:], False)
    goes_on[starts[1:] - 1] = False
    ends: np.ndarray = trained & ~goes_on
    return ends


def single(numbers: np.ndarray) -> np.ndarray:
    """What is left of them on the wire, which has float32."""
    return numbers.astype(np.float32).astype(np.float64)


GROUPS = [
    [0.0, 1.0, 1.5, 0.25, 0.5, 0.0],
    [0.0, 0.0, 0.0],
    [1.0, 0.5],
    [1.0, 1.0, 1.0],
    [0.0, 0.0, 1.0, 0.5],
    [1.25],
    [0.75, 1.25, 1.0],
    [1.0, 0.0],
]
"""Rewards of groups that are right, wrong, uneven, of one sample, and equal in the sum though not in its terms."""
MORE_GROUPS = [[1.0, 0.0, 0.5], [0.75, 0.75], [1.0, 1.25], [0.0, 1.0]]


def scene(seed: int, less: float) -> list[Drawn]:
    """Two updates, the first in two steps; every reward is smaller by `less`."""
    return [
        drawn(
            [[reward - less for reward in group] for group in groups],
            wanted,
            StepPlan(mini_batches),
            seed + place,
        )
        for place, (groups, wanted, mini_batches) in enumerate([(GROUPS, 7, 2), (MORE_GROUPS, 4, 1)])
    ]


SCENES = [scene(3, 0.0), scene(17, 0.7), scene(29, 0.0), scene(41, 0.5), scene(53, 0.3), scene(67, 0.6)]
"""The first is compared with the formulas; where an option changes nothing in one scene, the next one is looked at."""


@cache
def part_of(number: int, place: int, groups: tuple[int, ...]) -> Drawn:
    """Some groups of an update of a scene."""
    return SCENES[number][place].of_groups(np.array(groups))


@cache
def chosen(number: int, place: int, dynamic: DynamicSamplingConfig | None) -> tuple[int, ...]:
    """The groups that make up the update, with those in the place of others that dynamic sampling leaves out."""
    given = SCENES[number][place]
    if dynamic is None:
        return tuple(range(given.wanted))
    groups = whole_groups(given)[: dynamic.max_prompts_per_step]
    teaching = [place for place, group in enumerate(groups) if not group.uniform]
    return tuple(teaching[: given.wanted])


def whole_groups(given: Drawn) -> list[RolloutGroup]:
    """As the coordinator holds them."""
    rollouts, groups = given.rollouts, []
    for number, members in enumerate(rollouts.members):
        group = RolloutGroup(f"g{number}", "", np.array([1, 2], np.int32), [])
        for sample in members.tolist():
            own = rollouts.sample_of_token == sample
            ages = rollouts.staleness[own]
            group.samples.append(
                RolloutSample(
                    sample_id=f"g{number}/{sample}",
                    token_ids=rollouts.tokens[own].astype(np.int32),
                    logprobs=rollouts.rollout_logprobs[own].astype(np.float32),
                    text="",
                    spans=tuple(
                        TokenSpan(Version(VERSION.lineage, VERSION.step - age), place, place + 1)
                        for place, age in enumerate(ages.tolist())
                    ),
                    reward=float(rollouts.rewards[sample]),
                    reward_terms=tuple(rollouts.terms[sample].tolist()),
                    greedy_reward=float(rollouts.greedy_rewards[number]),
                    values=rollouts.values[own].astype(np.float32),
                    value_after=float(rollouts.values_after[sample]),
                    truncated=bool(rollouts.truncated[sample]),
                    teacher_logprobs=rollouts.teacher_logprobs[own].astype(np.float32),
                    teacher_top_token_ids=rollouts.teacher_ids[own].astype(np.int32),
                    teacher_top_logprobs=rollouts.teacher_id_logprobs[own].astype(np.float32),
                    episode=episode_of(
                        rollouts.branches[own], rollouts.turn_rewards[own], rollouts.turn_states[own]
                    ),
                )
            )
        group.teacher = teacher_role(str(rollouts.teacher_of_group[number]))
        groups.append(group)
    return groups


def episode_of(begins: np.ndarray, turn_rewards: np.ndarray, turn_states: np.ndarray) -> Episode | None:
    """Return what a sample of several sequences, or with rewards or states of turns has in addition."""
    ends = np.flatnonzero((turn_rewards != 0) | (turn_states != 0)) + 1
    rewards, states = (tuple(column[ends - 1].tolist()) for column in (turn_rewards, turn_states))
    starts = [0, *np.flatnonzero(begins).tolist()]
    branches = tuple(Branch(start, np.array([2, start % VOCABULARY], np.int32)) for start in starts)
    if len(starts) == 1 and not rewards:
        return None
    # What the policy sees of a sample of one sequence is the prompt of its group.
    branches = branches if len(starts) > 1 else ()
    return Episode("completed", len(starts), rewards, "[]", branches, tuple(ends.tolist()), states)


@cache
def read_batch(number: int, place: int, groups: tuple[int, ...], *, has_reference: bool) -> UpdateBatch:
    """The batch of these groups as the front reads it, whatever the objective is."""
    part = part_of(number, place, groups)
    messages = []
    for group in whole_groups(part):
        message = pb.TrainGroup()
        fill(message, group)
        messages.append(message)
    rollouts = part.rollouts
    sent = [sample for message in messages for sample in message.samples]
    for index, sample in enumerate(sent):
        sample.mask.CopyFrom(to_tensor(rollouts.trained[rollouts.sample_of_token == index]))
    batch = UpdateBatch.read(messages, ModelLimits(VOCABULARY, 0), VERSION)
    return (
        replace(batch, reference_logprobs=scores(part, part.policies.reference)) if has_reference else batch
    )


def scores(part: Drawn, logits: torch.Tensor) -> np.ndarray:
    """What ranks answer that are asked for the log-probabilities of all response tokens."""
    tokens = part.rollouts.tokens
    scored: np.ndarray = torch.log_softmax(logits, -1).numpy()[np.arange(len(tokens)), tokens]
    return scored.astype(np.float32)
