"""Checks a stack for `flotilla doctor`: its file, the model that it names, and its running services."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from flotilla_coordinator.cli.stack import load_stack, stack_file

if TYPE_CHECKING:
    from flotilla.common.v1.operate_pb2 import CheckResult
    from flotilla.launcher.v1.launcher_pb2 import ProcessStatus
    from flotilla_core.config import StackConfig

_LEAST_BYTES = 32 << 20
"""The space for ledger, samples, spans and logs of a short run."""

_DESCRIBE_S = 5.0
_CHECK_S = 30.0


@dataclass(frozen=True)
class Finding:
    """The result of a check, with a remedy (empty when it passed)."""

    check: str
    status: Literal["passed", "warning", "failed"]
    finding: str
    remedy: str = ""

    def as_dict(self) -> dict[str, str]:
        """Return the finding for `--json`."""
        return asdict(self)


def passed(check: str, finding: str) -> Finding:
    """Make a finding that all is well."""
    return Finding(check, "passed", finding)


def warning(check: str, finding: str, remedy: str) -> Finding:
    """Make a finding that something works, but not well enough for every use."""
    return Finding(check, "warning", finding, remedy)


def failed(check: str, finding: str, remedy: str) -> Finding:
    """Make a finding with which a stack would not work."""
    return Finding(check, "failed", finding, remedy)


def stack_checks(given: str | None) -> tuple[StackConfig | None, list[Finding]]:
    """Return the stack, where its file is valid, and the findings."""
    from flotilla_core.errors import InvalidConfig

    file = stack_file(given)
    try:
        config = load_stack(given)
    except InvalidConfig as error:
        return None, [failed("stack file", str(error), "correct it; see: flotilla config schema stack")]
    found = f"{file}: stack {config.name!r}" if file else f"none: defaults, stack {config.name!r}"
    return config, [
        passed("stack file", found),
        _state_directory(config),
        *_models(config),
        *_dtypes(config),
        _token(config),
        _bind(config),
    ]


def _state_directory(config: StackConfig) -> Finding:
    """Check whether the state directory is writable, and for how many checkpoints of the stack's model it has room."""
    from flotilla_core.config.training import CheckpointConfig
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
    """Return the size of a checkpoint in which the stack's whole model learns; 0 where the model cannot be read."""
    from flotilla_coordinator.plan.model_facts import ModelFacts
    from flotilla_coordinator.plan.size_limits import MODEL, STATE
    from flotilla_core.errors import FlotillaError

    try:
        return ModelFacts.read(Path(config.model)).parameters * (MODEL + STATE)
    except (FlotillaError, OSError, ValueError, KeyError):
        return 0  # what is wrong with the model is a finding of its own


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"


def _models(config: StackConfig) -> list[Finding]:
    """Check the stack's model, and those of gangs with a model of their own."""
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

    if isinstance(model, str) and _is_hub_name(model):
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


def _dtypes(config: StackConfig) -> list[Finding]:
    """Check whether the processor computes in the types of the stack, where there are no GPUs."""
    from flotilla_coordinator.plan.size_limits import bfloat16_warnings

    remedy = "set trainer.dtype and generator.dtype to float32, or use a host with GPUs"
    return [warning("dtype", found, remedy) for found in bfloat16_warnings(config)]


def _is_hub_name(model: str) -> bool:
    """Return whether this is organisation/model, as `flotilla_core.model_folder` rules, without a download."""
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
        return passed("token", "none yet: flotilla up creates it")
    except FlotillaError as error:
        return failed("token", str(error), error.next_step or "write a random token to that file, mode 0600")
    return passed("token", f"{config.bind.token_file or directory / 'token'}: readable by its owner only")


def _bind(config: StackConfig) -> Finding:
    from flotilla_core.rpc import is_loopback

    if not is_loopback(config.bind.host):
        remedy = "use a private network: calls are signed, and nothing is encrypted"
        return warning("bind", f"{config.bind.host}: other hosts can reach the services", remedy)
    return passed("bind", f"{config.bind.host}: this host only")


async def service_checks(config: StackConfig) -> list[Finding]:
    """Return one finding for each service, and one for each of its own checks; a stopped stack is no fault."""
    from flotilla_core.errors import FlotillaError
    from flotilla_core.trust import read_token
    from flotilla_launch.client import LauncherClient, find
    from flotilla_launch.guardian import starts_launcher_again, why_it_ended
    from flotilla_launch.paths import StackPaths

    paths = StackPaths.of(config.state_dir, config.name)
    file = find(paths)
    if file is None and starts_launcher_again(paths):
        return [warning("launcher", "it was killed and is being restarted", "flotilla logs launcher")]
    if file is None and (why := why_it_ended(paths)):
        return [failed("launcher", why, f"read {paths.log_file('launcher')}, then flotilla up")]
    if file is None:
        return [passed("services", f"stack {config.name!r} is not running")]
    try:
        async with LauncherClient.open(file) as launcher:
            processes = (await launcher.state()).processes
        token = read_token(config.bind, paths.directory)
    except FlotillaError as error:
        return [failed("launcher", str(error), f"kill -9 {file.pid}; its guardian starts another one")]
    services = [process for process in processes if process.kind]
    answers = await asyncio.gather(*(_service(process, token) for process in services))
    return [finding for answer in answers for finding in answer]


async def _service(process: ProcessStatus, token: str | None) -> list[Finding]:
    from flotilla.common.v1.operate_pb2 import CheckRequest, DescribeRequest
    from flotilla.common.v1.operate_pb2_grpc import OperateServiceStub
    from flotilla_core import rpc
    from flotilla_core.errors import FlotillaError, Mismatch
    from flotilla_core.protocol import check_protocol
    from flotilla_launch.health import is_serving

    name = process.name
    logs = f"flotilla logs {name}"
    if not process.address or not await is_serving(process.address, token):
        why = process.error.splitlines()[0] if process.error else "its health does not say SERVING"
        return [failed(name, why, f"read its log: {logs}")]
    channel = rpc.connect(process.address, token=token)
    stub = OperateServiceStub(channel)
    try:
        described = await rpc.unary(stub.Describe, DescribeRequest(), timeout_s=_DESCRIBE_S)
        check_protocol(described.registration)
        results = (await rpc.unary(stub.Check, CheckRequest(), timeout_s=_CHECK_S)).results
    except Mismatch as error:
        return [failed(name, str(error), "flotilla down, then flotilla up")]
    except FlotillaError as error:
        return [failed(name, str(error), f"read its log: {logs}")]
    finally:
        await channel.close()
    registration = described.registration
    versions = ", ".join(f"{key} {value}" for key, value in sorted(registration.versions.items()))
    found = f"serving, protocol {registration.protocol_version}, {versions}, {described.source_path}"
    return [passed(name, found), *(_own(name, result) for result in results)]


def _own(name: str, result: CheckResult) -> Finding:
    from flotilla.common.v1.operate_pb2 import CHECK_STATUS_FAILED, CHECK_STATUS_WARNING

    check = f"{name}: {result.name}"
    if result.status == CHECK_STATUS_FAILED:
        return failed(check, result.finding, result.remedy)
    if result.status == CHECK_STATUS_WARNING:
        return warning(check, result.finding, result.remedy)
    return passed(check, result.finding)
