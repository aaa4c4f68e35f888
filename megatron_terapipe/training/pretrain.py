"""Train a model: parse the flags, prepare the run, build the engine, train.

torch and DeepSpeed take seconds to import, so they are imported once the flags are known to be good.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from deepspeed_ext.plan.terminal import printable_output
from deepspeed_ext.runtime.cuda_environment import expect_cpu, prepare_cuda_environment
from deepspeed_ext.runtime.health.processes import ProcessEnd, start_of
from deepspeed_ext.runtime.launch import LaunchEnvironment
from megatron_terapipe.arguments import Arguments, read_arguments
from megatron_terapipe.arguments.build import Constraints
from megatron_terapipe.arguments.parser import PROGRAM, OwnFlags
from megatron_terapipe.checkpoint.directories import only_run_in
from megatron_terapipe.config import Config
from megatron_terapipe.planning import checked_layout, stated_ranks
from megatron_terapipe.run_report.own_report import OwnReport
from megatron_terapipe.strategy import FoundStrategy
from megatron_terapipe.training.end_of_run import EndOfRun, after_restart, remedy
from megatron_terapipe.training.first_rank import FirstRank
from megatron_terapipe.training.trained_model import Datasets, Layers, Loss, TrainedModel, gpt_layers

__all__ = ["gpt_layers", "pretrain"]


def pretrain(
    layers: Layers,
    *,
    loss: Loss | None = None,
    datasets: Datasets | None = None,
    flags: OwnFlags | None = None,
    argv: Sequence[str] | None = None,
) -> int:
    """Train a model by the flags of a command line, on this rank; return the exit code: 2 for bad input.

    Args:
        layers: called with the configuration and the ranks that share each layer, once their groups exist; returns the
            layers from token ids [B, N] to the outputs that `loss` takes, as modules, `LayerSpec`s or `TiedLayerSpec`s.
            `gpt_layers` for the GPT of the flags.
        loss: called with the outputs of the last layer and (labels, loss mask), each [B, N], of a token slice; returns
            the mean of the labelled tokens. None for the cross-entropy of logits [B, N, vocabulary].
        datasets: called with the configuration; returns the data for training, validation and test, each with `len`
            and samples of seq_length + 1 token ids, or dicts of `tokens`, `labels`, `loss_mask` and perhaps
            `position_ids`; None for a part without data. None = the data of the flags; `--mock-data` replaces it.
        flags: called with a parser of `argparse`, to which it adds flags; their values are `config.own`.
        argv: words after the name of the program; None = the words of this process, which ends with the exit code.
    """
    is_plain = layers is gpt_layers and loss is datasets is flags is None
    program = PROGRAM if is_plain else Path(sys.argv[0]).name
    trained = TrainedModel(layers, loss, datasets, program)
    process_end = ProcessEnd() if argv is None else None
    expect_cpu()
    with printable_output(), EndOfRun() as end:
        first_rank = FirstRank(end.watch)
        arguments = read_arguments(
            argv,
            partial(_find_strategy, first_rank, trained),
            program=program,
            own_flags=flags,
            has_own_data=datasets is not None,
        )
        end.remedy = partial(remedy, arguments.config.checkpoint.save)
        config = replace(arguments.config, checkpoint=after_restart(arguments.config.checkpoint))
        end.launch = launch = _launch(config)
        trained.check(config)
        _check_sizes(config, launch)
        if config.training.dry_run:
            _dry_run(arguments, launch, trained)
        else:
            _train(trained, config, arguments.notices, end, first_rank)
    if process_end is not None:
        process_end.code = end.code
    return end.code


def _train(trained: TrainedModel, config: Config, notices: Sequence[str], end: EndOfRun, first_rank: FirstRank) -> None:
    launch, report = end.launch, OwnReport(config.logging)
    first, on_one_host = launch.rank == 0, launch.local_size == launch.world_size
    rank_watch = end.watch(launch, config)
    rank_watch.ending = report.write_end

    def write_loss(reason: str) -> None:
        if rank_watch.reports_end:  # By now: this rank may report in place of the one that is lost.
            report.write_end(reason, failed=True)

    end.lost = write_loss
    from megatron_terapipe.checkpoint.agreement import from_first_rank, work_of_any_rank
    from megatron_terapipe.training.build_engine import build_engine, process_group
    from megatron_terapipe.training.run import prepare, with_whole_checkpoint
    from megatron_terapipe.training.run_summary import start_of_log
    from megatron_terapipe.training.trainer import Trainer

    run = prepare(config, launch, first_rank.ask(config), trained, partial(_measure, trained))

    def hold_saves() -> None:
        if first and config.checkpoint.save is not None and not config.training.skip_train:
            running = only_run_in(config.checkpoint.save, lambda process: start_of(process) is not None)
            end.after_report.enter_context(running)

    # On several hosts only when all ranks can receive the error.
    if on_one_host:
        hold_saves()
    if first:
        print(*notices, *start_of_log(run), sep="\n", flush=True)
        end.after_report.callback(report.write)
    end.in_process_group = True
    with process_group(run, rank_watch) as stall_watch:
        if not on_one_host:
            from_first_rank(hold_saves)
        with stall_watch.ledger.phase("verifying the checkpoint"):
            run = with_whole_checkpoint(run, config, print if first else lambda line: None)
        work_of_any_rank("checking and ordering the data", run.prepare_data, stall_watch.ledger)
        engine = build_engine(run, stall_watch)
        Trainer(run, engine, report.refresh_if_due).run()


def _launch(config: Config) -> LaunchEnvironment:
    """Return the place of this rank among all of the run; in a dry run, among those that were not launched."""
    if not config.training.dry_run:
        return LaunchEnvironment.read(local_rank=config.parallel.local_rank)
    return LaunchEnvironment.of_dry_run(stated=stated_ranks(config), least=config.parallel.least_world_size)


def _check_sizes(config: Config, launch: LaunchEnvironment) -> None:
    """Check the sizes of a run, which decide the variables of CUDA, and set these: all of it before torch is loaded."""
    checked_layout(config, launch.world_size)
    lines = prepare_cuda_environment(
        num_pipeline_ranks=config.parallel.pipeline_model_parallel_size,
        deterministic=config.training.deterministic_mode,
    )
    if lines and launch.rank == 0:
        print(*lines, sep="\n", flush=True)


def _dry_run(arguments: Arguments, launch: LaunchEnvironment, trained: TrainedModel) -> None:
    from megatron_terapipe.training.run_summary import dry_run

    lines = dry_run(arguments.config, launch, trained)
    if launch.rank == 0:
        print(*arguments.notices, *lines, sep="\n", flush=True)


def _measure(trained: TrainedModel, config: Config) -> Mapping[str, Any]:
    # Imported where layers are measured.
    from megatron_terapipe.search.measure.own_model import measure_here

    return measure_here(trained, config)


def _find_strategy(
    first_rank: FirstRank, trained: TrainedModel, config: Config, constraints: Constraints
) -> FoundStrategy:
    # Imported where a search is needed: it loads torch.
    from megatron_terapipe.training.auto_plan import find_strategy

    ask, measure = first_rank.ask(config), None if config.training.dry_run else partial(_measure, trained)
    find = partial(find_strategy, config, constraints, trained.own_program, measure)
    if ask is None:
        return find()
    return FoundStrategy.from_json(ask("strategy", lambda: find().to_json()))
