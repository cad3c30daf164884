"""What `flotilla doctor` checks of the stack file and the model that it names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from flotilla_coordinator.cli.finding import Finding, failed, passed, warning
from flotilla_coordinator.cli.stack_choice import load_stack, stack_file

if TYPE_CHECKING:
    from flotilla_core.config import StackConfig


_LEAST_BYTES = 32 << 20
"""For ledger, samples, spans and logs of a short run."""


def stack_checks(given: str | None) -> tuple[StackConfig | None, list[Finding]]:
    """The stack, where its file is valid, and the findings."""
    from flotilla_core.errors import InvalidConfig

    file = stack_file(given)
    try:
        config = load_stack(given)
    except InvalidConfig as error:
        return None, [failed("stack file", str(error), "correct it; see: flotilla config schema stack")]
    found = f"{file}: stack {config.name!r}" if file else f"none: defaults, stack {config.name!r}"
    return config, [
        passed("stack file", found),
        _state(config),
        *_models(config),
        _token(config),
        _bind(config),
    ]


def _state(config: StackConfig) -> Finding:
    """Whether the state directory takes files, and how many checkpoints of the stack's model."""
    from flotilla_core.config.checkpoint import CheckpointConfig
    from flotilla_core.disk import check_state_directory, free_bytes, nearest, room
    from flotilla_core.errors import FlotillaError

    place = (config.state_dir / config.name).absolute()
    check = "state directory"
    try:
        check_state_directory(nearest(place))  # which `up` would make it in
    except FlotillaError as error:
        return failed(check, f"{error.what} ({error.where}): {error.why}", error.next_step)
    found, free = f"{place}: {room(place)}", free_bytes(place)
    checkpoint = _checkpoint_bytes(config)
    kept = CheckpointConfig().keep
    least, usual = _LEAST_BYTES + checkpoint, _LEAST_BYTES + (kept + 1) * checkpoint
    if free < least:
        needed = f"free at least {_mib(least)}: a checkpoint of the model has {_mib(checkpoint)}"
        return failed(check, found, f"{needed}; or set state_dir to another disk")
    if free < usual:
        remedy = f"a run that keeps {kept} checkpoints of {_mib(checkpoint)} fills up to {_mib(usual)}"
        return warning(check, found, f"{remedy}; `flotilla run plan FILE` says what yours needs")
    return passed(check, found)


def _checkpoint_bytes(config: StackConfig) -> int:
    """Of the stack's model, all of which learns, as the plan of a run weighs it; 0 where it cannot be read."""
    from flotilla_coordinator.plan.model_facts import ModelFacts
    from flotilla_coordinator.plan.size_limits import MODEL, STATE
    from flotilla_core.errors import FlotillaError

    if not Path(config.model).is_dir():
        return 0
    try:
        return ModelFacts.read(Path(config.model)).parameters * (MODEL + STATE)
    except (FlotillaError, OSError, ValueError, KeyError):
        return 0  # what is wrong with the model is a finding of its own


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"


def _models(config: StackConfig) -> list[Finding]:
    """The stack's, and those of gangs that have one of their own."""
    from flotilla_core.gangs import model_of, roles_of, started
    from flotilla_core.roles import POLICY, section_of

    findings = _model("model", config.model)
    for role in (role for role in roles_of(config) if role != POLICY):
        model = model_of(config, role)
        if started(config, role) and model != config.model:
            findings += _model(f"{section_of(role)}.model", model)
    return findings


def _model(key: str, model: Path | str) -> list[Finding]:
    from flotilla_core.errors import FlotillaError
    from flotilla_core.model_folder import model_folder

    if not Path(model).is_dir() and _is_hub_name(str(model)):
        found = f"{model} is a hub name: it is fetched at the first start, unless it is in the cache"
        return [warning(key, found, f"fetch it beforehand: hf download {model}")]
    try:
        folder = model_folder(model)
    except FlotillaError as error:
        found = f"{error.what}: {error.why or error.where}"
        return [failed(key, found, error.next_step or f"set {key} in the stack file to a folder")]
    if not (folder / "config.json").exists():
        return [failed(key, f"{folder} has no config.json", f"set {key} to a Hugging Face model folder")]
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if not weights:
        return [failed(key, f"{folder} has no *.safetensors", "save the model with safe_serialization=True")]
    return [passed(key, f"{folder} ({weights / 1e6:,.1f} MB of weights)"), _tokenizer(folder)]


def _is_hub_name(model: str) -> bool:
    """organisation/model, as `flotilla_core.model_folder` reads it; asking it would download."""
    return model.count("/") == 1 and not model.startswith((".", "/", "~"))


def _tokenizer(folder: Path) -> Finding:
    file = folder / "tokenizer.json"
    if not file.exists():
        remedy = "save a fast tokenizer there: AutoTokenizer.from_pretrained(...).save_pretrained(folder)"
        return failed("tokenizer", f"{file} is not there", remedy)
    from flotilla_coordinator.data.tokenizer import Tokenizer
    from flotilla_core.errors import FlotillaError

    try:
        tokenizer = Tokenizer.load(folder)
    except FlotillaError as error:
        return failed("tokenizer", str(error), error.next_step or "save the tokenizer again")
    return passed("tokenizer", f"{tokenizer.vocabulary_size} entries")


def _token(config: StackConfig) -> Finding:
    from flotilla_core.errors import FlotillaError, Unavailable
    from flotilla_core.trust import read_token
    from flotilla_launch.paths import StackPaths

    directory = StackPaths.of(config.state_dir, config.name).directory
    try:
        read_token(config.bind, directory)
    except Unavailable:
        return passed("token", "none yet: flotilla up makes it")
    except FlotillaError as error:
        return failed("token", str(error), error.next_step or "write a random token to that file, mode 0600")
    return passed("token", f"{config.bind.token_file or directory / 'token'}: its owner's alone")


def _bind(config: StackConfig) -> Finding:
    from flotilla_core.rpc import is_loopback

    if not is_loopback(config.bind.host):
        remedy = "use a private network: calls are signed, and nothing is encrypted"
        return warning("bind", f"{config.bind.host}: other hosts can reach the services", remedy)
    return passed("bind", f"{config.bind.host}: this host only")
