"""Ranks that found different things say so, instead of waiting for each other for ever."""

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


def disagreement(differs_on: int | None) -> str:
    """What this rank says if one of them found other token slices."""
    run = replace(run_of(FOUND), found_token_slices=True)
    if dist.get_rank() == differs_on:
        parallel = replace(run.config.parallel, token_slices="30,1,1")
        run = replace(run, config=replace(run.config, parallel=parallel))
    try:
        check_agreement(run)
    except ConfigError as error:
        return str(error)
    return ""


def test_ranks_that_agree_say_nothing() -> None:
    assert run_distributed(disagreement, 2, None) == ["", ""]


def test_every_rank_names_one_that_differs() -> None:
    lines = run_distributed(disagreement, 2, 1)
    assert lines[0] == lines[1]
    assert lines[0].startswith(
        "rank 1 found another strategy, other token slices or another schedule than rank 0: install the same"
    )


def found_schedule(folder: Path) -> tuple[list[str], bool]:
    """Lines for the log, and whether the file holds what runs."""
    setup = Setup(1, f"--pipeline-schedule optimised --num-token-slices 2 --save {folder}")
    run = run_of(setup)
    keep_schedule(run)
    shape, orders = read_schedule(folder / SCHEDULE_FILE)
    return notes(run), shape == run.pipeline and orders == rank_orders(run.schedule, shape)


def test_a_found_schedule_is_kept_beside_the_checkpoints_and_told(tmp_path: Path) -> None:
    ((lines, same),) = run_distributed(found_schedule, 1, tmp_path / "saved")
    assert same
    assert lines == [
        " found a schedule for nodes of 8 A100-SXM4-80GB, since no --cluster is given: a predicted bubble of 0.0%, "
        "where no order has less than 0.0%, and at most 1 activations of a micro-batch"
    ]
    assert (tmp_path / "saved" / SCHEDULE_FILE).read_text().startswith("# for --token-slices 16,16\n0F0.0, ")
