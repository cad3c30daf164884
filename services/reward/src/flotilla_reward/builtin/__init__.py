"""The rewards that come with the service, one small module each."""

from __future__ import annotations

from flotilla_reward.builtin.base import BuiltinReward
from flotilla_reward.builtin.exact import Exact
from flotilla_reward.builtin.format import Format
from flotilla_reward.builtin.math import Math
from flotilla_reward.builtin.numeric import Numeric
from flotilla_reward.builtin.regex import Regex

BUILTIN: dict[str, type[BuiltinReward]] = {
    "exact": Exact,
    "numeric": Numeric,
    "regex": Regex,
    "format": Format,
    "math": Math,
}

__all__ = ["BUILTIN", "BuiltinReward"]
