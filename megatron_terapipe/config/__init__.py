"""The configuration of a run: one frozen section per concern, and `Config`, which holds them all.

Flags, their help and `docs/reference/arguments.md` are derived from these sections: the field is the flag. An
invalid section cannot be built, so nobody downstream checks again.
"""

from megatron_terapipe.config.config import Config
from megatron_terapipe.config.files.checkpoint import CheckpointConfig
from megatron_terapipe.config.files.data import DataConfig
from megatron_terapipe.config.files.deepspeed import DeepSpeedConfig
from megatron_terapipe.config.files.logging import LoggingConfig
from megatron_terapipe.config.model.model import ModelConfig
from megatron_terapipe.config.parallel.parallel import ParallelConfig
from megatron_terapipe.config.training.batch import BatchConfig
from megatron_terapipe.config.training.numbers import NumbersConfig
from megatron_terapipe.config.training.optimizer import OptimizerConfig
from megatron_terapipe.config.training.precision import PrecisionConfig
from megatron_terapipe.config.training.training import TrainingConfig

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
