"""A found schedule."""

from pathlib import Path

from deepspeed_ext.plan.schedule_file import read_schedule
from deepspeed_ext.plan.schedules import rank_orders
from megatron_terapipe.training.auto_plan import SCHEDULE_FILE, keep_schedule, notes
from tests.distributed import run_distributed
from tests.training.gpt_runs import Setup, run_of


def found_schedule(folder: Path) -> tuple[list[str], bool]:
    """Lines for the log, and whether the file has the schedule of the run."""
    setup = Setup(1, f"--pipeline-schedule optimised --num-token-slices 2 --save {folder}")
    run = run_of(setup)
    keep_schedule(run)
    shape, orders = read_schedule(folder / SCHEDULE_FILE)
    return notes(run), shape == run.pipeline and orders == rank_orders(run.proven_schedule.schedule, shape)


def test_a_found_schedule_is_saved_with_the_checkpoints(tmp_path: Path) -> None:
    (((line,), same),) = run_distributed(found_schedule, 1, tmp_path / "saved")
    assert same
    assert line.startswith(" found a schedule for nodes of 8 A100-SXM4-80GB, ")
    assert "a predicted bubble of 0.0%" in line and "at most 1 activations" in line
    assert (tmp_path / "saved" / SCHEDULE_FILE).read_text().startswith("# for --token-slices 16,16\n0F0.0, ")
