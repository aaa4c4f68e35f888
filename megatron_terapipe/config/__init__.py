"""What a run is told: one frozen section per concern, and `Config`, which holds them all.

Flags, their help and `docs/arguments.md` are derived from these sections: the field is the flag. An
invalid section cannot be built, so nobody downstream checks again.
"""

from megatron_terapipe.config.config import Config
from megatron_terapipe.config.model import ModelConfig
from megatron_terapipe.config.parallel import ParallelConfig
from megatron_terapipe.config.run import (
    CheckpointConfig,
    DataConfig,
    DeepSpeedConfig,
    LoggingConfig,
)
from megatron_terapipe.config.training import (
    BatchConfig,
    OptimizerConfig,
    PrecisionConfig,
    TrainingConfig,
)

__all__ = [
    "BatchConfig",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "DeepSpeedConfig",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "TrainingConfig",
]
