"""Files of the plan command: what it reads and writes is what their schemas say."""

import json
from pathlib import Path
from typing import Any

import pytest

from deepspeed_ext.plan.command import main
from deepspeed_ext.plan.command.options import build_parser
from deepspeed_ext.plan.command.request import parse_token_bytes
from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.layout import StagePartition
from deepspeed_ext.plan.memory import TokenBytes
from deepspeed_ext.plan.ops import PipelineShape
from tests.file_formats.forms import check_reader, validate

SHAPE = PipelineShape(num_stages=2, num_micro_batches=1, num_token_slices=2)
ROWS = [[1.0, 2.0], [3.0, 4.0]]
COSTS = {
    "forward": ROWS,
    "backward": ROWS,
    "weight_gradient": ROWS,
    "transfer": {"latency": [0.5], "bandwidth": 8.0, "bytes": [1.0, 2.0]},
    "reductions": [[1.0], [0.5, 0.5]],
}
TOKEN_BYTES = {
    "activation": 64.0,
    "key_value": [8.0, 8.0],
    "key_value_gradient": [16.0, 16.0],
    "logits": 32.0,
    "freed_by_input_gradient": 0.25,
    "logits_limit": 1e6,
    "stage_input": [0.0, 8.0],
}
LENGTHS = ("for 2 stages", "entries for")
"""Messages about lists of other lengths than the pipeline has stages, token slices or boundaries."""


def test_costs() -> None:
    check_reader("costs", COSTS, lambda text: OpCosts.from_json(text, SHAPE), relations=LENGTHS)
    check_reader("costs", COSTS | {"transfer": 0.1}, lambda text: OpCosts.from_json(text, SHAPE), relations=LENGTHS)


def test_bytes_of_a_token() -> None:
    assert TOKEN_BYTES.keys() == TokenBytes.__dataclass_fields__.keys()
    check_reader("token-bytes", TOKEN_BYTES, lambda text: parse_token_bytes(text, SHAPE), relations=LENGTHS)


def test_the_examples_of_the_help() -> None:
    epilog = build_parser("terapipe plan").epilog or ""
    example, _ = json.JSONDecoder().raw_decode(epilog[epilog.index('  {"activation"') :].lstrip())
    validate("token-bytes", example)


def test_stage_partitions(tmp_path: Path) -> None:
    path = tmp_path / "stages.json"

    def read(text: str) -> StagePartition:
        path.write_text(text)
        return StagePartition.parse(str(path))

    assert read("[0, 5, 12]").bounds == (0, 5, 12)
    # That bounds rise is a relation.
    check_reader("partition", [0, 5, 12], read, relations=("-1 does not", "does not rise", "neither"))


# Answers, timelines and traces

PIPELINE = ["--stages", "2", "--micro-batches", "2", "--token-slices", "2"]


@pytest.fixture
def costs(tmp_path: Path) -> str:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({**COSTS, "forward": ROWS, "backward": ROWS}))
    return str(path)


@pytest.fixture
def token_bytes(tmp_path: Path) -> str:
    path = tmp_path / "token_bytes.json"
    path.write_text(json.dumps({"activation": 64, "key_value": 8, "key_value_gradient": 16, "stage_input": 8}))
    return str(path)


def written(folder: Path, *words: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the answer; a trace is checked on the way."""
    answer, trace = folder / "answer.json", folder / "trace.json"
    code = main([*words, "--json", str(answer), "--trace", str(trace)])
    if code == 0:
        validate("trace", trace.read_text())
    validate("plan", answer.read_text())
    found: dict[str, Any] = json.loads(answer.read_text())
    return code, found


def test_answers_and_traces(tmp_path: Path, costs: str, token_bytes: str) -> None:
    plain = written(tmp_path, "--schedule", "1f1b", *PIPELINE)[1]
    assert "transfers" not in plain and "memory_bytes" not in plain
    split = written(tmp_path, "--schedule", "zero-bubble", *PIPELINE, "--costs", costs)[1]
    assert {"transfers", "reductions", "duration"} <= split.keys()
    several = ["--schedule", "interleaved", *PIPELINE, "--model-chunks", "2"]
    assert written(tmp_path, *several)[1]["placement"] == "looped"
    offload = ["--seq-length", "512", "--token-bytes", token_bytes, "--offload", "--host-bandwidth", "4096"]
    copied = written(tmp_path, "--schedule", "breadth-first", *PIPELINE, *offload)[1]
    assert {"host_copies", "peak_host_memory_bytes", "memory_bytes"} <= copied.keys()
    solved = ["--attention-share", "0.5", "--head-share", "0.1", "--solve-slices", "--solve-stages", "--effort", "0.1"]
    assert "stage_partition" in written(tmp_path, "--schedule", "1f1b", *PIPELINE, *solved)[1]


def test_an_answer_beside_a_measured_step(tmp_path: Path, costs: str) -> None:
    steps = tmp_path / "steps"
    steps.mkdir()
    written(steps, "--schedule", "zero-bubble", *PIPELINE, "--costs", costs)
    found = written(tmp_path, "--timeline", str(steps / "answer.json"))[1]
    assert found["eta"] > 0 and "weight_gradient" in found["costs"]


def test_a_deadlock(tmp_path: Path) -> None:
    order = tmp_path / "order.txt"
    order.write_text("0B0.0, 0F0.0\n1F0.0, 1B0.0\n")
    code, found = written(tmp_path, "--schedule", str(order))
    assert code == 1 and "reason" in found
