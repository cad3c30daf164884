"""Describes the algorithm of a run, with every preset resolved, as lines of its plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flotilla_coordinator.plan.lines import Line
from flotilla_core.config import AlgorithmConfig, DpoConfig, PolicyConfig, RewardModelConfig
from flotilla_core.config.algorithm import CorrectionConfig, KlConfig, RejectionConfig
from flotilla_core.config.losses import GspoLoss
from flotilla_core.config.roles import TeacherConfig


def algorithm_lines(algorithm: AlgorithmConfig) -> Iterator[Line]:
    """Describe each section of the algorithm in one line; a section that is off has none."""
    if algorithm.type == "sft":
        yield "algorithm", "sft", "cross-entropy of the answers, mean over all tokens of the update"
        return
    if isinstance(algorithm, RewardModelConfig):
        center = algorithm.center_coefficient
        centred = f"; {center:g} x the squared sum of both rewards keeps them around zero" if center else ""
        yield (
            "algorithm",
            algorithm.type,
            f"a head of one number learns by pairs to give the preferred answer the higher one{centred}",
        )
        return
    if isinstance(algorithm, DpoConfig):
        reference = "nothing" if algorithm.reference_free else "the first policy"
        shown = {"beta": algorithm.beta, "label_smoothing": algorithm.label_smoothing or None}
        yield (
            "algorithm",
            algorithm.type,
            f"{algorithm.loss} of pairs, compared with {reference}; {_settings(shown)}",
        )
        return
    control = ", control: rewards are shuffled" if algorithm.shuffle_rewards else ""
    yield "algorithm", algorithm.type, f"a preset; docs/algorithms.md has the formulas{control}"
    shared = {key: value for key, value in algorithm.advantage if key not in algorithm.advantage.arguments}
    switched_on = {key: value for key, value in shared.items() if value and key not in ("type", "parameters")}
    yield (
        "advantage",
        algorithm.advantage.type,
        _settings(algorithm.advantage.arguments | switched_on),
    )
    bonus = {"entropy_coefficient": algorithm.entropy_coefficient} if algorithm.entropy_coefficient else {}
    yield "loss", algorithm.loss.type, _settings(algorithm.loss.arguments | bonus)
    constant = algorithm.aggregation.constant_tokens or "rollout.sampling.max_response_tokens"
    yield (
        "aggregation",
        algorithm.aggregation.type,
        f"over {constant}" if algorithm.aggregation.type == "constant" else "counted over the whole update",
    )
    yield from _correction(algorithm.correction)
    yield from _divergence(algorithm.kl)
    if algorithm.teacher is not None:
        yield _taught(algorithm.teacher)


def algorithm_warnings(algorithm: AlgorithmConfig) -> Iterator[str]:
    """Warn of settings that would run, but teach badly."""
    if not isinstance(algorithm, PolicyConfig):
        return
    loss, kl = algorithm.loss, algorithm.kl
    if isinstance(loss, GspoLoss) and algorithm.correction.proximal == "rollout":
        yield (
            "algorithm.loss gspo clips ratios beyond "
            f"1 - {loss.clip_low:g} and 1 + {loss.clip_high:g}, and with "
            "algorithm.correction.proximal rollout they hold what generator and trainer compute differently, which is "
            "more than that on most GPUs: set it to trainer"
        )
    if kl.placement == "loss" and kl.estimator == "k1":
        yield (
            "algorithm.kl.estimator k1 with algorithm.kl.placement loss adds noise and holds nothing back, for the "
            "gradient of log p - log q is that of log p, which is zero on average: set the estimator to k2, k3 or "
            "full, or the placement to reward"
        )


def _correction(correction: CorrectionConfig) -> Iterator[Line]:
    usual = CorrectionConfig()
    changed = {key: value for key, value in correction if value != getattr(usual, key)}
    if changed:
        yield "correction", correction.importance, _settings(changed)


def _divergence(kl: KlConfig) -> Iterator[Line]:
    if kl.placement != "none":
        adaptive = "" if kl.target is None else f", adapts to {kl.target:g} a token"
        yield (
            "divergence",
            f"in the {kl.placement}",
            f"{kl.estimator} from the first policy, coefficient {kl.coefficient:g}{adaptive}",
        )


def _taught(teacher: TeacherConfig) -> Line:
    others = ", all others as one more" if teacher.tail else ""
    by = "" if teacher.teacher_field is None else f" by {teacher.teacher_field}"
    asked = f"; asked: {' and '.join(teacher.teachers)}{by}" if teacher.teachers else ""
    return (
        "teacher",
        "in the loss",
        f"{teacher.divergence} divergence over its {teacher.top_k} likeliest tokens{others}, coefficient "
        f"{teacher.coefficient:g}{asked}",
    )


def _settings(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {_shown(value)}" for name, value in values.items() if value is not None)


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return " and ".join(_shown(item) for item in value)
    if isinstance(value, dict):
        return " and ".join(f"{name} {_shown(item)}" for name, item in value.items())
    if isinstance(value, RejectionConfig):
        low = "" if value.low is None else f" below {value.low:g}"
        high = "" if value.high is None else f" above {value.high:g}"
        return f"of {value.measure} over {value.over}{low}{' or' if low and high else ''}{high}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)
