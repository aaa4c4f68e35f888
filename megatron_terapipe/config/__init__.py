"""The configuration of a run: one frozen section per concern, and `Config`, which holds them all.

Flags and their help are derived from these sections: the field is the flag. An
invalid section cannot be built, so no reader of it checks again.
"""

from megatron_terapipe.config.batch import BatchConfig as BatchConfig
from megatron_terapipe.config.checkpoint import CheckpointConfig as CheckpointConfig
from megatron_terapipe.config.config import Config as Config
from megatron_terapipe.config.data import DataConfig as DataConfig
from megatron_terapipe.config.deepspeed import DeepSpeedConfig as DeepSpeedConfig
from megatron_terapipe.config.logging import LoggingConfig as LoggingConfig
from megatron_terapipe.config.model import ModelConfig as ModelConfig
from megatron_terapipe.config.parallel import ParallelConfig as ParallelConfig
from megatron_terapipe.config.training import NumbersConfig as NumbersConfig
from megatron_terapipe.config.training import OptimizerConfig as OptimizerConfig
from megatron_terapipe.config.training import PrecisionConfig as PrecisionConfig
from megatron_terapipe.config.training import TrainingConfig as TrainingConfig
