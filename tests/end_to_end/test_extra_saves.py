"""`--extra-save-iterations`: checkpoints beside those of the interval, from the initial weights on."""

from pathlib import Path

import pytest

from tests.distributed import run_distributed
from tests.end_to_end.launching import NO_EVALUATION, flags, read_metrics, train_on_this_rank


@pytest.mark.parametrize("mode", [["--zero-stage", "0"], ["--zero-stage", "1"], ["--bf16"]], ids=" ".join)
def test_a_run_goes_on_from_its_initial_weights_and_from_what_was_saved_between(
    data: Path, tmp_path: Path, mode: list[str]
) -> None:
    checkpoints, metrics = tmp_path / "checkpoints", [tmp_path / f"{name}.jsonl" for name in ("whole", "0", "2")]
    common = [*NO_EVALUATION, *mode, "--train-iters", "4"]
    saves = ["--save", checkpoints, "--save-interval", 3, "--extra-save-iterations", 0, 2, 9]
    whole = flags(data, *common, *saves, "--metrics-file", metrics[0])
    assert run_distributed(train_on_this_rank, 2, whole) == [0, 0]
    assert {path.name for path in checkpoints.glob("global_step*")} == {f"global_step{each}" for each in (0, 2, 3, 4)}
    expected = read_metrics(metrics[0])[0]
    for path, iteration in zip(metrics[1:], (0, 2), strict=True):
        resumed = flags(
            data, *common, "--load", checkpoints, "--load-tag", f"global_step{iteration}", "--metrics-file", path
        )
        assert run_distributed(train_on_this_rank, 2, resumed) == [0, 0]
        found = read_metrics(path)[0]
        assert [each["iteration"] for each in found] == list(range(iteration + 1, 5))
        for name in ("lm_loss", "grad_norm", "learning_rate", "consumed_samples"):
            assert [each[name] for each in found] == [each[name] for each in expected[iteration:]]
