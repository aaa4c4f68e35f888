"""`--strategy auto` at the start of a run: an earlier start's strategy, or a search, before any rank meets another."""

import json
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from deepspeed_ext.runtime.launch.environment import LaunchEnvironment
from megatron_terapipe.config import Config
from megatron_terapipe.config.fields.json_files import read_json
from megatron_terapipe.config.parallel.parallel import AUTO
from megatron_terapipe.data.tokenizer import TokenizerSettings, build_tokenizer
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.planning.auto_strategy import Ranks, best_strategy
from megatron_terapipe.planning.cost_model import named_cluster
from megatron_terapipe.planning.stated_ranks import slots_of_hosts
from megatron_terapipe.strategy import DIMENSIONS, Strategy
from megatron_terapipe.training.start.absent_files import without_files
from megatron_terapipe.training.start.run import Run, vocab_size_of

STRATEGY_FILE = "strategy.json"
"""File in the directory of the checkpoints, which the next start of the run reads, and `--strategy` takes."""


class FoundStrategy(NamedTuple):
    """A strategy that was found for a run."""

    strategy: Strategy
    place: str
    """Where it comes from, for errors."""
    notices: tuple[str, ...]
    """Lines for the start of the run."""


def find_strategy(config: Config, constraints: Mapping[str, tuple[Any, ...]]) -> FoundStrategy:
    """Return the strategy of a run: that of its checkpoint if it was chosen for as many ranks, else the best one.

    Args:
        config: the configuration, its layout and batch left at their defaults.

    Raises:
        UserError: if a file cannot be read, or no strategy can run.
    """
    ranks = _ranks(config, constraints)
    saved, notices = _saved(config), []
    if saved is not None:
        strategy, path = saved
        if strategy.world_size == ranks.all:
            return FoundStrategy(strategy, path, (f"--strategy auto goes on with {path}",))
        notices.append(
            f"--strategy auto searches again: {path} is for {strategy.world_size} ranks, and this run has {ranks.all}"
        )
    found = best_strategy(_with_vocabulary(config), ranks, constraints)
    return FoundStrategy(found.strategy, AUTO, (*notices, found.line))


def keep_strategy(run: Run) -> None:
    """Write the strategy that was found beside the checkpoints, on the first rank, for the next start of the run."""
    config = run.config
    if config.parallel.strategy != AUTO or config.checkpoint.save is None or run.launch.rank:
        return
    directory = Path(config.checkpoint.save)
    directory.mkdir(parents=True, exist_ok=True)
    strategy = Strategy.of_config(config, run.layout.data_parallel_size)
    (directory / STRATEGY_FILE).write_text(json.dumps(strategy.to_json(), indent=2) + "\n")


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


def _with_vocabulary(config: Config) -> Config:
    """Return the configuration with the vocabulary size of its tokenizer."""
    if config.training.dry_run_without_files:
        config = without_files(config)
    tokenizer = build_tokenizer(TokenizerSettings.of(config.data, config.model.vocab_size))
    return replace(config, model=replace(config.model, vocab_size=vocab_size_of(config, tokenizer)))


def _ranks(config: Config, constraints: Mapping[str, tuple[Any, ...]]) -> Ranks:
    """Return the numbers of ranks, as the launcher says them; of a dry run, as hostfile, cluster or sizes do."""
    training = config.training
    if not training.dry_run:
        launch = LaunchEnvironment.read(local_rank=config.parallel.local_rank)
        return Ranks(launch.world_size, launch.local_size)
    if training.hostfile is not None:
        slots = [each for each in slots_of_hosts(training.hostfile, "--hostfile") if each]
        # Unlike hosts are told of by the sum: it is no multiple of the largest.
        return Ranks(sum(slots), max(slots))
    # As `stated_ranks` and `least_world_size` count where the layout is given: sizes that no flag states are 1.
    least = prod(constraints[each.name][0] for each in DIMENSIONS if each.ranks and each.name in constraints)
    stated = least if "data_parallel_size" in constraints else None
    if config.parallel.cluster is not None:
        stated = named_cluster(config.parallel.cluster, 1).num_devices
    launch = LaunchEnvironment.of_dry_run(stated=stated, least=least)
    return Ranks(launch.world_size, launch.local_size)
