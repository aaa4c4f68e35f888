"""The whole configuration: every section, and the rules that hold between them."""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass
from math import ceil
from typing import TYPE_CHECKING, Any, get_type_hints

from deepspeed_ext.plan.slicing import TokenSlices
from megatron_terapipe.config.batch import BatchConfig, BatchSizes, EvaluationBatch
from megatron_terapipe.config.checkpoint import CheckpointConfig
from megatron_terapipe.config.data import DataConfig
from megatron_terapipe.config.deepspeed import DeepSpeedConfig
from megatron_terapipe.config.flops import balanced_token_slices, document_cuts
from megatron_terapipe.config.logging import LoggingConfig
from megatron_terapipe.config.model import ModelConfig, why_vocabulary_stays_whole
from megatron_terapipe.config.options import flag
from megatron_terapipe.config.parallel import AUTO, BALANCED, BY_DOCUMENTS, ParallelConfig
from megatron_terapipe.config.training import (
    LearningRateSteps,
    NumbersConfig,
    OptimizerConfig,
    PrecisionConfig,
    TrainingConfig,
)
from megatron_terapipe.errors import ConfigError, errors_in

if TYPE_CHECKING:
    from deepspeed_ext.plan.solve.cuts import DocumentCuts


_GROUPS = {"mamba2": "--mamba-num-groups", "gated-delta-net": "--linear-num-key-heads"}
"""Flags of the groups that ranks share, by the kind of recurrence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """The whole configuration of a run. Each part of the program gets its section, never the whole."""

    model: ModelConfig
    parallel: ParallelConfig
    batch: BatchConfig
    training: TrainingConfig
    optimizer: OptimizerConfig
    precision: PrecisionConfig
    data: DataConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig
    numbers: NumbersConfig
    deepspeed: DeepSpeedConfig
    own: Namespace = field(default_factory=Namespace)
    """Values of the flags that the program of a user's own model adds."""
    measured: Mapping[str, Any] | None = field(default=None, repr=False)
    """Profile, as its JSON, of the layers of a user's own model, measured before the run; None = not measured."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "training", self.training.for_sequences(self.model.seq_length))
        self._check_stages()
        self._check_tensor_parallel()
        self._check_sequence_parallel()
        self._check_expert_parallel()
        self._check_vocabulary_stages()
        if self.parallel.token_slices != AUTO:
            self.token_slices()
        self._check_document_cuts()
        self._check_precision()
        self._check_kept_latents()
        self._check_iterations()

    @classmethod
    def sections(cls) -> dict[str, type[Any]]:
        """Return the classes of the sections, whose fields are the flags of the trainer, by the name of the field."""
        hints = get_type_hints(cls).items()
        return {name: kind for name, kind in hints if isinstance(kind, type) and is_dataclass(kind)}

    def token_slices(self) -> TokenSlices:
        """Return the token slices of `--num-token-slices` and `--token-slices`; equal ones, where documents decide."""
        assert self.parallel.token_slices != AUTO, "found by `plan_pipeline`"
        seq_length, count = self.model.seq_length, self.parallel.num_token_slices
        if count > seq_length:
            raise ConfigError(
                f"--num-token-slices {count} is more than the {seq_length} tokens of --seq-length: "
                f"give {seq_length} or less"
            )
        granularity = self.token_granularity
        listed = self.parallel.listed_token_slices()
        with errors_in("--token-slices"):
            if listed is not None:
                cut = listed.covering(seq_length)
            elif self.parallel.token_slices == BALANCED:
                cut = balanced_token_slices(self.model, count, granularity=granularity)
            else:
                cut = TokenSlices.uniform(seq_length, count, granularity=granularity)
        odd = [length for length in cut.lengths if length % granularity]
        if odd:
            size = self.parallel.ds_sequence_parallel_size
            flags = [f"--ds-sequence-parallel-size {size}"] * (size > 1)
            flags += ["--sequence-parallel"] * self.parallel.sequence_parallel
            raise ConfigError(
                f"{' and '.join(flags)} deal{'s' * (len(flags) == 1)} each token slice to {granularity} ranks, but one "
                f"has {odd[0]} tokens: give lengths, and a --seq-length, that are multiples of {granularity}"
            )
        return cut

    def document_cuts(self) -> "DocumentCuts | None":
        """Return the cuts of micro-batches by their documents; None if all micro-batches are cut alike."""
        if self.parallel.token_slices != BY_DOCUMENTS:
            return None
        return document_cuts(self.model, len(self.token_slices()), granularity=self.token_granularity)

    def _check_document_cuts(self) -> None:
        if self.parallel.token_slices == BY_DOCUMENTS and not self.data.reset_attention_mask:
            raise ConfigError(
                f"--token-slices {BY_DOCUMENTS} counts attention within documents, which the model attends across: add "
                f"--reset-attention-mask, or give --token-slices {BALANCED}"
            )

    @property
    def token_granularity(self) -> int:
        """Tokens that each token-slice length is a multiple of: as many as ranks share its tokens."""
        sharing = self.parallel.tensor_model_parallel_size if self.parallel.sequence_parallel else 1
        return self.parallel.ds_sequence_parallel_size * sharing

    @property
    def outputs(self) -> dict[str, str]:
        """Files and directories that a run writes, by flag."""
        logging = self.logging
        found = {
            "--save": self.checkpoint.save,
            "--metrics-file": logging.metrics_file,
            "--report": logging.report,
            "--timeline": logging.timeline,
            "--ledger-directory": logging.ledger_directory,
            "--tensorboard-dir": logging.tensorboard_dir,
            "--wandb-save-dir": logging.wandb_save_dir,
        }
        return {name: path for name, path in found.items() if path is not None}

    def num_micro_batches(self, data_parallel_size: int) -> int:
        """Micro-batches of one data-parallel rank in one optimizer step, the largest one."""
        return self.global_batch_size(data_parallel_size) // (self.batch.micro_batch_size * data_parallel_size)

    def numbers_of_micro_batches(self, data_parallel_size: int) -> set[int]:
        """Micro-batches of one data-parallel rank in the smallest optimizer step of a run, and in the largest."""
        sizes, sequences = self.batch_sizes(data_parallel_size), self.batch.micro_batch_size * data_parallel_size
        return {sizes.smallest // sequences, sizes.largest // sequences}

    def global_batch_size(self, data_parallel_size: int) -> int:
        """Sequences of one optimizer step, the largest one, over all data-parallel ranks."""
        return self.batch_sizes(data_parallel_size).largest

    def batch_sizes(self, data_parallel_size: int) -> BatchSizes:
        """Sequences of every optimizer step, over all data-parallel ranks."""
        return self.batch.sizes(data_parallel_size, self.model.seq_length)

    def evaluation_batch(self, data_parallel_size: int) -> EvaluationBatch:
        """Batch of an evaluation on each data-parallel rank."""
        return self.batch.evaluation(data_parallel_size, self.model.seq_length)

    def _check_stages(self) -> None:
        parallel, num_layers = self.parallel, self.model.num_layers
        num_stages, model_chunks = parallel.num_stages, parallel.num_model_chunks
        bounds = parallel.stage_bounds()
        if num_stages > num_layers and bounds is None:
            times = f" x --num-model-chunks {model_chunks} = {num_stages}" if model_chunks > 1 else ""
            raise ConfigError(
                f"--pipeline-model-parallel-size {parallel.pipeline_model_parallel_size}{times} is more than "
                f"--num-layers {num_layers}: give {num_layers} stages or less"
            )
        if bounds is not None and bounds.num_layers != num_layers:
            raise ConfigError(
                f"--stage-partition {self.parallel.stage_partition} ends at {bounds.num_layers}, but "
                f"--num-layers is {num_layers}: end it with {num_layers}"
            )

        if self.model.mtp_num_layers and parallel.stage_partition == "parameters":
            raise ConfigError(
                "--stage-partition parameters may part the output layer from the layers of --mtp-num-layers, which use "
                "its weight: use uniform, or a list of transformer layers"
            )

    def _check_tensor_parallel(self) -> None:
        size = self.parallel.tensor_model_parallel_size
        rows = [] if self.model.vocab_rows is None else [("--vocab-rows", self.model.vocab_rows)]
        for block in self.model.blocks:
            # Tensor-parallel ranks share no expert.
            cut = ("--moe-shared-expert-intermediate-size", block.shared_ffn_hidden_size)
            if not block.num_experts:
                cut = ("--ffn-hidden-size", block.ffn_hidden_size)
            rows += [("--num-key-value-heads", block.num_key_value_heads), cut]
        for name, number in (*self._shared_by_ranks, *rows):
            if number % size:
                raise ConfigError(
                    f"{name} {number} is not a multiple of --tensor-model-parallel-size {size}: change one of them"
                )

    @property
    def _shared_by_ranks(self) -> list[tuple[str, int]]:
        """Heads, and groups of layers with a state, that tensor- and sequence-parallel ranks share, by flag."""
        blocks = self.model.blocks
        attends = any(block.num_key_value_heads for block in blocks)
        states = {block.recurrence.kind: block.recurrence for block in blocks if block.recurrence is not None}
        return [
            *([("--num-attention-heads", self.model.num_attention_heads)] if attends else []),
            *((_GROUPS[kind], state.num_groups) for kind, state in states.items()),
        ]

    def _check_sequence_parallel(self) -> None:
        """Check that the heads of each tensor-parallel rank can be dealt to the sequence-parallel ranks."""
        size, tensor = self.parallel.ds_sequence_parallel_size, self.parallel.tensor_model_parallel_size
        times = f" x --tensor-model-parallel-size {tensor} = {size * tensor}" if tensor > 1 else ""
        for name, number in self._shared_by_ranks:
            if number % (size * tensor):
                shared = "heads" if name == "--num-attention-heads" else "groups"
                raise ConfigError(
                    f"{name} {number} is not a multiple of --ds-sequence-parallel-size {size}{times}, whose ranks "
                    f"share the {shared}: change one of them"
                )
        for block in self.model.blocks:
            # Where ranks outnumber key heads, several have the same one.
            own = block.num_key_value_heads // tensor
            if own and own % size and size % own:
                each = f", which are {own} on each of {tensor} tensor-parallel ranks," if tensor > 1 else ""
                raise ConfigError(
                    f"--num-key-value-heads {block.num_key_value_heads}{each} can be dealt to "
                    f"--ds-sequence-parallel-size {size} neither by whole heads nor by whole ranks: give a multiple or "
                    f"a divisor of {size}"
                )

    def _check_expert_parallel(self) -> None:
        experts, size = self.model.num_experts, self.parallel.expert_model_parallel_size
        tensor = self.parallel.tensor_model_parallel_size
        if experts is None:
            if size > 1:
                raise ConfigError(
                    f"--expert-model-parallel-size {size} needs a model with experts: add --num-experts, or drop it"
                )
        elif experts % size:
            raise ConfigError(
                f"--num-experts {experts} is not a multiple of --expert-model-parallel-size {size}, whose ranks have "
                "as many experts each: change one of them"
            )
        elif tensor > 1 and not self.parallel.sequence_parallel:
            raise ConfigError(
                f"--num-experts {experts} with --tensor-model-parallel-size {tensor} and without --sequence-parallel "
                "would compute every token's experts on each tensor-parallel rank: add --sequence-parallel"
            )
        elif self.model.moe_token_dispatcher_type == "allgather" and self.expert_ranks_cut_apart:
            raise ConfigError(
                f"--moe-token-dispatcher-type allgather needs as many tokens on each of {size} expert-parallel ranks, "
                f"and --token-slices {BY_DOCUMENTS} gives replicas other lengths: use alltoall, or --token-slices "
                f"{BALANCED}"
            )
        if self.model.balances_documents and not self.data.separates_documents:
            raise ConfigError(
                "--moe-router-load-balancing-type document_aux_loss balances each document, and documents of a sample "
                "are not separated: add --reset-attention-mask, or take seq_aux_loss"
            )

    @property
    def expert_ranks_cut_apart(self) -> bool:
        """Whether expert-parallel ranks are of several replicas, whose token slices have lengths of their own."""
        parallel = self.parallel
        of_stage = parallel.ranks_of_a_replica // parallel.pipeline_model_parallel_size
        return parallel.token_slices == BY_DOCUMENTS and of_stage % parallel.expert_model_parallel_size > 0

    def _check_vocabulary_stages(self) -> None:
        parallel, model = self.parallel, self.model
        if not parallel.vocabulary_stages:
            return
        whole = why_vocabulary_stays_whole(
            model, pipeline_ranks=parallel.vocabulary_parts, tensor_ranks=parallel.tensor_model_parallel_size
        )
        if whole is not None:
            raise ConfigError(whole)
        if parallel.stage_partition in ("parameters", AUTO):
            raise ConfigError(
                "--vocabulary-stages deals out the output layer itself, and --stage-partition "
                f"{parallel.stage_partition} weighs it: use uniform, or a list of transformer layers"
            )
        if parallel.token_slices == BY_DOCUMENTS:
            raise ConfigError(
                f"--vocabulary-stages passes messages whose shapes stay the same, and --token-slices {BY_DOCUMENTS} "
                "changes them from one micro-batch to the next: drop one of them"
            )

    def _check_precision(self) -> None:
        precision, zero_stage = self.precision, self.optimizer.zero_stage
        if not precision.needs_zero or zero_stage != 0:
            return
        if precision.fp16:
            raise ConfigError("--fp16 with --zero-stage 0 would train on wrongly scaled gradients: use --zero-stage 1")
        raise ConfigError(
            "--accumulate-allreduce-grads-in-fp32 with --bf16 and --zero-stage 0 is not in DeepSpeed: use "
            "--zero-stage 1"
        )

    def _check_kept_latents(self) -> None:
        if self.training.latent_kept == "latent" and all(block.latent is None for block in self.model.blocks):
            raise ConfigError(
                "--latent-kept latent has no effect without layers of --multi-latent-attention: add it, or drop "
                "--latent-kept"
            )

    def _tokens_per_step(self) -> int:
        """Tokens of a sample or of an iteration, whichever training is counted in."""
        optimizer, seq_length = self.optimizer, self.model.seq_length
        if self.training.unit == "samples":
            return seq_length
        for name in ("lr_decay_tokens", "lr_warmup_tokens"):
            if getattr(optimizer, name) is not None and (
                self.batch.global_batch_size is None
                or self.batch.rampup_batch_size is not None
                or self.batch.step_batch_size_schedule is not None
            ):
                raise ConfigError(
                    f"{flag(name)} {getattr(optimizer, name)} with --train-iters needs a constant "
                    "--global-batch-size: give one, or use --train-samples"
                )
        return seq_length * (self.batch.global_batch_size or 1)

    def _check_iterations(self) -> None:
        training, optimizer, unit = self.training, self.optimizer, self.training.unit
        other = "samples" if unit == "iters" else "iters"
        for name in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
            if getattr(optimizer, f"{name}_{other}"):
                given, right = flag(f"{name}_{other}"), flag(f"{name}_{unit}")
                raise ConfigError(
                    f"{given} {getattr(optimizer, f'{name}_{other}')} does not go with --train-{unit}: use {right}"
                )
        counted = "iterations" if unit == "iters" else "samples"
        steps = LearningRateSteps.of(optimizer, training, tokens_per_step=self._tokens_per_step())
        decay, last = steps.decay, getattr(optimizer, f"lr_wsd_decay_{unit}")
        if steps.warmup >= decay:
            in_tokens = optimizer.lr_warmup_tokens is not None
            warmup = "lr_warmup_tokens" if in_tokens else f"lr_warmup_{unit}"
            most = int((decay - 1) * self._tokens_per_step()) if in_tokens else ceil(decay) - 1
            raise ConfigError(
                f"{flag(warmup)} {getattr(optimizer, warmup)} is not less than the {decay:.12g} {counted} until the "
                f"learning rate has decayed: give {most} or less"
            )
        if optimizer.lr_decay_style == "WSD" and last is None:
            raise ConfigError(f"--lr-decay-style WSD needs the length of its decay: add --lr-wsd-decay-{unit}")
        if optimizer.lr_decay_style == "WSD" and not 0 < last <= decay:
            raise ConfigError(
                f"--lr-decay-style WSD decays in the last --lr-wsd-decay-{unit} {last} of {decay:.12g} {counted}: "
                f"give 1 to {int(decay)}"
            )
        if training.skip_train and not self.logging.eval_iters:
            raise ConfigError("--skip-train with --eval-iters 0 neither trains nor evaluates: drop one of them")
        measured, end = self.logging.timeline_iterations, training.train_iters
        profiled = self.logging.profiled_iterations
        if profiled and end and profiled[-1] > end:
            raise ConfigError(
                f"--profile-step-end {self.logging.profile_step_end} is after the last of --train-iters {end}: give "
                f"{end} or less"
            )
        if measured is not None and end and self.logging.measured_iterations(0, end)[-1].stop > end + 1:
            raise ConfigError(
                f"--timeline-iterations {measured} is beyond the last of --train-iters {end}: give {end} or less"
            )
