"""The whole configuration: every section, and the rules that hold between them."""

from dataclasses import dataclass

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.slicing import TokenSlices
from megatron_terapipe.config.balance import balanced_token_slices
from megatron_terapipe.config.batch import BatchConfig
from megatron_terapipe.config.checkpoint import CheckpointConfig
from megatron_terapipe.config.data import DataConfig
from megatron_terapipe.config.deepspeed import DeepSpeedConfig
from megatron_terapipe.config.logging import LoggingConfig
from megatron_terapipe.config.model import ModelConfig
from megatron_terapipe.config.optimizer import OptimizerConfig
from megatron_terapipe.config.parallel import ParallelConfig
from megatron_terapipe.config.precision import PrecisionConfig
from megatron_terapipe.config.training import TrainingConfig
from megatron_terapipe.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Everything a run is told. Each part of the program is handed its section, never the whole.

    Raises:
        ConfigError: if two sections do not fit together.
    """

    model: ModelConfig
    parallel: ParallelConfig
    batch: BatchConfig
    training: TrainingConfig
    optimizer: OptimizerConfig
    precision: PrecisionConfig
    data: DataConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig
    deepspeed: DeepSpeedConfig

    def __post_init__(self) -> None:
        """Check what no section can check alone."""
        self._check_stages()
        self.token_slices()
        self._check_precision()
        self._check_iterations()

    def token_slices(self) -> TokenSlices:
        """Cut the sequence as `--num-token-slices` and `--token-slices` ask.

        Raises:
            ConfigError: if the cut does not cover the sequence.
        """
        seq_length, count = self.model.seq_length, self.parallel.num_token_slices
        if count > seq_length:
            raise ConfigError(
                f"--num-token-slices {count} is more than the {seq_length} tokens of --seq-length: "
                f"give {seq_length} or less"
            )
        listed = self.parallel.listed_token_slices()
        if listed is not None:
            try:
                return listed.covering(seq_length)
            except PlanError as error:
                raise ConfigError(f"--token-slices: {error}") from None
        if self.parallel.token_slices == "balanced":
            return balanced_token_slices(self.model, count)
        return TokenSlices.uniform(seq_length, count)

    def num_micro_batches(self, data_parallel_size: int) -> int:
        """Micro-batches of one data-parallel rank in one optimizer step.

        Raises:
            ConfigError: if the global batch cannot be dealt evenly.
        """
        return self.batch.num_micro_batches(data_parallel_size)

    def global_batch_size(self, data_parallel_size: int) -> int:
        """Sequences of one optimizer step, over all data-parallel ranks.

        Raises:
            ConfigError: if they cannot be dealt evenly.
        """
        sequences = self.batch.micro_batch_size * data_parallel_size
        return sequences * self.num_micro_batches(data_parallel_size)

    def _check_stages(self) -> None:
        num_stages, num_layers = self.parallel.pipeline_model_parallel_size, self.model.num_layers
        if num_stages > num_layers:
            raise ConfigError(
                f"--pipeline-model-parallel-size {num_stages} is more than --num-layers {num_layers}: "
                f"give {num_layers} stages or less"
            )
        bounds = self.parallel.stage_bounds()
        if bounds is not None and bounds.num_layers != num_layers:
            raise ConfigError(
                f"--stage-partition {self.parallel.stage_partition} ends at {bounds.num_layers}, but "
                f"--num-layers is {num_layers}: end it with {num_layers}"
            )

    def _check_precision(self) -> None:
        precision, zero_stage = self.precision, self.optimizer.zero_stage
        # DeepSpeed 0.19 leaves the loss unscaled here, yet divides the gradients by the scale.
        if precision.fp16 and zero_stage == 0:
            raise ConfigError("--fp16 with --zero-stage 0 would train on wrongly scaled gradients: use --zero-stage 1")
        if precision.accumulate_allreduce_grads_in_fp32 and precision.bf16 and zero_stage == 0:
            raise ConfigError(
                "--accumulate-allreduce-grads-in-fp32 with --bf16 and --zero-stage 0 is not in DeepSpeed: "
                "use --zero-stage 1"
            )

    def _check_iterations(self) -> None:
        train_iters = self.training.train_iters
        decay_iters = self.optimizer.lr_decay_iters or train_iters
        if self.optimizer.lr_warmup_iters >= decay_iters:
            raise ConfigError(
                f"--lr-warmup-iters {self.optimizer.lr_warmup_iters} leaves nothing of the "
                f"{decay_iters} iterations until the learning rate has decayed: give "
                f"{decay_iters - 1} or less"
            )
        if self.logging.timeline and self.logging.timeline_iteration > train_iters:
            raise ConfigError(
                f"--timeline-iteration {self.logging.timeline_iteration} is after the last of "
                f"--train-iters {train_iters}: give {train_iters} or less"
            )
