"""The configuration of a run: one frozen section per concern, and `Config`, which holds them all.

Flags and their help are derived from these sections: the field is the flag. An
invalid section cannot be built, so no reader of it checks again.
"""

from megatron_terapipe.config.batch import BatchConfig
from megatron_terapipe.config.checkpoint import CheckpointConfig
from megatron_terapipe.config.config import Config
from megatron_terapipe.config.data import DataConfig
from megatron_terapipe.config.deepspeed import DeepSpeedConfig
from megatron_terapipe.config.logging import LoggingConfig
from megatron_terapipe.config.model import ModelConfig
from megatron_terapipe.config.parallel import ParallelConfig
from megatron_terapipe.config.training import NumbersConfig, OptimizerConfig, PrecisionConfig, TrainingConfig

__all__ = [
    "BatchConfig",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "DeepSpeedConfig",
    "LoggingConfig",
    "ModelConfig",
    "NumbersConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "TrainingConfig",
]
