"""Token slices and a schedule that a run finds: saved, and run again from the file."""

from pathlib import Path

import pytest

from deepspeed_ext.plan.ops import OpKind, Placement
from deepspeed_ext.plan.schedule_file import read_schedule
from tests.distributed import run_distributed
from tests.end_to_end.launching import flags, read_metrics, train_on_this_rank

THERE_AND_BACK = ["--num-model-chunks", 2, "--model-chunk-placement", "v"]
FIND = ["--pipeline-schedule", "optimised", "--token-slices", "auto", "--num-token-slices", 4]


@pytest.fixture(scope="module")
def found(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs: one that finds its schedule, and one that reads it from the file."""
    folder = tmp_path_factory.mktemp("found")

    def train(name: str, *more: object) -> None:
        words = flags(data, "--eval-iters", 0, "--train-iters", 2, "--metrics-file", folder / f"{name}.jsonl", *more)
        assert run_distributed(train_on_this_rank, 2, words) == [0, 0]

    train("found", *THERE_AND_BACK, *FIND, "--save", folder / "saved")
    cut = ["--token-slices", lengths(folder)]
    train("again", *THERE_AND_BACK, "--pipeline-schedule", folder / "saved" / "schedule.csv", *cut)
    return folder


def lengths(folder: Path) -> str:
    first, *_ = (folder / "saved" / "schedule.csv").read_text().splitlines()
    return first.removeprefix("# for --token-slices ")


def test_the_schedule_is_saved(found: Path) -> None:
    shape, orders = read_schedule(found / "saved" / "schedule.csv")
    assert (shape.num_ranks, shape.num_model_chunks, shape.placement) == (2, 2, Placement.V)
    assert (shape.num_micro_batches, shape.num_token_slices) == (4, 4)
    assert any(op.kind is OpKind.WEIGHT_GRADIENT for order in orders for op in order)


def test_the_file_runs_again_to_the_last_bit(found: Path) -> None:
    (first, _), (again, _) = (read_metrics(found / f"{name}.jsonl") for name in ("found", "again"))
    for key in ("lm_loss", "grad_norm"):
        assert [each[key] for each in again] == [each[key] for each in first]
