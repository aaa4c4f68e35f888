"""A Llama trained on one layout continues on another, and is exported to other programs."""

import json
from pathlib import Path

import pytest

from megatron_terapipe.convert import main
from tests.distributed import run_distributed
from tests.end_to_end.launching import flags, read_metrics, train_on_this_rank

LLAMA = (
    "--use-rotary-position-embeddings --normalization RMSNorm --swiglu --disable-bias-linear"
    " --untie-embeddings-and-output-weights --num-key-value-heads 2 --mtp-num-layers 1"
).split()
PACKED = "--reset-position-ids --reset-attention-mask --eod-mask-loss --hidden-dropout 0.1".split()
ON_TENSOR_RANKS = "--pipeline-model-parallel-size 1 --tensor-model-parallel-size 2 --sequence-parallel".split()


@pytest.fixture(scope="module")
def moved(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three iterations on two tensor-parallel ranks; the last two again from a checkpoint, on four stages of two ranks;
    and the last again from there, on two sequence-parallel ranks with deferred weight gradients."""
    folder = tmp_path_factory.mktemp("moved")

    def train(*words: object) -> None:
        assert run_distributed(train_on_this_rank, 2, flags(data, *words), folder) == [0, 0]

    common = ["--train-iters", 3, *LLAMA, *PACKED, "--token-slices", "12,8,8,4", "--recompute-activations"]
    saved = ["--save", "checkpoints", "--save-interval", 1, "--metrics-file", "before.jsonl"]
    train(*common, *ON_TENSOR_RANKS, *saved)
    (folder / "checkpoints" / "latest").write_text("global_step1")
    loaded = ["--train-iters", 3, "--load", "checkpoints", "--use-checkpoint-args", "--metrics-file", "after.jsonl"]
    others = ["--num-layers-per-virtual-pipeline-stage", 1, "--token-slices", "20,12", "--num-token-slices", 2]
    saved = ["--save", "interleaved", "--save-interval", 1]
    train(*PACKED, *loaded, *others, *saved)
    (folder / "interleaved" / "latest").write_text("global_step2")
    loaded = ["--train-iters", 3, "--load", "interleaved", "--use-checkpoint-args", "--metrics-file", "at_last.jsonl"]
    sequence_ranks = ["--pipeline-model-parallel-size", 1, "--context-parallel-size", 2]
    train(*PACKED, *loaded, *sequence_ranks, "--pipeline-schedule", "zero-bubble")
    return folder


def test_the_other_layouts_continue_with_the_losses_of_the_first(moved: Path) -> None:
    """Dropout, packed documents and Adam's state included: only the order of sums differs."""
    before, evaluated_before = read_metrics(moved / "before.jsonl")
    for name, first in (("after.jsonl", 2), ("at_last.jsonl", 3)):
        after, evaluated_after = read_metrics(moved / name)
        assert [each["iteration"] for each in after] == list(range(first, 4))
        for run in (before, after, evaluated_before, evaluated_after):
            for each in run:
                (each["mtp_loss"],) = each.pop("mtp_losses", [each.get("mtp_loss")])
        for key in ("lm_loss", "mtp_loss", "grad_norm"):
            expected = [each[key] for each in before[first - 1 :]]
            assert [each[key] for each in after] == pytest.approx(expected, rel=1e-5)
        for key in ("validation_lm_loss", "mtp_loss"):
            assert evaluated_after[-1][key] == pytest.approx(evaluated_before[-1][key], rel=1e-5)


def test_the_log_names_the_loaded_checkpoint(moved: Path) -> None:
    logs = [path.read_text() for path in moved.glob("log_*.txt")]
    for line in (
        " loaded checkpoint checkpoints/global_step1 of iteration 1\n",
        " loaded checkpoint interleaved/global_step2 ",
    ):
        assert sum(line in log for log in logs) == 1


def test_it_is_exported_and_imported_unchanged(moved: Path) -> None:
    commands = (("to", "checkpoints", "exported"), ("from", "exported", "imported"), ("to", "imported", "again"))
    for direction, load, output in commands:
        assert main([f"{direction}-huggingface", "--load", str(moved / load), "--output", str(moved / output)]) == 0
    assert json.loads((moved / "exported" / "config.json").read_text())["model_type"] == "llama"
    # All files have the same permissions.
    assert len({path.stat().st_mode for path in (moved / "exported").iterdir()}) == 1
    assert (moved / "again" / "model.safetensors").read_bytes() == (
        moved / "exported" / "model.safetensors"
    ).read_bytes()
