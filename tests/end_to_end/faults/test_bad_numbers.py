"""A run that bad numbers end is resumed bit for bit, and two runs with one seed are equal to the bit."""

from pathlib import Path

from tests.distributed import run_distributed
from tests.end_to_end.launching import error_lines, flags, read_metrics
from tests.faults.injection import Fault, train_with_fault

RANDOM = "--hidden-dropout 0.1 --attention-dropout 0.1 --num-workers 3 --eval-iters 0 --train-iters 4".split()
"""All flags with randomness or threads."""


def _weights(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.glob("layer_*"))}


def test_a_run_stops_before_a_bad_update_and_resumes_bit_for_bit(data: Path, tmp_path: Path) -> None:
    def train(name: str, *more: object, fault: Fault | None = None) -> list[tuple[int, list[str]]]:
        words = flags(data, *RANDOM, "--save", tmp_path / name, "--metrics-file", tmp_path / f"{name}.jsonl", *more)
        return [(code, error_lines(output)) for code, output in run_distributed(train_with_fault, 2, words, fault)]

    def numbers(name: str) -> list[tuple[float, float]]:
        return [(each["lm_loss"], each["grad_norm"]) for each in read_metrics(tmp_path / f"{name}.jsonl")[0]]

    assert train("whole") == [(0, []), (0, [])]
    fault = Fault(kind="gradient", rank=1, name="4", iteration=3, micro_batch=1, token_slice=2)
    (first_code, lines), second = train("stopped", fault=fault)
    assert (first_code, second) == (2, (2, []))
    (line,) = lines
    assert line.startswith("error: iteration 3: the gradient is NaN or infinite; ")
    assert "the output of layer 4 on rank 1, at micro-batch 1, token slice 2" in line and "--bad-numbers skip" in line
    assert numbers("stopped") == numbers("whole")[:2], "two runs with one seed"
    assert (tmp_path / "stopped" / "latest").read_text() == "global_step2"
    assert train("stopped", "--load", tmp_path / "stopped") == [(0, []), (0, [])]
    assert numbers("stopped") == numbers("whole")
    found, expected = (_weights(tmp_path / name / "global_step4") for name in ("stopped", "whole"))
    assert expected and found == expected
