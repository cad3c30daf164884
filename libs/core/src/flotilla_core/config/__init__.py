"""The one configuration system: models, loader and schema of `stack.yaml` and `run.yaml`."""

from __future__ import annotations

from flotilla_core.config.algorithm import AlgorithmConfig, PolicyConfig, SftConfig
from flotilla_core.config.autoscale import AutoscaleConfig
from flotilla_core.config.batching import BatchingConfig
from flotilla_core.config.checkpoint import CheckpointConfig
from flotilla_core.config.critic import CriticConfig
from flotilla_core.config.data import DataConfig, TrainingSet
from flotilla_core.config.evaluation import EvaluationConfig, StopConfig
from flotilla_core.config.loader import load, load_text, read_values
from flotilla_core.config.lora import LoraConfig
from flotilla_core.config.model import ConfigModel
from flotilla_core.config.optimizer import OptimizerConfig
from flotilla_core.config.output import dump_yaml, json_schema
from flotilla_core.config.preferences import DpoConfig, RewardModelConfig
from flotilla_core.config.reward import LARGEST_REWARD, RewardTermConfig
from flotilla_core.config.rollout import DynamicSamplingConfig, RolloutConfig, SamplingConfig
from flotilla_core.config.run import RunConfig
from flotilla_core.config.stack import (
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
from flotilla_core.config.weights import CanaryConfig, WeightSyncConfig

__all__ = [
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
    "LoraConfig",
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
    "TrainerConfig",
    "TrainingSet",
    "WeightSyncConfig",
    "dump_yaml",
    "json_schema",
    "load",
    "load_text",
    "read_values",
]
