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
from flotilla_core.config.loading import completions, dump_yaml, json_schema, load, load_text, read_values
from flotilla_core.config.model import ConfigModel, SecretReference
from flotilla_core.config.run import (
    DIRECT,
    HostedTrackerConfig,
    MlflowConfig,
    RunConfig,
    TensorBoardConfig,
    TrackerConfig,
    TrackioConfig,
    WandbConfig,
)
from flotilla_core.config.stack import (
    AutoscaleConfig,
    BindConfig,
    CoordinatorConfig,
    GangConfig,
    GeneratorConfig,
    NatsConfig,
    RayConfig,
    RewardServiceConfig,
    SimConfig,
    SlurmConfig,
    StackConfig,
    TelemetryConfig,
    TrainerConfig,
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
