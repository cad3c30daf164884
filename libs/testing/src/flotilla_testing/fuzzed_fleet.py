"""A running stack under malformed requests: what is sent to which service, and what must hold afterwards.

Invariants: no answer is INTERNAL or UNKNOWN; no main process of a service ends; whatever a request legitimately set off
(a session, a weight group, a run) is ended before the fleet is judged.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import psutil
import torch
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from flotilla.common.v1 import files_pb2, operate_pb2, tensor_pb2, version_pb2, weights_pb2
from flotilla.coordinator.v1 import coordinator_pb2, loop_pb2, run_pb2
from flotilla.generator.v1 import generator_pb2
from flotilla.launcher.v1 import launcher_pb2
from flotilla.reward.v1 import reward_pb2
from flotilla.trainer.v1 import session_pb2, trainer_pb2
from flotilla_client import find_coordinator
from flotilla_core import rpc
from flotilla_core.errors import FlotillaError
from flotilla_testing.memory_watch import MemoryWatch
from flotilla_testing.request_fuzz import Draft, Pin, RequestFuzz
from flotilla_testing.runs import small_run
from flotilla_testing.session_specs import as_struct, called, wire_objective
from flotilla_testing.stack import Stack, wait_until
from flotilla_weights.manifest import Manifest

SEED_VARIABLE = "FLOTILLA_FUZZ_SEED"
RUN = "fuzz"
GENERATOR = "flotilla.generator.v1.GeneratorService"
TRAINER = "flotilla.trainer.v1.TrainerService"
MADE_UP_SAMPLES = (
    "weights.canary.prompts=0",
    "algorithm.correction.warn_at=null",
    "algorithm.correction.fail_at=null",
    "export_final=false",
)
"""The simulated engine's log-probabilities are not those of any policy."""
ENDED = (run_pb2.RUN_STATE_SUCCEEDED, run_pb2.RUN_STATE_STOPPED, run_pb2.RUN_STATE_FAILED)
MOST_GROWTH_MIB = 100.0
MEMORY_RETURNS_S = 20.0
AT_ONCE = 16
UNARY_S = 3.0
STREAM_S = 0.3
MOST_RESPONSES = 3
FORBIDDEN = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
_OPERATE = operate_pb2.DESCRIPTOR.services_by_name["OperateService"]
_FILES = files_pb2.DESCRIPTOR.services_by_name["FileService"]
_SERVICES = {
    "generator-0": (generator_pb2.DESCRIPTOR.services_by_name["GeneratorService"], _OPERATE, _FILES),
    "trainer": (trainer_pb2.DESCRIPTOR.services_by_name["TrainerService"], _OPERATE, _FILES),
    "reward-0": (reward_pb2.DESCRIPTOR.services_by_name["RewardService"], _OPERATE, _FILES),
    "coordinator": (
        coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"],
        loop_pb2.DESCRIPTOR.services_by_name["LoopService"],
        _OPERATE,
        _FILES,
    ),
    "launcher": (launcher_pb2.DESCRIPTOR.services_by_name["LauncherService"], _OPERATE),
}
_NOBODY = ("nobody", "generator-99", "a\0b", "x" * 5000)
_PINS: dict[str, Sequence[Pin]] = {
    "flotilla.common.v1.OperateService.Drain": [("grace", [Duration(seconds=-1), Duration(nanos=-1)])],
    "flotilla.common.v1.OperateService.Profile": [
        ("duration", [Duration(), Duration(seconds=-5), Duration(seconds=2**40), Duration(nanos=10**7)])
    ],
    "flotilla.trainer.v1.TrainerService.OpenSession": [("run_id", [RUN, ""])],
    "flotilla.launcher.v1.LauncherService.Stop": [("name", _NOBODY)],
    "flotilla.launcher.v1.LauncherService.Scale": [("replicas", [1, 2**20, 2**32 - 1])],
    "flotilla.coordinator.v1.CoordinatorService.ScaleService": [("replicas", [1, 2**20, 2**32 - 1])],
    "flotilla.coordinator.v1.CoordinatorService.DrainReplica": [("replica", _NOBODY)],
}
"""Values of fields that a service would obey to its end, by call: it refuses these, or they change nothing."""


@dataclass
class Report:
    """The answers of a fleet's services to the fuzzing, and its effect on them."""

    processes: dict[str, int]
    """Main processes before, by the name of their service."""
    memory: dict[int, tuple[str, float]]
    """The name of each process and its resident MiB before, by its id."""
    codes: dict[str, Counter[str]] = field(default_factory=dict)
    offences: list[str] = field(default_factory=list)
    """Answers that no caller's mistake may get."""
    seconds: dict[str, float] = field(default_factory=dict)
    replaced: list[str] = field(default_factory=list)
    """Services whose main process is another one now."""
    growth_mib: dict[str, float] = field(default_factory=dict)
    """Growth by process, of those that live as long as their service."""
    peak_mib: dict[str, float] = field(default_factory=dict)
    """The peak of each service's main process, by the name of the service."""
    evidence: list[str] = field(default_factory=list)
    """Descriptions of what services did that took too much memory."""
    last_run: dict[str, Any] = field(default_factory=dict)
    runs: list[str] = field(default_factory=list)
    """All that the coordinator knows in the end, those that malformed requests started among them."""

    def judge(self, stack: Stack) -> None:
        """Compare the stack with what it was before."""
        now = main_processes(stack)
        self.replaced = [name for name, pid in self.processes.items() if now.get(name) != pid]

        def look() -> bool:
            for pid, (name, mib) in resident_mib(stack).items():
                if pid in self.memory:
                    self.growth_mib[f"{pid} {name}"] = mib - self.memory[pid][1]
            return max(self.growth_mib.values()) < MOST_GROWTH_MIB

        deadline = time.monotonic() + MEMORY_RETURNS_S
        while not look() and time.monotonic() < deadline:
            time.sleep(0.5)

    def __str__(self) -> str:
        lines = [
            f"{name}: {sum(codes.values())} in {self.seconds[name]:.1f} s, {dict(codes.most_common())}"
            for name, codes in self.codes.items()
        ]
        lines += [f"{mib:+.0f} MiB: {name}" for name, mib in self.growth_mib.items()]
        lines += [f"at most {mib:.0f} MiB: {name}" for name, mib in self.peak_mib.items()]
        return "\n".join([*lines, *self.offences[:40], *self.evidence])


class FuzzedFleet:
    """Sends what the fuzz draws to the services of a stack."""

    def __init__(self, stack: Stack, folder: Path, run_file: Path, ended_run: str) -> None:
        """`folder` is where requests may write; the coordinator knows the run."""
        self._stack = stack
        self._credential = find_coordinator(stack.directory.name, stack.directory.parent).credential
        self._latest: deque[tuple[str, list[bytes]]] = deque(maxlen=3 * AT_ONCE)
        """The last requests that were sent."""
        self._spec = _session_spec(folder)
        self._drafts = {
            **_generator_drafts(),
            **_trainer_drafts(self._spec, folder),
            **_reward_drafts(),
            **_coordinator_drafts(run_file.read_text(), ended_run),
        }

    def add_loop(self, run_id: str) -> None:
        """Send calls of a loop to this run from now on."""
        self._drafts |= _loop_drafts(run_id)

    def moment(self) -> str:
        """Return the requests that were sent last."""
        return "after\n" + "\n".join(f"{name} {messages!r:.300}" for name, messages in tuple(self._latest))

    def address(self, name: str) -> str:
        """Return where a service listens."""
        directory = self._stack.directory
        if name == "launcher":
            return f"unix:{json.loads((directory / 'launcher.json').read_text())['socket']}"
        return str(json.loads((directory / "instances" / f"{name}.json").read_text())["address"])

    async def send(self, name: str, count: int, seed: int, report: Report) -> None:
        """Send `count` requests to a service, equally many to each of its methods."""
        fuzz = RequestFuzz(seed, self._drafts, _PINS)
        methods = [method for service in _SERVICES[name] for method in service.methods]
        order = [methods[index % len(methods)] for index in range(count)]
        random.Random(seed).shuffle(order)
        codes = report.codes.setdefault(name, Counter())
        started = time.monotonic()
        pending = iter(order)
        async with (
            rpc.connect(self.address(name), credential=self._credential) as channel,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(AT_ONCE):
                group.create_task(_sender(channel, pending, fuzz, codes, report.offences, self._latest))
        report.seconds[name] = time.monotonic() - started

    async def release_generator(self) -> None:
        """Take a weight group back."""
        await self._call("generator-0", f"/{GENERATOR}/AbortWeights", generator_pb2.AbortWeightsRequest())

    async def open_session(self) -> None:
        """Give the trainer a session, for calls that need one."""
        request = trainer_pb2.OpenSessionRequest(run_id=RUN, spec=self._spec)
        await self._call("trainer", f"/{TRAINER}/OpenSession", request)

    async def close_session(self) -> None:
        """Free the trainer."""
        await self._call("trainer", f"/{TRAINER}/CloseSession", trainer_pb2.CloseSessionRequest(run_id=RUN))

    async def _call(self, name: str, path: str, request: Message) -> None:
        async with rpc.connect(self.address(name), credential=self._credential) as channel:
            method: Any = channel.unary_unary(path)
            await method(request.SerializeToString(), timeout=60)


async def _sender(
    channel: Any,
    methods: Iterator[MethodDescriptor],
    fuzz: RequestFuzz,
    codes: Counter[str],
    offences: list[str],
    latest: deque[tuple[str, list[bytes]]],
) -> None:
    for method in methods:
        messages = fuzz.of(method)
        latest.append((method.full_name, messages))
        code, told = await _answer(channel, method, messages)
        codes[code.name] += 1
        if code in FORBIDDEN:
            offences.append(f"{method.full_name} {messages!r:.600}: {code.name} {told:.600}")


async def _answer(
    channel: Any, method: MethodDescriptor, messages: list[bytes]
) -> tuple[grpc.StatusCode, str]:
    path = f"/{method.containing_service.full_name}/{method.name}"
    try:
        if method.client_streaming:
            await channel.stream_unary(path)(iter(messages), timeout=UNARY_S)
        elif method.server_streaming:
            call = channel.unary_stream(path)(messages[0], timeout=STREAM_S)
            received = 0
            async for _ in call:
                received += 1
                if received == MOST_RESPONSES:
                    call.cancel()
                    break
        else:
            await channel.unary_unary(path)(messages[0], timeout=UNARY_S)
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""


def fuzz_fleet(stack: Stack, example: Path, folder: Path, requests: int, seed: int) -> Report:
    """Send `requests` to each service of a stack with real ranks, end what they began, and run once more."""
    run_file = small_run(example, folder / "run.yaml", name="fuzz", steps=1)
    ended = stack.run(run_file, *MADE_UP_SAMPLES)
    assert ended["state"] == "succeeded", ended["reason"]
    report = Report(main_processes(stack), resident_mib(stack))
    fleet = FuzzedFleet(stack, folder, run_file, ended["run_id"])
    with MemoryWatch(report.processes, stack.directory / "logs", fleet.moment) as memory:
        for name in ("reward-0", "launcher", "generator-0"):
            asyncio.run(fleet.send(name, requests, seed, report))
        asyncio.run(fleet.release_generator())
        asyncio.run(fleet.open_session())
        asyncio.run(fleet.send("trainer", requests, seed, report))
        asyncio.run(fleet.close_session())
        with stack.client() as client:
            loop = client.open_loop(run_file, ["loop=client", *MADE_UP_SAMPLES])
            fleet.add_loop(loop.run_id)
            asyncio.run(fleet.send("coordinator", requests, seed, report))
        _end_all_runs(stack)
        report.last_run = stack.run(run_file, *MADE_UP_SAMPLES)
    report.peak_mib, report.evidence = memory.peak_mib, memory.evidence
    report.judge(stack)
    with stack.client() as client:
        report.runs = [run.run_id for run in client.list_runs(1000)]
    return report


def _end_all_runs(stack: Stack) -> None:
    """Stop every run that malformed or half-good requests have left going on."""

    def active() -> list[str]:
        with stack.client() as client:
            return [run.run_id for run in client.list_runs(1000) if run.state not in ENDED]

    def none_goes_on() -> bool:
        for run_id in active():
            with stack.client() as client, contextlib.suppress(FlotillaError):
                client.stop_run(run_id, "the fuzz is over")
        return not active()

    wait_until("the end of all runs", none_goes_on, 120, every_s=1)


def seed() -> int:
    """Return the seed that the environment names, or a new one; tests print it."""
    return int(os.environ.get(SEED_VARIABLE, "") or random.SystemRandom().randrange(2**32))


def main_processes(stack: Stack) -> dict[str, int]:
    """Return the process of each service of the stack, and the launcher's."""
    directory = stack.directory
    pids = {
        file.stem: json.loads(file.read_text())["pid"] for file in (directory / "instances").glob("*.json")
    }
    return {**pids, "launcher": json.loads((directory / "launcher.json").read_text())["pid"]}


def resident_mib(stack: Stack) -> dict[int, tuple[str, float]]:
    """Return the resident memory of every process of the stack, with its command."""
    found: dict[int, tuple[str, float]] = {}
    for name, pid in main_processes(stack).items():
        process = psutil.Process(pid)
        children = [] if name == "launcher" else process.children(recursive=True)
        for one in (process, *children):
            try:
                found[one.pid] = f"{name} {' '.join(one.cmdline())[:80]}", one.memory_info().rss / 2**20
            except psutil.NoSuchProcess:
                continue
    return found


def _tensor(kind: tensor_pb2.DataType.ValueType, data: bytes) -> tensor_pb2.Tensor:
    return tensor_pb2.Tensor(data=data, dtype=kind)


TOKENS = _tensor(tensor_pb2.DATA_TYPE_INT32, b"\5\0\0\0\6\0\0\0\7\0\0\0")
LOGPROBS = _tensor(tensor_pb2.DATA_TYPE_FLOAT32, b"\0\0\x80\xbf" * 3)
FLAGS = _tensor(tensor_pb2.DATA_TYPE_BOOL, b"\1\1\0")


def _generator_drafts() -> Mapping[str, Draft]:
    pb, service = generator_pb2, f"{GENERATOR}."
    manifest = Manifest.from_named([("weight", torch.float32, (4,))], 1024).to_proto()

    def ids(number: int) -> dict[str, Any]:
        return {"run_id": RUN, "request_id": f"request-{number}"}

    def version(number: int) -> version_pb2.PolicyVersion:
        return version_pb2.PolicyVersion(step=number % 3)

    def generate(number: int) -> Sequence[Any]:
        slots = [pb.SampleSlot(sample_id=f"{number}/{n}", seed=n, prefix_token_ids=TOKENS) for n in range(2)]
        sampling = pb.SamplingParams(temperature=1, top_p=0.9, max_tokens=6, stop_token_ids=[1])
        return [pb.GenerateRequest(**ids(number), prompt_token_ids=TOKENS, samples=slots, sampling=sampling)]

    def join(number: int) -> Sequence[Any]:
        group = weights_pb2.WeightGroup(
            run_id=RUN,
            epoch=number,
            backend=weights_pb2.WEIGHT_BACKEND_GLOO,
            host="127.0.0.1",
            port=9,
            secret=b"of nobody",
            world_size=2,
            sender_ranks=[0],
            timeout=Duration(nanos=2 * 10**8),
        )
        return [pb.JoinWeightGroupRequest(**ids(number), group=group, rank_offset=1, manifest=manifest)]

    def commit(number: int) -> Sequence[Any]:
        digests = weights_pb2.WeightDigests(
            version=version(number), manifest_digest=manifest.digest, tensor_digests=[1]
        )
        return [
            pb.CommitWeightsRequest(
                **ids(number),
                epoch=number,
                policy_version=version(number),
                kv_policy=pb.KV_POLICY_REUSE,
                expected=digests,
            )
        ]

    return {
        service + "Generate": generate,
        service + "JoinWeightGroup": join,
        service + "StageWeights": lambda n: [
            pb.StageWeightsRequest(**ids(n), epoch=n, policy_version=version(n))
        ],
        service + "CommitWeights": commit,
    }


def _session_spec(folder: Path) -> session_pb2.SessionSpec:
    """Return the specification of a small session that learns from rewards."""
    algorithm = {
        "advantage": {"type": "grpo", "baseline": "group", "normalize_std": True},
        "loss": {"type": "ppo", "clip_low": 0.2, "clip_high": 0.28},
        "correction": {"fail_at": None},
    }
    optimizer = {
        "learning_rate": 1e-3,
        "betas": [0.9, 0.99],
        "schedule": "constant",
        "max_skipped_updates": 10_000_000,
    }
    return session_pb2.SessionSpec(
        role=session_pb2.ROLE_POLICY,
        objective=wire_objective("policy", algorithm, max_response_tokens=8),
        optimizer=as_struct(optimizer),
        batching=as_struct({"tokens_per_microbatch": 256, "logprob_chunk_tokens": 64}),
        total_updates=100_000,
        dump_dir=str(folder / "dumps"),
    )


def _trainer_drafts(spec: session_pb2.SessionSpec, folder: Path) -> Mapping[str, Draft]:
    pb, service = trainer_pb2, f"{TRAINER}."

    def ids(number: int, run_id: str = RUN) -> dict[str, Any]:
        return {"run_id": run_id, "request_id": f"request-{number}"}

    def sequence(number: int) -> pb.ScoredSequence:
        return pb.ScoredSequence(sequence_id=str(number), prompt_token_ids=TOKENS, token_ids=TOKENS)

    def train(number: int) -> Sequence[Any]:
        header = pb.TrainHeader(
            run_id=RUN,
            update_id=f"{RUN}/{number}",
            policy_version=version_pb2.PolicyVersion(),
            groups=1,
            learning_rate=pb.LearningRate(peak=1e-3, total_updates=100_000),
        )
        chunk = pb.TrainChunk(groups=[_train_group(number)])
        return [pb.TrainRequest(header=header), pb.TrainRequest(chunk=chunk)]

    def open_group(number: int) -> Sequence[Any]:
        return [
            pb.OpenWeightGroupRequest(
                **ids(number),
                epoch=number,
                backend=weights_pb2.WEIGHT_BACKEND_GLOO,
                world_size=2,
                bucket_bytes=1 << 20,
                timeout=Duration(nanos=2 * 10**8),
            )
        ]

    def forward(number: int) -> Sequence[Any]:
        loss = called("ppo", clip_low=0.2, clip_high=0.28)
        return [pb.ForwardBackwardRequest(**ids(number), groups=[_train_group(number)], loss=loss)]

    def checkpoint(number: int) -> str:
        return str(folder / "checkpoints" / f"step-{number:06d}")

    return {
        service + "OpenSession": lambda n: [pb.OpenSessionRequest(**ids(n), spec=spec, lineage=0)],
        # Most leave the session open for the others.
        service + "CloseSession": lambda n: [
            pb.CloseSessionRequest(**ids(n, RUN if n % 9 == 0 else "other"))
        ],
        service + "Train": train,
        service + "GetUpdate": lambda n: [pb.GetUpdateRequest(run_id=RUN, update_id=f"{RUN}/{n}")],
        service + "ComputeLogprobs": lambda n: [
            pb.ComputeLogprobsRequest(run_id=RUN, sequences=[sequence(n)], temperature=1, top_k=2)
        ],
        service + "ComputeValues": lambda n: [pb.ComputeValuesRequest(run_id=RUN, sequences=[sequence(n)])],
        service + "EvaluateLoss": lambda n: [pb.EvaluateLossRequest(run_id=RUN, groups=[_train_group(n)])],
        service + "ForwardBackward": forward,
        service + "OptimStep": lambda n: [pb.OptimStepRequest(**ids(n), learning_rate=1e-3)],
        service + "OpenWeightGroup": open_group,
        service + "PublishWeights": lambda n: [
            pb.PublishWeightsRequest(**ids(n), epoch=n, policy_version=version_pb2.PolicyVersion())
        ],
        service + "SaveCheckpoint": lambda n: [
            pb.SaveCheckpointRequest(**ids(n), path=checkpoint(n), coordinator_state=b"{}")
        ],
        service + "LoadCheckpoint": lambda n: [pb.LoadCheckpointRequest(**ids(n), path=checkpoint(n))],
        service + "ExportModel": lambda n: [pb.ExportModelRequest(**ids(n), path=str(folder / "export"))],
    }


def _reward_drafts() -> Mapping[str, Draft]:
    def score(number: int) -> Sequence[Any]:
        items = [
            reward_pb2.ScoreItem(sample_id=f"{number}/{n}", prompt="1+1=", response="2", answer="2")
            for n in range(3)
        ]
        items[0].info.update({"column": [1, {"a": None}]})
        spec = reward_pb2.RewardSpec(reward="exact", timeout=Duration(seconds=1))
        return [reward_pb2.ScoreRequest(run_id=RUN, request_id=str(number), items=items, rewards=[spec])]

    return {"flotilla.reward.v1.RewardService.Score": score}


def _coordinator_drafts(run_yaml: str, run: str) -> Mapping[str, Draft]:
    pb, service = coordinator_pb2, "flotilla.coordinator.v1.CoordinatorService."
    drafts: dict[str, Callable[[int], Message]] = {
        "PlanRun": lambda n: pb.PlanRunRequest(config_yaml=run_yaml),
        "StartRun": lambda n: pb.StartRunRequest(request_id=f"start-{n}", config_yaml=run_yaml),
        "WatchRun": lambda n: pb.WatchRunRequest(run_id=run, after_sequence=1),
        "StopRun": lambda n: pb.StopRunRequest(run_id=run, request_id=str(n), reason="no"),
        "PauseRun": lambda n: pb.PauseRunRequest(run_id=run, request_id=str(n)),
        "ResumeRun": lambda n: pb.ResumeRunRequest(run_id=run, request_id=str(n), checkpoint="step-000001"),
        "UpdateRun": lambda n: pb.UpdateRunRequest(
            run_id=run, request_id=str(n), overrides=["optimizer.learning_rate=1e-4"]
        ),
        "ListSamples": lambda n: pb.ListSamplesRequest(
            run_id=run, step=1, state=pb.SAMPLE_STATE_CONSUMED, limit=3
        ),
        "ExportRun": lambda n: pb.ExportRunRequest(run_id=run, request_id=str(n)),
        "QueryTimeline": lambda n: pb.QueryTimelineRequest(run_id=run, step=1),
    }
    return _one_message_each(service, drafts)


def _loop_drafts(run: str) -> Mapping[str, Draft]:
    pb, service = loop_pb2, "flotilla.coordinator.v1.LoopService."
    prompt = pb.LoopPrompt(text="1+1=", token_ids=TOKENS, answer="2")
    sample = pb.LoopSample(sample_id="s", text="2", token_ids=TOKENS, logprobs=LOGPROBS)
    scored = pb.LoopGroup(group_id="g", prompt=prompt, samples=[sample])
    sequence = trainer_pb2.ScoredSequence(sequence_id="q", prompt_token_ids=TOKENS, token_ids=TOKENS)
    drafts: dict[str, Callable[[int], Message]] = {
        "DrawPrompts": lambda n: pb.DrawPromptsRequest(run_id=run, count=2),
        "SampleGroups": lambda n: pb.SampleGroupsRequest(
            run_id=run, prompts=[prompt], samples_per_prompt=2, temperature=1, max_response_tokens=4
        ),
        "ScoreGroups": lambda n: pb.ScoreGroupsRequest(run_id=run, groups=[scored]),
        "ScoreTokens": lambda n: pb.ScoreTokensRequest(run_id=run, sequences=[sequence], temperature=1),
        "AddGradients": lambda n: pb.AddGradientsRequest(
            run_id=run, request_id=str(n), groups=[_train_group(n)]
        ),
        "StepOptimizer": lambda n: pb.StepOptimizerRequest(run_id=run, request_id=str(n), learning_rate=1e-4),
        "SyncWeights": lambda n: pb.SyncWeightsRequest(run_id=run, request_id=str(n)),
    }
    return _one_message_each(service, drafts)


def _one_message_each(service: str, drafts: Mapping[str, Callable[[int], Message]]) -> Mapping[str, Draft]:
    def draft(made: Callable[[int], Message]) -> Draft:
        return lambda number: [made(number)]

    return {service + name: draft(made) for name, made in drafts.items()}


def _train_group(number: int) -> trainer_pb2.TrainGroup:
    samples = [
        trainer_pb2.TrainSample(
            sample_id=f"{number}/{n}", token_ids=TOKENS, logprobs=LOGPROBS, reward=n, mask=FLAGS
        )
        for n in range(2)
    ]
    return trainer_pb2.TrainGroup(group_id=str(number), prompt_token_ids=TOKENS, samples=samples)
