"""The updates of a scene as the trainer makes them: the way of front and ranks, without a gang."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from flotilla_coordinator.trainers.spec import critic_warmup_steps, objective, value_objective
from flotilla_core.config import PolicyConfig, RunConfig
from flotilla_trainer.batch.packing import Layout, Sequences, pack
from flotilla_trainer.batch.update_batch import StepPlan, UpdateBatch
from flotilla_trainer.front.updates import score_squares
from flotilla_trainer.losses.divergence import full_divergence, teacher_divergence
from flotilla_trainer.objective.policy import PolicyObjective
from flotilla_trainer.objective.session_objective import session_objective
from flotilla_trainer.objective.value import ValueUpdate
from flotilla_trainer.rank.objective import Objective, rank_objective
from flotilla_trainer.rank.update import metrics_of_steps, objective_metrics
from flotilla_trainer.wire.objective import ObjectiveSettings
from option_pairs.made import Made
from option_pairs.scenes import SCENES, Drawn, chosen, part_of, read_batch, scores
from option_pairs.teachers import taught

SEED = 11
LAYOUT = Layout(budget=1000, ranks=1)
"""How an update is laid out changes nothing; that is tested elsewhere."""


def trained_update(config: RunConfig, number: int, updates: int) -> Made:
    """The first updates of a scene, by the path that the front and the ranks take."""
    algorithm = config.algorithm
    assert isinstance(algorithm, PolicyConfig)
    settings = ObjectiveSettings.from_wire(objective(config))
    front = session_objective(settings)
    assert isinstance(front, PolicyObjective)
    rank = rank_objective(settings)
    made = Made()
    for place, given in enumerate(SCENES[number][:updates]):
        groups = chosen(number, place, config.rollout.dynamic_sampling)
        part = part_of(number, place, groups)
        if place >= critic_warmup_steps(config):
            policy_update(front, rank, part, (number, place, groups), algorithm, made)
        if algorithm.critic is not None:
            asked = ObjectiveSettings.from_wire(value_objective(config))
            critic_update(
                asked, given.plan, part, read_batch(number, place, groups, has_reference=True), made
            )
    return made


def policy_update(
    front: PolicyObjective,
    rank: Any,
    part: Drawn,
    batch_of: tuple[int, int, tuple[int, ...]],
    algorithm: PolicyConfig,
    made: Made,
) -> None:
    batch = read_batch(*batch_of, has_reference=False)
    if front.scores_reference(batch):
        batch = read_batch(*batch_of, has_reference=True)
    asked = algorithm.asked_teachers
    if asked is not None and asked.teachers:
        batch = replace(batch, teacher_logprobs=taught(asked, part))
    if front.scores_distributions(batch):
        before = part.policies.steps[0]
        squares = torch.softmax(before, -1).square().sum(-1).numpy().astype(np.float32)
        batch = replace(batch, score_squares=score_squares(scores(part, before), squares))
    if algorithm.teacher is not None:
        # What a teacher answers who is asked for so many.
        top = np.s_[:, : algorithm.teacher.top_k]
        ids, logprobs = batch.teacher_top_token_ids, batch.teacher_top_logprobs
        assert ids is not None and logprobs is not None
        batch = replace(batch, teacher_top_token_ids=ids[top], teacher_top_logprobs=logprobs[top])
    policy = None
    if front.scores_policy(several_steps=part.plan.several):
        policy = scores(part, part.policies.steps[0])
    sequences, facts = front.sequences(batch, SEED, policy, part.plan.parts(batch))
    trained = np.flatnonzero(part.rollouts.trained)
    metrics = []
    for step, logits in zip(part.plan.steps(sequences, batch), part.policies.steps, strict=False):
        inside = np.isin(part.rollouts.sequence_of_token[trained], step.columns["sequences"])
        metrics.append(policy_step(rank, step, trained[inside], logits, part.policies.reference, made))
    if metrics:
        front.adapt(metrics_of_steps(metrics) | facts, len(batch.sample_ids))


def policy_step(
    rank: Objective,
    step: Sequences,
    scored: np.ndarray,
    logits: torch.Tensor,
    reference: torch.Tensor,
    made: Made,
) -> dict[str, float]:
    """One optimizer step on the scored tokens, as far as its gradient."""
    leaf = logits.clone().requires_grad_()
    sums: dict[str, float] = {}
    for micro in pack(step, LAYOUT)[0]:
        rows = torch.from_numpy(scored[micro.places])
        distribution = torch.log_softmax(leaf[rows], -1)
        logprobs = distribution.gather(-1, torch.from_numpy(micro.targets).long()[:, None])[:, 0]
        columns = {name: torch.from_numpy(values).double() for name, values in micro.columns.items()}
        if "kl_weights" in columns and "reference_logprobs" not in columns:
            columns["divergence"] = full_divergence(leaf[rows], reference[rows])
        if (teacher := rank.teacher(columns)) is not None:
            columns["teacher_divergence"] = teacher_divergence(leaf[rows], teacher)
        terms = rank(logprobs, -(distribution.exp() * distribution).sum(-1), columns)
        terms.loss.backward()
        for name, value in terms.sums.items():
            sums[name] = sums.get(name, 0.0) + value.item()
    assert leaf.grad is not None
    made.losses.append(sums["loss"])
    made.gradients.append(leaf.grad.numpy())
    return objective_metrics(sums, {}, set(sums))


def critic_update(
    wanted: ObjectiveSettings, plan: StepPlan, part: Drawn, batch: UpdateBatch, made: Made
) -> None:
    """The steps of the critic, as far as their gradients by its values."""
    front, rank = session_objective(wanted), rank_objective(wanted)
    assert isinstance(front, ValueUpdate)
    sequences, _ = front.sequences(batch, SEED, None, plan.parts(batch))
    rollouts, parts = part.rollouts, plan.parts(batch)
    for step, values, inside in zip(plan.steps(sequences, batch), part.policies.critic, parts, strict=False):
        scored = np.flatnonzero(rollouts.trained & inside)
        leaf = values.clone().requires_grad_()
        for micro in pack(step, LAYOUT)[0]:
            columns = {name: torch.from_numpy(column).double() for name, column in micro.columns.items()}
            terms = rank(leaf[torch.from_numpy(scored[micro.places])], columns)
            terms.loss.backward()
        assert leaf.grad is not None
        made.losses.append(terms.loss.item())
        made.gradients.append(leaf.grad.numpy())
