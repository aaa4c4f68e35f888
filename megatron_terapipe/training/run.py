"""A run, prepared: all that can be wrong with it is found here, before any process group exists."""

import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from deepspeed_ext.plan.layout import ParallelLayout
from deepspeed_ext.runtime.initialize import check_deepspeed_version
from megatron_terapipe.config import Config
from megatron_terapipe.data.gpt_dataset import DatasetSplits, build_datasets
from megatron_terapipe.data.tokenizer import Tokenizer, build_tokenizer
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.training.checkpoint import CheckpointInfo, find_checkpoint
from megatron_terapipe.training.deepspeed_config import deepspeed_config
from megatron_terapipe.training.launch_environment import LaunchEnvironment


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything a run needs that takes no other rank to know.

    Attributes:
        config: the configuration, its vocabulary size known.
        launch: this process among all.
        layout: the parallel axes over the ranks.
        tokenizer: of the data.
        datasets: the samples of training and validation.
        deepspeed_settings: the configuration of DeepSpeed.
        checkpoint: directory and contents of the checkpoint to go on from, if there is one.
    """

    config: Config
    launch: LaunchEnvironment
    layout: ParallelLayout
    tokenizer: Tokenizer
    datasets: DatasetSplits
    deepspeed_settings: dict[str, Any]
    checkpoint: tuple[Path, CheckpointInfo] | None

    @property
    def global_batch_size(self) -> int:
        """Samples of one iteration."""
        return self.config.global_batch_size(self.layout.data_parallel_size)

    @property
    def start_iteration(self) -> int:
        """Iterations done before."""
        if self.checkpoint is None or self.config.checkpoint.finetune:
            return 0
        return self.checkpoint[1].iteration

    def consumed_samples(self, iteration: int) -> int:
        """Samples trained on once `iteration` iterations are done, over all runs."""
        before = self.checkpoint[1].consumed_samples if self.start_iteration and self.checkpoint else 0
        return before + (iteration - self.start_iteration) * self.global_batch_size

    def checkpoint_info(self, iteration: int) -> CheckpointInfo:
        """What a checkpoint after `iteration` iterations says of this run."""
        data = self.config.data
        return CheckpointInfo(
            iteration=iteration,
            consumed_samples=self.consumed_samples(iteration),
            model=asdict(self.config.model),
            layout=asdict(self.layout),
            zero_stage=self.config.optimizer.zero_stage,
            tokenizer={
                "tokenizer_type": data.tokenizer_type,
                "vocab_file": data.vocab_file,
                "merge_file": data.merge_file,
            },
        )


def prepare(config: Config, launch: LaunchEnvironment) -> Run:
    """Check a configuration against the ranks, the files and the packages that are really there.

    Raises:
        UserError: if anything does not fit: a `ConfigError`, `DataError` or `CheckpointError` by what is to blame.
    """
    check_deepspeed_version()
    layout = config.parallel.layout(launch.world_size)
    data = config.data
    tokenizer = build_tokenizer(data.tokenizer_type, _path(data.vocab_file), _path(data.merge_file))
    vocab_size = config.model.vocab_size
    if vocab_size is not None and vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"--vocab-size {vocab_size} has no room for the {tokenizer.vocab_size} tokens of {data.tokenizer_type}: "
            "raise it, or leave it out"
        )
    config = replace(config, model=replace(config.model, vocab_size=vocab_size or tokenizer.vocab_size))
    global_batch_size = config.global_batch_size(layout.data_parallel_size)
    _check_outputs(config)
    checkpoint = find_checkpoint(config.checkpoint, config.model, layout, config.optimizer.zero_stage)
    has_validation = config.logging.eval_iters > 0 and config.data.split_shares()[1] > 0
    datasets = build_datasets(
        config.data,
        seq_length=config.model.seq_length,
        num_samples=(
            config.training.train_iters * global_batch_size,
            config.logging.eval_iters * global_batch_size if has_validation else 0,
            0,
        ),
        seed=config.training.seed,
    )
    return Run(
        config=config,
        launch=launch,
        layout=layout,
        tokenizer=tokenizer,
        datasets=datasets,
        deepspeed_settings=deepspeed_config(config, layout),
        checkpoint=checkpoint,
    )


def _check_outputs(config: Config) -> None:
    """Find out now that an output cannot be written, and not when the first checkpoint is due."""
    outputs = {
        "--save": config.checkpoint.save,
        "--metrics-file": config.logging.metrics_file,
        "--timeline": config.logging.timeline,
    }
    for flag, name in outputs.items():
        if name is None:
            continue
        path = Path(name).absolute()
        above = next(parent for parent in path.parents if parent.exists())
        if not above.is_dir():
            reason = f"{above} is not a directory"
        elif path.exists() and path.is_dir() == (flag == "--metrics-file"):
            reason = "it is a directory" if path.is_dir() else "it is a file"
        elif not os.access(path if path.exists() else above, os.W_OK):
            reason = f"{path if path.exists() else above} does not let you write"
        else:
            continue
        raise ConfigError(f"{flag} {name} cannot be written, because {reason}: name another")


def _path(name: str | None) -> Path | None:
    return None if name is None else Path(name)
