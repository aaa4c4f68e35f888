"""The search before a run: the strategy of `--strategy auto`, and an optimised schedule.

Both are saved in the directory of the checkpoints. `without_files` returns the run of a dry
run without its files.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from math import prod
from pathlib import Path
from typing import Any

from deepspeed_ext.plan.found_schedule import FoundSchedule
from deepspeed_ext.plan.schedule_file import write_schedule
from deepspeed_ext.plan.schedules import rank_orders
from deepspeed_ext.runtime.launch import LaunchEnvironment
from megatron_terapipe.config import CheckpointConfig, Config
from megatron_terapipe.config.data import TOKENIZER_FILES
from megatron_terapipe.config.parallel import AUTO
from megatron_terapipe.config.parsing import read_json
from megatron_terapipe.data.tokenizer import build_tokenizer
from megatron_terapipe.data.tokenizer_settings import TokenizerSettings
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.planning import (
    Measure,
    Ranks,
    best_strategy,
    machine_in_words,
    named_cluster,
    slots_of_hosts,
    with_measured_layers,
)
from megatron_terapipe.strategy import DIMENSIONS, FoundStrategy, Strategy
from megatron_terapipe.training.run import Run, vocab_size_of

DATA_FILES = (
    *("data_path", "train_data_path", "valid_data_path", "test_data_path", "data_args_path"),
    "per_split_data_args_path",
)

OUTPUTS = (
    *("metrics_file", "report", "tensorboard_dir", "wandb_project", "wandb_exp_name", "wandb_save_dir"),
    *("timeline", "timeline_iterations", "ledger_directory"),
)

ASSUMED_VOCABULARY = 50257
"""Tokens of a vocabulary without its file: as many as GPT-2 has."""


def without_files(config: Config) -> Config:
    """Return the same run on random tokens, which reads and writes no files.

    A vocabulary without its file has the size of the model section, or GPT-2's.
    """
    data, vocab_size = config.data, config.model.vocab_size
    if _tokenizer_files(config):
        data = replace(data, tokenizer_type="byte", vocab_file=None, merge_file=None, tokenizer_model=None)
        vocab_size = vocab_size or ASSUMED_VOCABULARY
    fim: dict[str, Any] = {each.name: each.default for each in fields(data) if each.name.startswith("fim_")}
    data = replace(data, mock_data=True, **dict.fromkeys(DATA_FILES), **fim)
    # The traces of torch's profiler are outputs, too.
    logging = replace(config.logging, use_pytorch_profiler=False, **dict.fromkeys(OUTPUTS))
    model = replace(config.model, vocab_size=vocab_size)
    return replace(config, model=model, data=data, logging=logging, checkpoint=CheckpointConfig())


def absent_files(config: Config) -> Iterator[str]:
    """Yield the files that `without_files` does not check."""
    files = _tokenizer_files(config)
    if files:
        assumed = "" if config.model.vocab_size else f" (assumed to have {ASSUMED_VOCABULARY} tokens)"
        yield f"tokenizer {' '.join(files)}{assumed}"
    if config.data.prefixes:
        yield f"data {' '.join(config.data.prefixes)}"
    if config.checkpoint.load is not None:
        yield f"checkpoints {config.checkpoint.load}"
    if config.outputs:
        yield f"outputs {' '.join(config.outputs.values())}"


def _tokenizer_files(config: Config) -> list[str]:
    return [getattr(config.data, field) for field in TOKENIZER_FILES[config.data.tokenizer_type]]


STRATEGY_FILE = "strategy.json"
"""File in the directory of the checkpoints, for the next start of the run and for `--strategy`."""


def find_strategy(
    config: Config,
    constraints: Mapping[str, tuple[Any, ...]],
    program: str | None = None,
    measure: Measure | None = None,
) -> FoundStrategy:
    """Return the strategy of a run: its checkpoint's if it has as many ranks, else the best one.

    Args:
        program: program whose own layers are trained, and whose times `measure` returns; None for the GPT's.
    """
    ranks = _ranks(config, constraints)
    saved, notices = _saved(config), []
    if saved is not None:
        strategy, path = saved
        if strategy.world_size == ranks.all:
            return FoundStrategy(strategy, path, (f"--strategy auto uses {path}",))
        notices.append(
            f"--strategy auto searches again: {path} is for {strategy.world_size} ranks, and this run has {ranks.all}"
        )
    config = with_measured_layers(with_vocabulary(config), program, measure, None)
    if program is not None:  # Whether other layers can be divided, and compute parts of them again, is not known.
        constraints = {"recompute": ("none", "full"), "tensor_parallel_size": (1,), **constraints}
    found = best_strategy(config, ranks, constraints)
    return found._replace(notices=(*notices, *found.notices))


def keep_strategy(run: Run) -> None:
    """Write the strategy of `--strategy auto` into the directory of the checkpoints, on the first rank."""
    if run.config.parallel.strategy == AUTO:
        strategy = Strategy.of_config(run.config, run.layout.data_parallel_size)
        _write_to_checkpoints(run, STRATEGY_FILE, json.dumps(strategy.to_json(), indent=2) + "\n")


def _write_to_checkpoints(run: Run, name: str, text: str) -> None:
    if run.config.checkpoint.save is not None and run.launch.rank == 0:
        directory = Path(run.config.checkpoint.save)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text, encoding="utf-8")


def _saved(config: Config) -> tuple[Strategy, str] | None:
    """Return the strategy of an earlier start of this run, and its file; None if there is none."""
    if config.checkpoint.load is None or config.checkpoint.finetune:
        return None
    path = Path(config.checkpoint.load) / STRATEGY_FILE
    if not path.is_file():
        return None
    try:
        return Strategy.from_json(read_json(str(path), "--load")), str(path)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def with_vocabulary(config: Config) -> Config:
    """Return the configuration with the vocabulary size of its tokenizer."""
    if config.training.dry_run_without_files:
        config = without_files(config)
    tokenizer = build_tokenizer(TokenizerSettings.of(config.data, config.model.vocab_size))
    return replace(config, model=replace(config.model, vocab_size=vocab_size_of(config, tokenizer)))


def _ranks(config: Config, constraints: Mapping[str, tuple[Any, ...]]) -> Ranks:
    """Return the numbers of ranks: of the launcher; in a dry run, of the hostfile, the cluster or the sizes."""
    training = config.training
    if not training.dry_run:
        launch = LaunchEnvironment.read(local_rank=config.parallel.local_rank)
        return Ranks(launch.world_size, launch.local_size)
    if training.hostfile is not None:
        slots = [each for each in slots_of_hosts(training.hostfile, "--hostfile") if each]
        # If hosts differ, the sum is no multiple of the largest.
        return Ranks(sum(slots), max(slots))
    # As `stated_ranks` and `least_world_size` of a given layout: sizes without a flag are 1.
    least = prod(constraints[each.name][0] for each in DIMENSIONS if each.ranks and each.name in constraints)
    stated = least if "data_parallel_size" in constraints else None
    if config.parallel.cluster is not None:
        stated = named_cluster(config.parallel.cluster, 1).num_devices
    launch = LaunchEnvironment.of_dry_run(stated=stated, least=least)
    return Ranks(launch.world_size, launch.local_size)


SCHEDULE_FILE = "schedule.csv"
"""File in the directory of the checkpoints, for `--pipeline-schedule`."""


def notes(run: Run) -> list[str]:
    """Return lines for the log of the first rank: token slices and schedule that were found, with their machine."""
    if run.launch.rank:
        return []
    lines, machine = [], machine_in_words(run.config)
    if "token_slices" in run.found:
        lines.append(f" found token slices {run.config.parallel.token_slices} for {machine}")
        if "stage_partition" in run.found:
            lines.append(f" found stages with the layers {run.config.parallel.stage_partition}")
    schedule = run.proven_schedule.schedule
    if isinstance(schedule, FoundSchedule):
        found = schedule.found(run.pipeline)
        # A bubble ratio is 1 - work / (ranks x makespan), and no makespan is below the bound.
        least = 1 - (1 - found.bubble_ratio) * found.makespan / found.lower_bound
        lines.append(
            f" found a schedule for {machine}: a predicted bubble of {found.bubble_ratio:.1%}, with a lower bound of "
            f"{max(least, 0.0):.1%}, and at most {max(found.peak_activation):.3g} activations of a micro-batch"
        )
    return lines


def keep_schedule(run: Run) -> None:
    """Write a schedule that was found into the directory of the checkpoints, on the first rank."""
    schedule = run.proven_schedule.schedule
    if isinstance(schedule, FoundSchedule):
        order = write_schedule(rank_orders(schedule, run.pipeline))
        _write_to_checkpoints(run, SCHEDULE_FILE, f"# for --token-slices {run.config.token_slices()}\n{order}")
