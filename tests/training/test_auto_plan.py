"""A found schedule, and the check that all ranks found the same."""

from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from deepspeed_ext.plan.schedule_file import read_schedule
from deepspeed_ext.plan.schedules import rank_orders
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.training.auto_plan import SCHEDULE_FILE, check_agreement, keep_schedule, notes
from tests.distributed import run_distributed
from tests.training.gpt_runs import Setup, run_of

FOUND = Setup(2, "--pipeline-model-parallel-size 2 --token-slices auto --num-token-slices 3", micro_batches=2)


def errors_of_ranks() -> list[str]:
    """The error of this rank if all found the same token slices, and if rank 1 found others."""
    found = []
    for differs_on in (None, 1):
        run = replace(run_of(FOUND), found_token_slices=True)
        if dist.get_rank() == differs_on:
            parallel = replace(run.config.parallel, token_slices="30,1,1")
            run = replace(run, config=replace(run.config, parallel=parallel))
        try:
            check_agreement(run)
            found.append("")
        except ConfigError as error:
            found.append(str(error))
    return found


def test_every_rank_reports_one_that_differs() -> None:
    first, second = run_distributed(errors_of_ranks, 2)
    assert first == second
    assert first[0] == "" and first[1].startswith("rank 1 found another strategy, ")


def found_schedule(folder: Path) -> tuple[list[str], bool]:
    """Lines for the log, and whether the file has the schedule of the run."""
    setup = Setup(1, f"--pipeline-schedule optimised --num-token-slices 2 --save {folder}")
    run = run_of(setup)
    keep_schedule(run)
    shape, orders = read_schedule(folder / SCHEDULE_FILE)
    return notes(run), shape == run.pipeline and orders == rank_orders(run.schedule, shape)


def test_a_found_schedule_is_saved_with_the_checkpoints(tmp_path: Path) -> None:
    (((line,), same),) = run_distributed(found_schedule, 1, tmp_path / "saved")
    assert same
    assert line.startswith(" found a schedule for nodes of 8 A100-SXM4-80GB, ")
    assert "a predicted bubble of 0.0%" in line and "at most 1 activations" in line
    assert (tmp_path / "saved" / SCHEDULE_FILE).read_text().startswith("# for --token-slices 16,16\n0F0.0, ")
