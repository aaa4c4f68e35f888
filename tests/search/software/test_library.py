"""Descriptions of trainers, and files that change one."""

import json
from pathlib import Path

import pytest

from megatron_terapipe.dimensions import Dimension
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.answer.flags import TRAINERS
from megatron_terapipe.search.machine.trainers import SOFTWARE, find_software
from megatron_terapipe.strategy import DIMENSIONS


def written(tmp_path: Path, document: object) -> str:
    path = tmp_path / "ours.json"
    path.write_text(json.dumps(document))
    return str(path)


def test_the_flag_names_all_of_them() -> None:
    assert TRAINERS == tuple(SOFTWARE)


@pytest.mark.parametrize("name", SOFTWARE)
def test_a_description_is_whole(name: str) -> None:
    software = SOFTWARE[name]
    known: dict[str, Dimension] = {each.name: each for each in DIMENSIONS}
    assert {dimension for dimension, _ in software.runs} <= set(known)
    for precision in ("fp32", "fp16", "bf16"):
        for zero_stage in (0, 1):
            if software.can_run("zero_stage", zero_stage):
                state = software.state(precision, zero_stage).parameter
                # A weight, a gradient and Adam's two moments at least.
                assert state.weights + state.gradients + state.optimizer >= (16 if precision != "bf16" else 14)
    assert 0 <= software.communication.tensor_parallel_overlap < 1


def test_a_file_changes_what_it_names(tmp_path: Path) -> None:
    document = {"like": "megatron-core", "communication": {"tensor_parallel_overlap": 0.8}, "launch_factor": 0.5}
    ours, like = find_software(written(tmp_path, document)), SOFTWARE["megatron-core"]
    assert (ours.name, ours.launch_factor, ours.communication.tensor_parallel_overlap) == ("ours", 0.5, 0.8)
    assert (ours.operators, ours.states, ours.runs) == (like.operators, like.states, like.runs)
    assert hash(ours) != hash(like)


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({}, "like null is not a known trainer: choose among terapipe, megatron-lm"),
        ({"like": "megatron"}, "did you mean megatron-lm?"),
        ([], "is not an object"),
        ({"like": "fsdp", "launches": 1}, "launches is not known: choose among name"),
        ({"like": "fsdp", "operators": {"rmsnrom": {}}}, "operators.rmsnrom is not known: did you mean rmsnorm?"),
        ({"like": "fsdp", "operators": 3}, "operators 3 is not an object: give fields of it: layernorm"),
        ({"like": "fsdp", "launch_factor": -1}, "launch_factor -1 is not a number from 0"),
        (
            {"like": "fsdp", "communication": {"tensor_parallel_overlap": 1.8}},
            "communication.tensor_parallel_overlap 1.8 is not a share up to 1: give one",
        ),
        ({"like": "fsdp", "launch_factor": "fast"}, 'launch_factor "fast" is wrong'),
        ({"like": "fsdp", "attention": {"kernel": "flash-9"}}, 'attention.kernel "flash-9" is wrong'),
    ],
)
def test_errors_name_the_field(tmp_path: Path, document: object, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        find_software(written(tmp_path, document))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_neither_a_file_nor_a_name() -> None:
    with pytest.raises(ConfigError, match="--software megatron is neither a file nor a known trainer: did you mean"):
        find_software("megatron")
