"""Checks a stack for `flotilla doctor`: its file, the model that it names, and its running services."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from flotilla.common.v1.finding_pb2 import Finding, Severity
from flotilla.common.v1.operate_pb2 import (
    CheckRequest,
    CheckResult,
    DescribeRequest,
    DescribeResponse,
)
from flotilla.common.v1.operate_pb2_grpc import OperateServiceStub
from flotilla.launcher.v1.launcher_pb2 import ProcessState, ProcessStatus
from flotilla_cli.credential_check import credential_finding
from flotilla_cli.processes import as_the_coordinator_sees
from flotilla_cli.services import services_seen
from flotilla_cli.stack import load_stack, stack_file
from flotilla_client.discovery import credential_of_caller
from flotilla_coordinator.plan.model_facts import ModelFacts
from flotilla_coordinator.plan.size_limits import MODEL, STATE, bfloat16_warnings
from flotilla_core import rpc
from flotilla_core.addresses import is_loopback
from flotilla_core.config import StackConfig
from flotilla_core.config.model import is_url
from flotilla_core.config.training import CheckpointConfig
from flotilla_core.disk import check_state_directory, free_bytes, nearest, room
from flotilla_core.errors import FlotillaError, InvalidConfig, Mismatch
from flotilla_core.findings import failed, found_of, passed, warned
from flotilla_core.gangs import model_of, model_roles, started
from flotilla_core.model_folder import model_folder
from flotilla_core.protocol import check_protocol, limits
from flotilla_core.roles import POLICY, section_of
from flotilla_core.rpc.interface import check_interface
from flotilla_core.transfer.object_store import ObjectFolder
from flotilla_core.trust import Credential
from flotilla_data.tokenizer import Tokenizer
from flotilla_launch.guardian import starts_launcher_again, why_it_ended
from flotilla_launch.health import is_serving
from flotilla_launch.launcher import launcher_of
from flotilla_launch.paths import StackPaths
from flotilla_launch.state import find, is_up
from flotilla_workers.jail import jail

_LEAST_BYTES = 32 << 20
"""The space for ledger, samples, spans and logs of a short run."""

_DESCRIBE_S = 5.0
_CHECK_S = 30.0
_SERVING_S = 10.0
"""A busy host may need this long for the first encrypted call."""
_CLOCK_S = 2.0
"""The difference between two clocks that nobody need look at."""


def refused(check: str, error: FlotillaError, next_step: str = "") -> Finding:
    """Return the finding of a check that ended with an error; `next_step` is for one that says none."""
    finding = error.finding()
    finding.code, finding.next_step = check, error.next_step or next_step
    return finding


def stack_checks(given: str | None) -> tuple[StackConfig | None, list[Finding]]:
    """Return the stack, where its file is valid, and the findings."""
    file = stack_file(given)
    try:
        config = load_stack(given)
    except InvalidConfig as error:
        return None, [refused("stack file", error, "correct it; see: flotilla config schema stack")]
    found = f"{file}: stack {config.name!r}" if file else f"none: defaults, stack {config.name!r}"
    return config, [
        passed("stack file", found),
        _state_directory(config),
        *_models(config),
        *_dtypes(config),
        credential_finding(config),
        _bind(config),
        *_interface(config),
        *_isolation(config),
    ]


def _state_directory(config: StackConfig) -> Finding:
    """Check whether the state directory is writable, and for how many checkpoints of the stack's model it has room."""
    place = (config.state_dir / config.name).absolute()
    check = "state directory"
    try:
        check_state_directory(nearest(place))  # which `up` would make it in
    except FlotillaError as error:
        return refused(check, error)
    found, free = f"{place}: {room(place)}", free_bytes(place)
    checkpoint = _checkpoint_bytes(config)
    kept = CheckpointConfig().keep
    least, usual = _LEAST_BYTES + checkpoint, _LEAST_BYTES + (kept + 1) * checkpoint
    if free < least:
        needed = f"free at least {_mib(least)}: a checkpoint of the model has {_mib(checkpoint)}"
        return failed(check, found, f"{needed}; or set state_dir to another disk")
    if free < usual:
        remedy = f"a run that keeps {kept} checkpoints of {_mib(checkpoint)} fills up to {_mib(usual)}"
        return warned(check, found, f"{remedy}; `flotilla run plan FILE` says what yours needs")
    return passed(check, found)


def _checkpoint_bytes(config: StackConfig) -> int:
    """Return the size of a checkpoint in which the stack's whole model learns; 0 where the model cannot be read."""
    try:
        return ModelFacts.read(Path(config.model)).parameters * (MODEL + STATE)
    except (FlotillaError, OSError, ValueError, KeyError):
        return 0  # what is wrong with the model is a finding of its own


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"


def _models(config: StackConfig) -> list[Finding]:
    """Check the stack's model, and those of gangs with a model of their own."""
    # Services by this file may be on another host than the coordinator, which then gives them the model.
    fetched = config.nats.url is not None
    findings = _model("model", config.model, fetched=fetched)
    for role in (role for role in model_roles(config) if role != POLICY):
        model = model_of(config, role)
        if started(config, role) and model != config.model:
            findings += _model(f"{section_of(role)}.model", model, fetched=fetched)
    return findings


def _model(key: str, model: Path | str, *, fetched: bool) -> list[Finding]:
    if is_url(model):
        return [_stored_model(key, str(model))]
    if isinstance(model, str) and _is_hub_name(model):
        found = f"{model} is a hub name: it is fetched at the first start, unless it is in the cache"
        return [warned(key, found, f"fetch it beforehand: hf download {model}")]
    try:
        folder = model_folder(model)
    except FlotillaError as error:
        if fetched:
            here = "services of this host fetch it from the coordinator; on the coordinator's host it must be there"
            return [warned(key, found_of(error.finding()), here)]
        return [refused(key, error, f"set {key} in the stack file to a folder")]
    return _folder(key, folder)


def _folder(key: str, folder: Path) -> list[Finding]:
    if not (folder / "config.json").exists():
        return [failed(key, f"{folder} has no config.json", f"set {key} to a Hugging Face model folder")]
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if not weights:
        return [failed(key, f"{folder} has no *.safetensors", "save the model with safe_serialization=True")]
    return [passed(key, f"{folder} ({weights / 1e6:,.1f} MB of weights)"), _tokenizer(folder)]


def _stored_model(key: str, model: str) -> Finding:
    """Check whether a model in object storage can be seen from here."""
    try:
        there = ObjectFolder(model).manifest()
    except FlotillaError as error:
        return refused(key, error)
    size = f"{len(there.files)} files, {there.nbytes / 1e6:,.1f} MB"
    return passed(key, f"{model} ({size}); each host fetches it once")


def _dtypes(config: StackConfig) -> list[Finding]:
    """Check whether the processor computes in the types of the stack, where there are no GPUs."""
    remedy = "set trainer.dtype and generator.dtype to float32, or use a host with GPUs"
    return [warned("dtype", found, remedy) for found in bfloat16_warnings(config)]


def _is_hub_name(model: str) -> bool:
    """Return whether this is organisation/model, as `flotilla_core.model_folder` rules, without a download."""
    return model.count("/") == 1 and not model.startswith((".", "/", "~"))


def _tokenizer(folder: Path) -> Finding:
    file = folder / "tokenizer.json"
    if not file.exists():
        remedy = "save a fast tokenizer there: AutoTokenizer.from_pretrained(...).save_pretrained(folder)"
        return failed("tokenizer", f"{file} is not there", remedy)
    try:
        tokenizer = Tokenizer.load(folder)
    except FlotillaError as error:
        return refused("tokenizer", error, "save the tokenizer again")
    return passed("tokenizer", f"{tokenizer.vocabulary_size} entries")


def _bind(config: StackConfig) -> Finding:
    host = config.bind.host
    reach = "this host only" if is_loopback(host) else "other hosts can reach the services"
    return passed("bind", f"{host}: {reach}")


def _interface(config: StackConfig) -> list[Finding]:
    """Check the interface of this host, in a stack that names one."""
    if config.bind.interface is None:
        return []
    try:
        address = check_interface(config.bind)
    except FlotillaError as error:
        return [refused("interface", error)]
    return [passed("interface", f"{config.bind.interface} is up, with {address}")]


def _isolation(config: StackConfig) -> list[Finding]:
    """Look for the jail of functions of users here, where the stack starts what runs them."""
    asked = [
        (config.reward.replicas, config.reward.isolation, "reward"),
        (config.environment.replicas, config.environment.isolation, "environment"),
    ]
    return [jail.find(isolation, section).finding for replicas, isolation, section in asked if replicas]


async def service_checks(config: StackConfig) -> list[Finding]:
    """Return one finding for each service, and one for each of its own checks; a stopped stack is no fault."""
    paths = StackPaths.of(config.state_dir, config.name)
    file = find(paths)
    if file is None and starts_launcher_again(paths):
        return [warned("launcher", "it was killed and is being restarted", "flotilla logs launcher")]
    if file is None and (why := why_it_ended(paths)):
        return [failed("launcher", why, f"read {paths.log_file('launcher')}, then flotilla up")]
    if not is_up(paths):
        return [passed("services", f"stack {config.name!r} is not running")]
    try:
        processes = list((await launcher_of(paths).state()).processes)
        credential = credential_of_caller(config.bind, paths.directory)
        processes = as_the_coordinator_sees(processes, await services_seen(paths, within_s=_DESCRIBE_S))
    except FlotillaError as error:
        remedy = f"kill -9 {file.pid}; its guardian starts another one" if file else "see squeue"
        return [failed("launcher", str(error), remedy)]
    services = [process for process in processes if process.kind]
    answers = await asyncio.gather(*(_service(process, credential) for process in services))
    return [finding for answer in answers for finding in answer]


async def _service(process: ProcessStatus, credential: Credential) -> list[Finding]:
    name = process.name
    logs = f"flotilla logs {name}"
    if not process.address or not await is_serving(process.address, credential, _SERVING_S):
        silent = f"its address {process.address} does not say SERVING to this host"
        why = process.error.splitlines()[0] if process.error else silent
        return [failed(name, why, f"read its log: {logs}")]
    channel = rpc.connect(process.address, credential=credential)
    stub = OperateServiceStub(channel)
    try:
        asked = time.time()
        described = await rpc.unary(stub.Describe, DescribeRequest(), timeout_s=_DESCRIBE_S)
        answered = time.time()
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
    clock = _clock(name, described, asked, answered)
    serves = passed(name, found)
    if less := limits(registration):
        serves = warned(name, f"{found}; it {less}", "replace it: flotilla upgrade")
    return [_admitted(process) or serves, *clock, *(_own(name, result) for result in results)]


def _admitted(process: ProcessStatus) -> Finding | None:
    """Return why the coordinator does not admit a service that serves; None where it does."""
    if process.state != ProcessState.PROCESS_STATE_STARTING or not process.error:
        return None
    return failed(
        process.name, f"it serves, but {process.error}", "see flotilla ps: it is dialled every second"
    )


def _clock(name: str, described: DescribeResponse, asked: float, answered: float) -> list[Finding]:
    """Compare the clock of a service with ours; half of the round trip lies before its answer."""
    if not described.HasField("now"):
        return []
    off = described.now.ToNanoseconds() / 1e9 - (asked + answered) / 2
    if abs(off) <= _CLOCK_S + (answered - asked) / 2:
        return []
    sign = "ahead of" if off > 0 else "behind"
    found = f"its clock is {abs(off):.1f} s {sign} the clock of this host"
    return [
        failed(
            f"{name}: clock",
            found,
            f"set the clock of {described.registration.host} by NTP: chronyc tracking",
        )
    ]


_SEVERITIES = {
    int(one): one for one in (Severity.SEVERITY_INFO, Severity.SEVERITY_WARNING, Severity.SEVERITY_ERROR)
}


def _own(name: str, result: CheckResult) -> Finding:
    return Finding(
        # A newer service may have one that this release does not know.
        severity=_SEVERITIES.get(result.status, Severity.SEVERITY_INFO),
        code=f"{name}: {result.name}",
        what=result.finding,
        next_step=result.remedy,
    )
