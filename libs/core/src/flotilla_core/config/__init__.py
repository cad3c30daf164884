"""The one configuration system: models, loader and schema of `stack.yaml` and `run.yaml`.

Invariant: a section of a run is loaded when its name is first asked for, so that what concerns a stack alone does not
wait for the hundred models of a run.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flotilla_core.config.generators import (
    EngineConfig,
    FleetJudgeConfig,
    GeneratorConfig,
    JudgeConfig,
    SimConfig,
)
from flotilla_core.config.loading import completions, dump_yaml, json_schema, load, load_text, read_values
from flotilla_core.config.model import ConfigModel, IsolationConfig, SecretReference
from flotilla_core.config.stack import (
    AutoscaleConfig,
    BindConfig,
    CoordinatorConfig,
    EnvironmentServiceConfig,
    GangConfig,
    GatewayConfig,
    NatsConfig,
    RayConfig,
    RewardServiceConfig,
    SlurmConfig,
    StackConfig,
    TelemetryConfig,
    TrainerConfig,
)

if TYPE_CHECKING:
    from flotilla_core.config.algorithm import (
        AlgorithmConfig,
        DpoConfig,
        PolicyConfig,
        RewardModelConfig,
        SftConfig,
    )
    from flotilla_core.config.data import (
        CurriculumConfig,
        DataConfig,
        DynamicSamplingConfig,
        EvaluationConfig,
        HeldOutSet,
        RolloutConfig,
        SamplingConfig,
        StopConfig,
        TrainingSet,
    )
    from flotilla_core.config.rewards import (
        LARGEST_REWARD,
        AgreementConfig,
        RewardMode,
        RewardModelChoice,
        RewardTermConfig,
    )
    from flotilla_core.config.run import (
        DIRECT,
        LIVE_KEYS,
        EnvironmentConfig,
        HostedTrackerConfig,
        MlflowConfig,
        RunConfig,
        TensorBoardConfig,
        TrackerConfig,
        TrackioConfig,
        WandbConfig,
    )
    from flotilla_core.config.training import (
        BatchingConfig,
        CanaryConfig,
        CheckpointConfig,
        CriticConfig,
        LoraConfig,
        OptimizerConfig,
        WeightSyncConfig,
        bucket_size_mib,
    )

_OF_RUNS = ("training", "rewards", "data", "algorithm", "run")


def __getattr__(name: str) -> Any:
    for module in _OF_RUNS:
        found = vars(import_module(f"{__name__}.{module}"))
        if name in found:
            return globals().setdefault(name, found[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
