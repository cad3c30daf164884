"""Every span name and attribute key that Flotilla writes.

`rl.*` follows the open proposal for reinforcement learning in the OpenTelemetry conventions, `rpc.*` follows those
conventions, and `flotilla.*` is ours. Nothing else in the code spells a name out.
"""

from __future__ import annotations

# The loop (coordinator).
RL_LOOP = "rl.loop"
RL_STEP = "rl.step"
RL_SAMPLE = "rl.sample"
RL_REWARD = "rl.reward"
RL_TRAIN = "rl.train"
RL_SYNC = "rl.sync"
RL_SYNC_CANARY = "rl.sync.canary"
RL_CATCH_UP = "rl.catch_up"
RL_SLEEP = "rl.sleep"
RL_WAKE = "rl.wake"
RL_EVALUATE = "rl.evaluate"
RL_CHECKPOINT = "rl.checkpoint"

# The trainer's front and its ranks.
TRAINER_LOGPROBS = "trainer.logprobs"
TRAINER_VALUES = "trainer.values"
TRAINER_FORWARD_BACKWARD = "trainer.forward_backward"
TRAINER_OPTIMIZER_STEP = "trainer.optimizer_step"
TRAINER_PUBLISH = "trainer.publish"
TRAINER_SAVE = "trainer.save"
TRAINER_LOAD = "trainer.load"
TRAINER_EXPORT = "trainer.export"

# The generator and its workers.
GENERATOR_STAGE = "generator.stage"
GENERATOR_COMMIT = "generator.commit"
GENERATOR_JOIN = "generator.join"
GENERATOR_SLEEP = "generator.sleep"
GENERATOR_WAKE = "generator.wake"

# What a span is about.
RUN_ID = "flotilla.run_id"
STEP = "flotilla.step"
POLICY_VERSION = "flotilla.policy_version"
GROUP_ID = "flotilla.group_id"
UPDATE_ID = "flotilla.update_id"
ROLE = "flotilla.role"
ATTEMPT = "flotilla.attempt"
SAMPLES = "flotilla.samples"
GROUPS = "flotilla.groups"
BYTES = "flotilla.bytes"
STALL_SECONDS = "flotilla.stall_s"
REWARD_MEAN = "flotilla.reward_mean"
OUTCOME = "flotilla.outcome"
EPOCH = "flotilla.weight_group_epoch"

# Shared conventions.
RPC_SYSTEM_NAME = "rpc.system.name"
RPC_METHOD = "rpc.method"
RPC_STATUS_CODE = "rpc.status_code"
ERROR_TYPE = "error.type"
SERVICE_NAME = "service.name"
SERVICE_INSTANCE_ID = "service.instance.id"
HOST_NAME = "host.name"
PROCESS_PID = "process.pid"

# An event on a call's span: this was not the first try of the call.
RETRY_EVENT = "flotilla.retry"

GENERATE = "flotilla.generator.v1.GeneratorService/Generate"
"""The span of a request to a generator, whether it has a call of its own or shares one."""

UNTRACED_PREFIXES = ("/grpc.", "/opentelemetry.")
"""Methods of foreign services that would only be noise: health, reflection, channelz, span export itself."""

UNTRACED_METHODS = frozenset(
    {
        "/flotilla.common.v1.OperateService/GetActivity",
        "/flotilla.common.v1.OperateService/TailLog",
        "/flotilla.coordinator.v1.CoordinatorService/ListServices",
        "/flotilla.coordinator.v1.CoordinatorService/QueryTimeline",
        "/flotilla.coordinator.v1.CoordinatorService/WatchRun",
        # Each request in it has a span of its own.
        "/flotilla.generator.v1.GeneratorService/GenerateMany",
        "/flotilla.generator.v1.GeneratorService/GetWeightStatus",
        "/flotilla.launcher.v1.LauncherService/List",
        "/flotilla.trainer.v1.RankService/RunRank",
        "/flotilla.weights.v1.StoreService/Ask",
    }
)
"""Polls and watches of ours: they say nothing about the work and would drown it."""
