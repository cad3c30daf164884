"""What may be wrong with an option, alone or beside another."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from flotilla_coordinator.trainers.spec import critic_warmup_steps
from flotilla_core.config import PolicyConfig, RunConfig, load_text
from flotilla_core.errors import InvalidConfig
from flotilla_testing.option_axes import Choice, Settings
from option_pairs.axes import ASKED_FOR_BY, makes_no_sense, run_of, together, without
from option_pairs.expected import expected_update
from option_pairs.made import Made, distance
from option_pairs.scenes import SCENES
from option_pairs.trained import trained_update

TOLERANCE = 1e-6


def updates_of(config: RunConfig) -> int:
    """Two where the first one leaves something to the second, else one."""
    algorithm = config.algorithm
    assert isinstance(algorithm, PolicyConfig)
    normalization = algorithm.advantage.reward_normalization
    remembers = (
        algorithm.kl.target is not None
        or algorithm.advantage.arguments.get("baseline") == "running"
        or (normalization is not None and normalization.remembers)
        or critic_warmup_steps(config) > 0
    )
    return 2 if remembers else 1


class Tried:
    """Configurations and what the trainer made of them, each once."""

    def __init__(self) -> None:
        self._configs: dict[str, RunConfig | None] = {}
        self._made: dict[tuple[str, int, int], Made] = {}

    def config(self, settings: Settings) -> RunConfig | None:
        """The run with these settings; None where it is refused."""
        name = _name(settings)
        if name not in self._configs:
            try:
                self._configs[name] = RunConfig.model_validate(run_of(settings))
            except ValidationError:
                self._configs[name] = None
        return self._configs[name]

    def trained(self, settings: Settings, number: int, updates: int) -> Made:
        """What the trainer makes of settings that are accepted."""
        name, config = (_name(settings), number, updates), self.config(settings)
        assert config is not None
        if name not in self._made:
            self._made[name] = trained_update(config, number, updates)
        return self._made[name]

    def distance(self, settings: Settings, number: int, updates: int) -> float:
        """How far the trainer is from the formulas, as a share of the largest gradient of each step."""
        config = self.config(settings)
        assert config is not None
        return distance(self.trained(settings, number, updates), expected_update(config, number, updates))

    def problem(self, one: Choice, other: Choice) -> str:
        """What is wrong with a pair; empty where it is as it should be."""
        settings = together(one, other)
        config = self.config(settings)
        if (config is None) != makes_no_sense(settings):
            return f"{one} with {other}: " + ("accepted" if config else f"refused: {refusal(settings)}")
        if config is None:
            return unnamed(settings, one, other)
        apart = self.distance(settings, 0, updates_of(config))
        if not apart <= TOLERANCE:
            return f"{one} with {other}: {apart:.1e} from the reference"
        silent = {key for key in (one.key, other.key) if not self.acts(key, settings)}
        asked_twice = {key for key in ASKED_FOR_BY if ASKED_FOR_BY[key] in settings} & {one.key, other.key}
        if silent != asked_twice:
            return f"{one} with {other}: {', '.join(silent ^ asked_twice)} changes nothing, or is listed as silent"
        return ""

    def acts(self, key: str, settings: Settings) -> bool:
        """Whether the key changes the update of some scene, or the rest is refused without it."""
        rest = without(key, settings)
        config, plain = self.config(settings), self.config(rest)
        if plain is None or plain == config:
            # Without it the rest makes no sense, or says the same: what is no default elsewhere is one here.
            return True
        assert config is not None
        updates = max(updates_of(config), updates_of(plain))
        return any(
            self.trained(settings, number, updates).differs_from(self.trained(rest, number, updates))
            for number in range(len(SCENES))
        )


def _name(settings: Settings) -> str:
    return repr(sorted(settings.items(), key=str))


def refusal(settings: Settings) -> str:
    """What a user reads who writes these settings."""
    with pytest.raises(InvalidConfig) as caught:
        load_text(RunConfig, json.dumps(run_of(settings)), source="run.yaml")
    return str(caught.value)


def unnamed(settings: Settings, one: Choice, other: Choice) -> str:
    """What a refusal fails to name of both choices: the key, or one that it needs."""
    said = refusal(settings)
    missing = [
        str(choice)
        for choice in (one, other)
        if not any(key.removeprefix("algorithm.") in said for key in (choice.key, *choice.needs[0]))
    ]
    return f"{one} with {other}: refused without naming {' and '.join(missing)}: {said}" if missing else ""
