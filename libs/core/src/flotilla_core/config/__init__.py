"""The one configuration system: models, loader and schema of `stack.yaml` and `run.yaml`."""

from __future__ import annotations

from flotilla_core.config.algorithm import (
    AlgorithmConfig,
    DpoConfig,
    PolicyConfig,
    RewardModelConfig,
    SftConfig,
)
from flotilla_core.config.data import (
    LARGEST_REWARD,
    DataConfig,
    DynamicSamplingConfig,
    EvaluationConfig,
    HeldOutSet,
    RewardTermConfig,
    RolloutConfig,
    SamplingConfig,
    StopConfig,
    TrainingSet,
)
from flotilla_core.config.loading import dump_yaml, json_schema, load, load_text, read_values
from flotilla_core.config.model import ConfigModel
from flotilla_core.config.roles import CriticConfig
from flotilla_core.config.run import RunConfig
from flotilla_core.config.stack import (
    AutoscaleConfig,
    BindConfig,
    CoordinatorConfig,
    GangConfig,
    GeneratorConfig,
    NatsConfig,
    RewardServiceConfig,
    SimConfig,
    StackConfig,
    TelemetryConfig,
    TrainerConfig,
)
from flotilla_core.config.trackers import (
    DIRECT,
    HostedTrackerConfig,
    MlflowConfig,
    TensorBoardConfig,
    TrackerConfig,
    TrackioConfig,
    WandbConfig,
)
from flotilla_core.config.training import (
    BatchingConfig,
    CanaryConfig,
    CheckpointConfig,
    LoraConfig,
    OptimizerConfig,
    WeightSyncConfig,
    bucket_size_mib,
)

__all__ = [
    "DIRECT",
    "LARGEST_REWARD",
    "AlgorithmConfig",
    "AutoscaleConfig",
    "BatchingConfig",
    "BindConfig",
    "CanaryConfig",
    "CheckpointConfig",
    "ConfigModel",
    "CoordinatorConfig",
    "CriticConfig",
    "DataConfig",
    "DpoConfig",
    "DynamicSamplingConfig",
    "EvaluationConfig",
    "GangConfig",
    "GeneratorConfig",
    "HeldOutSet",
    "HostedTrackerConfig",
    "LoraConfig",
    "MlflowConfig",
    "NatsConfig",
    "OptimizerConfig",
    "PolicyConfig",
    "RewardModelConfig",
    "RewardServiceConfig",
    "RewardTermConfig",
    "RolloutConfig",
    "RunConfig",
    "SamplingConfig",
    "SftConfig",
    "SimConfig",
    "StackConfig",
    "StopConfig",
    "TelemetryConfig",
    "TensorBoardConfig",
    "TrackerConfig",
    "TrackioConfig",
    "TrainerConfig",
    "TrainingSet",
    "WandbConfig",
    "WeightSyncConfig",
    "bucket_size_mib",
    "dump_yaml",
    "json_schema",
    "load",
    "load_text",
    "read_values",
]
