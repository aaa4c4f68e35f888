"""A prepared run: its plan, data and settings, with every check that needs no process group.

`prepare` builds the `Run`; `with_whole_checkpoint` verifies its checkpoint, or falls back to an older one.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property, partial
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from deepspeed.accelerator import get_accelerator
from torch import cuda

from deepspeed_ext.plan.layout import ParallelLayout
from deepspeed_ext.plan.ops import PipelineShape, slow_planning
from deepspeed_ext.plan.programs.lowering import ProvenSchedule
from deepspeed_ext.runtime.cuda_environment import hardware_queues
from deepspeed_ext.runtime.launch import LaunchEnvironment
from deepspeed_ext.runtime.supported_versions import check_versions
from megatron_terapipe.checkpoint.agreement import from_first_rank
from megatron_terapipe.checkpoint.directories import keep_aside, names_model_folder, previous_tag, skipped_checkpoints
from megatron_terapipe.checkpoint.info import CheckpointInfo
from megatron_terapipe.checkpoint.model_files import files_of_run
from megatron_terapipe.checkpoint.verify import find_checkpoint, verify_checkpoint
from megatron_terapipe.config import Config, LoggingConfig
from megatron_terapipe.config.batch import BatchSizes, EvaluationBatch
from megatron_terapipe.config.data import DEFAULT_SPLIT, PARTS
from megatron_terapipe.data.datasets import (
    DatasetSplits,
    build_datasets,
    index_cache,
    mock_datasets,
    own_datasets,
    prepare_samples,
)
from megatron_terapipe.data.fill_in_the_middle import FillInTheMiddle
from megatron_terapipe.data.tokenizer import Tokenizer, build_tokenizer
from megatron_terapipe.data.tokenizer_checks import check_token_ids, check_tokenizer_records
from megatron_terapipe.data.tokenizer_settings import TokenizerSettings
from megatron_terapipe.devices import device_in
from megatron_terapipe.errors import AgreedCheckpointError, ConfigError, DataError, not_installed
from megatron_terapipe.planning import (
    Ask,
    Measure,
    check_schedule,
    pipeline_schedule,
    plan_run,
    prices_ops,
    proven_schedule,
    with_measured_layers,
)
from megatron_terapipe.records import Progress
from megatron_terapipe.training.deepspeed_config import deepspeed_config
from megatron_terapipe.training.optimizer import schedule_facts
from megatron_terapipe.training.trained_model import TrainedModel

_LONGEST_SHOWN = 120


@dataclass(frozen=True, kw_only=True)
class Run:
    """A prepared run, without communication between ranks."""

    config: Config
    """The configuration, with the vocabulary size."""
    launch: LaunchEnvironment
    layout: ParallelLayout
    tokenizer: Tokenizer
    tokenizer_settings: TokenizerSettings = field(default_factory=TokenizerSettings)
    checkpoint: tuple[Path, CheckpointInfo] | None
    """Directory and contents of the checkpoint to resume from, if there is one."""
    found: frozenset[str] = frozenset()
    """Fields of the configuration with values that the search found."""
    ask: Ask | None = None
    """Asks the first rank for settings that flags leave open; None = this process searches."""
    trained: TrainedModel = field(default_factory=TrainedModel)

    @cached_property
    def batch_sizes(self) -> BatchSizes:
        """Samples of every iteration."""
        return self.config.batch_sizes(self.layout.data_parallel_size)

    @property
    def evaluation_batch(self) -> EvaluationBatch:
        """Batch of an evaluation on each data-parallel rank."""
        return self.config.evaluation_batch(self.layout.data_parallel_size)

    @property
    def pipeline(self) -> PipelineShape:
        """Extent of the pipeline, in the largest iterations."""
        return self.config.parallel.pipeline(self.config.num_micro_batches(self.layout.data_parallel_size))

    @cached_property
    def proven_schedule(self) -> ProvenSchedule:
        """The programs of the run on its devices, as `prepare` proves them."""
        replicas = self.layout.data_parallel_size
        queues = hardware_queues() if get_accelerator().device_name() == "cuda" else None
        return proven_schedule(pipeline_schedule(self.config, replicas, self.ask), self.config, replicas, queues)

    @cached_property
    def deepspeed_settings(self) -> dict[str, Any]:
        """The configuration of DeepSpeed."""
        return deepspeed_config(self.config, self.layout)

    @property
    def start(self) -> Progress:
        """Progress at the start of this run."""
        if self.checkpoint is None or self.config.checkpoint.finetune:
            return Progress()
        info = self.checkpoint[1]
        return Progress(**{each.name: getattr(info, each.name) for each in fields(Progress)})

    @property
    def _planned_iters(self) -> int:
        """The last iteration for which data is prepared; the part before the start may have had other batches."""
        training, (done, consumed) = self.config.training, (self.start.iteration, self.start.consumed_samples)
        return training.train_iters or done + self.batch_sizes.iterations_within(training.length, consumed)

    @property
    def train_iters(self) -> int:
        """The last iteration: the planned one, or the one that reaches the tokens of the run."""
        planned, training, length = self._planned_iters, self.config.training, self.config.model.seq_length
        if not planned and not training.skip_train:
            size = self.batch_sizes.at(0)
            raise ConfigError(
                f"--train-samples {training.length} is less than one batch of {size} samples (--train-tokens are "
                f"divided by --seq-length {length}): give {size} samples or more"
            )
        if training.train_tokens is None:
            return planned
        samples = -(-training.train_tokens // length)
        ahead = self.batch_sizes.iterations_until(samples, self.start.consumed_samples)
        return min(planned, self.start.iteration + ahead)

    @cached_property
    def datasets(self) -> DatasetSplits:
        """Samples of training, validation and test: as many as are read, or only their numbers where none are."""
        if self.trained.makes_data(self.config):
            return self._own_datasets()
        config, replicas = self.config, self.layout.data_parallel_size
        rows, num_micro_batches = self.evaluation_batch
        ahead = max(0, self._planned_iters - self.start.iteration)
        train = self.batch_sizes.consumed_after(ahead, self.start.consumed_samples)
        evaluated = config.logging.eval_iters * num_micro_batches * rows * replicas
        valid, test = (evaluated * config.data.has(part) for part in ("valid", "test"))
        num_samples = (0 if config.training.skip_train else train, valid, test)
        if not config.data.mock_data:
            return self._datasets_of_files(num_samples)
        drawn_from = config.model.vocab_size
        assert drawn_from is not None, "set by vocab_size_of"
        seq_length, seed = config.model.seq_length, config.training.seed
        return mock_datasets(seq_length=seq_length, num_samples=num_samples, vocab_size=drawn_from, seed=seed)

    def _datasets_of_files(self, num_samples: tuple[int, int, int]) -> DatasetSplits:
        config, data, seed = self.config, self.config.data, self.config.training.seed

        def build(num_samples: tuple[int, int, int]) -> DatasetSplits:
            built = build_datasets(
                data,
                seq_length=config.model.seq_length,
                num_samples=num_samples,
                seed=seed,
                vocab_size=self.tokenizer.vocab_size,
                reads=not config.training.dry_run
                and self.layout.coordinate(self.launch.rank).pipe in reading_ranks(config),
            )
            if not data.fim_data:
                return built
            filled = partial(FillInTheMiddle, data=data, tokenizer=self.tokenizer, seed=seed)
            return DatasetSplits(**{part: each and filled(each) for part, each in vars(built).items()})

        try:
            return build(num_samples)
        except DataError:
            # The default split has a thousandth for testing. If that is too little, there is no test.
            if not num_samples[2] or data.split != DEFAULT_SPLIT:
                raise
        return build((*num_samples[:2], 0))

    def _own_datasets(self) -> DatasetSplits:
        """Return the samples that the program makes; none in a dry run."""
        config, trained = self.config, self.trained
        if config.training.dry_run:
            return DatasetSplits(train=None, valid=None, test=None)
        assert trained.datasets is not None and config.model.vocab_size is not None, "set by vocab_size_of"
        made = own_datasets(
            trained.datasets(config),
            trained.program,
            seq_length=config.model.seq_length,
            vocab_size=config.model.vocab_size,
            restarts=config.data.reset_position_ids,
        )
        return made if config.logging.eval_iters else replace(made, valid=None, test=None)

    @property
    def optimizer_schedule(self) -> dict[str, Any]:
        """Fields that set learning rate and weight decay over the training."""
        tokens = self.config.model.seq_length * (self.batch_sizes.final if self.config.training.unit == "iters" else 1)
        return schedule_facts(self.config.optimizer, self.config.training, tokens_per_step=tokens)

    @property
    def compared_flags(self) -> dict[str, Any]:
        """Flags whose change between a checkpoint and the run that loads it is reported."""
        data = self.config.data
        paths = ("data_path", *(f"{part}_data_path" for part in PARTS))
        return (
            self.optimizer_schedule
            | {name: _shown(getattr(data, name)) for name in paths}
            | {"split": data.split, "seed": self.config.training.seed, "global_batch_size": self.batch_sizes.final}
        )

    @cached_property
    def peak_tflops(self) -> float | None:
        """Peak of a device in TFLOP/s, of `--peak-tflops-per-device` or its data sheet; None where that is unknown."""
        return self.config.logging.peak_tflops_per_device or peak_tflops_here(self.config.precision.dtype)

    def prepare_data(self) -> None:
        """Check the files of the data, and draw the orders that this run begins with; of large data it takes minutes.

        Raises:
            DataError: if the data is of another tokenizer, or damaged.
        """
        data = self.config.data
        if self.launch.rank == 0 and not data.mock_data and not self.trained.makes_data(self.config):
            check_tokenizer_records(
                data.prefixes, self.tokenizer, reads_ends=data.reads_ends, verifies=data.verify_data
            )
            check_token_ids(data.prefixes, self.tokenizer, index_cache(data))
        for part, sample in zip(PARTS, (self.start.consumed_samples, 0, 0), strict=True):
            prepare_samples(getattr(self.datasets, part), sample)

    @cached_property
    def model_files(self) -> tuple[dict[str, bytes], list[str]]:
        """Files beside the weights that its checkpoints keep, such as the tokenizer, and names of others."""
        return files_of_run(self.checkpoint and self.checkpoint[0], asdict(self.tokenizer_settings))

    def checkpoint_info(self, progress: Progress) -> CheckpointInfo:
        """Return the description of this run in a checkpoint."""
        return CheckpointInfo(
            **asdict(progress),
            model=asdict(self.config.model),
            layout=self.layout,
            optimizer=None if self.config.checkpoint.no_save_optim else self.config.optimizer.optimizer,
            partitioned=self.config.optimizer.zero_stage > 0 or self.config.precision.bf16,
            tokenizer=asdict(self.tokenizer_settings),
            family=None if self.checkpoint is None else self.checkpoint[1].family,
            vocabulary_parts=self.config.parallel.vocabulary_parts,
            optimizer_schedule=self.compared_flags,
            program=self.trained.own_program,
        )


def prepare(
    config: Config,
    launch: LaunchEnvironment,
    ask: Ask | None = None,
    trained: TrainedModel | None = None,
    measure: Measure | None = None,
) -> Run:
    """Check a configuration against the ranks, the files and the packages, and return the run.

    A dry run needs no devices, and reads no samples.

    Args:
        ask: asks the first rank for settings that flags leave open; None = this process searches.
        trained: layers, loss and data; None for the GPT on the data of the flags.
        measure: measures layers that are not the GPT's; None in a dry run.
    """
    check_versions()
    trained = trained or TrainedModel()
    # First, so that its errors come before those of the tokenizer's file.
    config.parallel.layout(launch.world_size)
    tokenizer_settings = TokenizerSettings.of(config.data, config.model.vocab_size)
    tokenizer = build_tokenizer(tokenizer_settings)
    config = replace(config, model=replace(config.model, vocab_size=vocab_size_of(config, tokenizer)))
    if prices_ops(config):
        config = with_measured_layers(config, trained.own_program, measure, ask)
    config, found = plan_run(config, launch.world_size, ask)
    layout = config.parallel.layout(launch.world_size)
    _check_outputs(config)
    _check_profiled_ranks(config.logging, launch.world_size)
    if not config.training.dry_run:
        _check_accelerator(config)
    _check_packages(config.logging)
    checkpoint = find_checkpoint(
        config.checkpoint,
        config.model,
        layout,
        config.optimizer.optimizer,
        # One rank reads the files, and sends the result later; on one host its error ends all ranks already now.
        checks_files=launch.rank == 0 and launch.local_size == launch.world_size,
        program=trained.own_program,
    )
    run = Run(
        config=config,
        launch=launch,
        layout=layout,
        tokenizer=tokenizer,
        tokenizer_settings=tokenizer_settings,
        checkpoint=checkpoint,
        found=found,
        ask=ask,
        trained=trained,
    )
    # Their errors come before any process group.
    _ = run.train_iters, run.datasets, run.deepspeed_settings
    if config.training.dry_run:
        run.prepare_data()
    slow = slow_planning(run.pipeline)
    if slow is not None and launch.rank == 0:
        print(slow, file=sys.stderr, flush=True)
    assumption = check_schedule(run.proven_schedule, config, config.numbers_of_micro_batches(layout.data_parallel_size))
    if assumption is not None and launch.rank == 0:
        print(f"warning: {assumption}", flush=True)
    return run


def vocab_size_of(config: Config, tokenizer: Tokenizer) -> int:
    """Return the size of the model's vocabulary: the tokenizer's, or a larger one of `--vocab-size`."""
    size = config.model.vocab_size
    if size is None:
        return tokenizer.vocab_size
    if size < tokenizer.vocab_size and config.checkpoint.load is not None:
        raise ConfigError(
            f"the model of --load {config.checkpoint.load} has {size} ids, no room for the {tokenizer.vocab_size} of "
            f"{tokenizer.name}: give the tokenizer of the model, with ids below {size}"
        )
    if size < tokenizer.vocab_size:
        raise ConfigError(
            f"--vocab-size {size} has no room for the {tokenizer.vocab_size} tokens of {tokenizer.name}: "
            "raise it, or drop it"
        )
    return size


def peak_tflops_here(dtype: str) -> float | None:
    """Dense peak of this rank's device by its data sheet, in TFLOP/s.

    None if the device is not known, as on CPUs, and in fp32, where it depends on how torch multiplies.
    """
    if dtype == "fp32" or get_accelerator().device_name() != "cuda":
        return None
    device = device_in(cuda.get_device_name())
    return None if device is None else device.half_flops / 1e12


def _shown(words: tuple[str, ...] | None) -> str | None:
    """Return words of a flag in a line; of many only the first, with their number and a hash of all."""
    text = " ".join(words or ())
    if len(text) <= _LONGEST_SHOWN:
        return text or None
    return f"{text[:_LONGEST_SHOWN]}... ({len(text.split())} words, {sha256(text.encode()).hexdigest()[:8]})"


def _check_accelerator(config: Config) -> None:
    if config.parallel.distributed_backend == "nccl" and get_accelerator().device_name() == "cpu":
        raise ConfigError("--distributed-backend nccl needs GPUs, and there are none: use gloo, or drop it")
    for_nsight = config.logging.profile and not config.logging.use_pytorch_profiler
    if for_nsight and get_accelerator().device_name() != "cuda":
        raise ConfigError("--profile needs a CUDA device: add --use-pytorch-profiler and --tensorboard-dir")
    if config.precision.fp16 and not get_accelerator().is_fp16_supported():
        raise ConfigError(
            f"--fp16 is not supported by DeepSpeed on this {get_accelerator().device_name()}: use --bf16, or drop it"
        )


def _check_profiled_ranks(logging: LoggingConfig, world_size: int) -> None:
    wrong = [rank for rank in logging.profile_ranks if rank not in range(world_size)]
    if logging.profile and wrong:
        raise ConfigError(f"--profile-ranks {wrong[0]} is not a rank: give ranks from 0 to {world_size - 1}")


def _check_packages(logging: LoggingConfig) -> None:
    """Raise a `ConfigError` if a package that a flag needs is not installed."""
    needed = {
        "tensorboard": ("--tensorboard-dir", logging.tensorboard_dir),
        "wandb": ("--wandb-project", logging.wandb_project),
    }
    for package, (flag, value) in needed.items():
        if value is not None and find_spec(package) is None:
            raise ConfigError(f"{flag} {value} needs {not_installed(package)}")


def reading_ranks(config: Config) -> set[int]:
    """Return the pipeline ranks that read data: both ends, or all if attention separates documents.

    The stage after the last transformer layers is the last one, or the first with a part of the vocabulary.
    """
    pipeline = config.parallel.pipeline()
    ends = {0, config.parallel.num_stages, pipeline.last_stage} - {pipeline.num_stages}
    every = range(pipeline.num_stages) if config.data.separates_documents else ends
    return {pipeline.rank_of(stage) for stage in every}


def _check_outputs(config: Config) -> None:
    """Check now that outputs can be written, and not at the first checkpoint."""
    for flag, name in config.outputs.items():
        path = Path(name).absolute()
        try:
            above = next(parent for parent in (*path.parents, path) if parent.exists())
        except OSError as error:  # A name that is too long.
            raise ConfigError(f"{flag} {name} cannot be written ({error.strerror}): give another") from None
        if not above.is_dir():
            reason = f"{above} is not a directory"
        elif path.exists() and path.is_dir() == (flag in ("--metrics-file", "--report")):
            reason = "it is a directory" if path.is_dir() else "it is a file"
        elif not _is_writable(path if path.exists() else above):
            reason = f"{path if path.exists() else above} is not writable"
        else:
            continue
        raise ConfigError(f"{flag} {name} cannot be written, because {reason}: give another")


def _is_writable(path: Path) -> bool:
    """Whether a file can be written, or made in a directory: tried, because root has all rights even in /proc."""
    try:
        if path.is_dir():
            TemporaryFile(dir=path).close()
        else:
            # A pipe without a reader would block. Files of /proc refuse even an empty write.
            with open(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK), "wb", buffering=0) as file:
                file.write(b"")
    except OSError:
        return False
    return True


def with_whole_checkpoint(run: Run, given: Config, note: Callable[[str], None]) -> Run:
    """Return a run with a verified checkpoint, if it has one; a collective operation of all ranks.

    Raises:
        AgreedCheckpointError: on every rank alike, if the checkpoint is damaged, and no other can be used.
    """
    if run.checkpoint is None:
        return run
    tag = run.config.checkpoint.tag
    verified = _verified(run, given, note)
    if run.config.checkpoint.load_previous_if_damaged:
        for line in from_first_rank(partial(_keep_damaged_aside, verified, tag)):
            note(line)
    return verified


def _verified(run: Run, given: Config, note: Callable[[str], None]) -> Run:
    """Return the run, or one that resumes from an older checkpoint."""
    assert run.checkpoint is not None
    directory, info = run.checkpoint
    config = run.config.checkpoint
    try:
        verify_checkpoint(
            directory, info, run.config.model, weights_only=config.weights_only, reads=not config.no_verify_checkpoint
        )
    except AgreedCheckpointError as error:
        before = None
        if config.load_previous_if_damaged and not names_model_folder(directory):
            before = from_first_rank(partial(previous_tag, directory.parent, directory.name))
        if before is None:
            raise
        note(f" warning: {error}")
        older = replace(
            given, measured=run.config.measured, checkpoint=replace(given.checkpoint, load_tag=before, ckpt_step=None)
        )
        return _verified(prepare(older, run.launch, run.ask, run.trained), given, note)
    return run


def _keep_damaged_aside(run: Run, tag: str | None) -> list[str]:
    """Rename damaged checkpoints, so that later saves do not replace them; return lines for the log."""
    assert run.checkpoint is not None
    taken, save = run.checkpoint[0], run.config.checkpoint.save
    if names_model_folder(taken):
        return []
    # Only in the directory of --save.
    saves_here = save is not None and Path(save).resolve() == taken.parent.resolve()
    lines = []
    for damaged in skipped_checkpoints(taken, tag):
        kept = keep_aside(damaged, taken) if saves_here else damaged
        lines.append(f" warning: {damaged.name} is damaged, and kept as {kept}: resuming from {taken}")
    return lines
