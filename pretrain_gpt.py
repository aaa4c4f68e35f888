"""Pretrain a GPT with data, pipeline and token-slice parallelism, on DeepSpeed."""

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.ops import check_num_ops
from deepspeed_ext.plan.terminal import printable_output
from deepspeed_ext.runtime.cuda_environment import prepare_cuda_environment, will_use_cuda
from deepspeed_ext.runtime.health.processes import ProcessEnd
from deepspeed_ext.runtime.health.rank_watch import LOST
from deepspeed_ext.runtime.launch import LaunchEnvironment
from megatron_terapipe.arguments import read_arguments
from megatron_terapipe.arguments.build import Constraints
from megatron_terapipe.checkpoint.directories import only_run_in
from megatron_terapipe.config import Config
from megatron_terapipe.errors import AgreedCheckpointError, NumbersError
from megatron_terapipe.planning import stated_ranks
from megatron_terapipe.run_report.own_report import OwnReport
from megatron_terapipe.strategy import FoundStrategy
from megatron_terapipe.training.recovery import LostRank, after_restart, remedy, watch_over

INTERRUPTED = 128 + signal.SIGINT
"""Exit code of a command that ended by Ctrl-C, as shells use it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, prepare, build, train. Returns the exit code: 2 for bad input, reported in one line."""
    with printable_output(), ExitStack() as at_end:
        return _main(argv, at_end)


def _main(argv: Sequence[str] | None, at_end: ExitStack) -> int:
    """Run `main`; callbacks for after the end, and after the report of an error, are put on `at_end`."""
    # Before the process group is built, every rank of a host has the same error, and one of them reports it.
    reports_errors = first_of_host = _is_first_of_host()
    save: str | None = None
    try:
        arguments = read_arguments(argv, _find_strategy)
        config = arguments.config
        save = config.checkpoint.save
        config = replace(config, checkpoint=after_restart(config.checkpoint))
        if config.training.dry_run:
            _choose_cpu_without_cuda()
            launch = LaunchEnvironment.of_dry_run(stated=stated_ranks(config), least=config.parallel.least_world_size)
        else:
            launch = LaunchEnvironment.read(local_rank=config.parallel.local_rank)
        reports_errors = launch.local_rank == 0
        # Sizes that do not fit are reported before torch is loaded.
        replicas = config.parallel.layout(launch.world_size).data_parallel_size
        check_num_ops(config.parallel.pipeline(config.num_micro_batches(replicas)))
        lines = prepare_cuda_environment(
            num_pipeline_ranks=config.parallel.pipeline_model_parallel_size,
            deterministic=config.training.deterministic_mode,
        )
        if lines and launch.rank == 0:
            print(*lines, sep="\n", flush=True)
        if config.training.dry_run:
            from megatron_terapipe.training.run_summary import dry_run

            lines = dry_run(arguments.config, launch)
            if launch.rank == 0:
                print(*arguments.notices, *lines, sep="\n", flush=True)
            return 0
        report = OwnReport(config.logging)
        with watch_over(launch, config, report.write_end) as rank_watch:
            # Imported once the flags are known to be good: torch and DeepSpeed take seconds.
            from megatron_terapipe.checkpoint.agreement import from_first_rank
            from megatron_terapipe.training.build_engine import build_engine, process_group
            from megatron_terapipe.training.run import prepare, with_whole_checkpoint
            from megatron_terapipe.training.run_summary import start_of_log
            from megatron_terapipe.training.trainer import Trainer

            run = prepare(config, launch)
            on_one_host = launch.local_size == launch.world_size

            def hold_saves() -> None:
                if launch.rank == 0 and save is not None and not config.training.skip_train:
                    at_end.enter_context(only_run_in(save))

            # On several hosts only when all ranks can receive the error.
            if on_one_host:
                hold_saves()
            if launch.rank == 0:
                print(*arguments.notices, *start_of_log(run), sep="\n", flush=True)
            reports_errors = True
            if launch.rank == 0:
                at_end.callback(report.write)
            with process_group(run, rank_watch) as stall_watch:
                if not on_one_host:
                    from_first_rank(hold_saves)
                with stall_watch.ledger.phase("verifying the checkpoint"):
                    run = with_whole_checkpoint(run, config, print if launch.rank == 0 else lambda line: None)
                Trainer(run, build_engine(run, stall_watch), report.refresh_if_due).run()
    except LostRank as lost:
        at_end.pop_all()
        if rank_watch.reports_end:
            report.write_end(str(lost), failed=True)
        return LOST  # The loss has been printed.
    except UserError as error:
        agreed = isinstance(error, AgreedCheckpointError | NumbersError)  # raised by every rank of all hosts
        if launch.rank == 0 if agreed else reports_errors:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        if first_of_host:
            print(f"interrupted: {remedy(save)}", file=sys.stderr, flush=True)
        return INTERRUPTED
    return 0


def _is_first_of_host() -> bool:
    """Whether this rank is the first of its host; True if its environment cannot be read."""
    try:
        return LaunchEnvironment.read().local_rank == 0
    except UserError:
        return True


def _find_strategy(config: Config, constraints: Constraints) -> FoundStrategy:
    # Imported where a search is needed: it loads torch, which takes seconds.
    from megatron_terapipe.training.auto_plan import find_strategy

    if config.training.dry_run:
        _choose_cpu_without_cuda()
    return find_strategy(config, constraints)


def _choose_cpu_without_cuda() -> None:
    """Choose the CPU without CUDA: DeepSpeed would search for another device, and warn that it found none."""
    if not will_use_cuda(os.environ):
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


if __name__ == "__main__":
    end = ProcessEnd()
    end.code = main()
    sys.exit(end.code)
