"""The table of built-in rewards, by the names that run files give them."""

from __future__ import annotations

from flotilla_reward.builtin import BuiltinReward, Exact, Format, Math, Numeric
from flotilla_reward.tasks import ReasoningGym
from flotilla_reward.verifiers.choice import Choice
from flotilla_reward.verifiers.code import Code
from flotilla_reward.verifiers.instructions import Instructions
from flotilla_reward.verifiers.lists import F1, ExactList
from flotilla_reward.verifiers.structured import JsonSchema
from flotilla_reward.verifiers.text import Length, Regex, Repetition

BUILTIN: dict[str, type[BuiltinReward]] = {
    "exact": Exact,
    "numeric": Numeric,
    "regex": Regex,
    "format": Format,
    "math": Math,
    "choice": Choice,
    "f1": F1,
    "exact_list": ExactList,
    "json_schema": JsonSchema,
    "length": Length,
    "repetition": Repetition,
    "instructions": Instructions,
    "code": Code,
    "reasoning_gym": ReasoningGym,
}
