"""Each field of run.json has a rule, and one line names the first that is broken."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.layout import ParallelLayout
from megatron_terapipe.checkpoint.directories import latest_checkpoint
from megatron_terapipe.checkpoint.info import CheckpointInfo
from megatron_terapipe.errors import CheckpointError
from tests.inference.checkpoints import MODEL, checkpoint_info, write_info

WHOLE = "and must be a whole number from"
WRONG: list[tuple[dict[str, Any], str]] = [
    # Values by field, or by section and field, and the line about them.
    *(({"iteration": value}, f"iteration is {value!r}, {WHOLE} 0 to 1000000000") for value in ("5", 5.5, None, True)),
    *(({"iteration": value}, f"iteration is {value}, {WHOLE} 0 to 1000000000") for value in (-5, 10**12)),
    ({"iteration": 6}, "iteration is 6, and the directory is named global_step5"),
    ({"consumed_samples": 10**18}, "consumed_samples is 1000000000000000000, and must be"),
    ({"consumed_samples": 4}, f"consumed_samples is 4, {WHOLE} 5 to 5000000000"),
    ({"skipped_iterations": 6}, f"skipped_iterations is 6, {WHOLE} 0 to 5"),
    ({"skipped_iterations": "a"}, "skipped_iterations is 'a', and must be"),
    ({"skipped_samples": None}, "skipped_samples is None, and must be"),
    ({"layout": {}}, "layout is {}, and must be an object with data_parallel_size, "),
    ({"layout": None}, "layout is None, and must be an object with"),
    ({"model": None}, "model is None, and must be an object with num_layers, hidden_size, "),
    ({"model": {}}, "model is {}, and must be an object with num_layers, "),
    ({"partitioned": 0}, "partitioned is 0, and must be true or false"),
    ({"optimizer": 1}, "optimizer is 1, and must be a name or null"),
    ({"family": "lama"}, "family is 'lama', and must be a family of this version"),
    ({"tokenizer": []}, "tokenizer is [], and must be an object"),
    ({"optimizer_schedule": 1}, "optimizer_schedule is 1, and must be an object"),
    ({"optimizer_schedule": {"lr": True}}, "optimizer_schedule.lr is True, and must be a text, a number or"),
    ({"tokenizer": {"vocab_file": 1.5}}, "tokenizer.vocab_file is 1.5, and must be a text, a whole number"),
    ({"model.num_layers": "2"}, "model.num_layers is '2', and must be of another type"),
    ({"model.activation": "gelu2"}, "model.activation is 'gelu2', and must be of another type"),
    ({"model.num_layers": 0}, "model: --num-layers 0 "),
    ({"layout.data_parallel_size": "1"}, "layout.data_parallel_size is '1', and must be"),
    ({"layout.pipeline_parallel_size": 10**9}, "layout.pipeline_parallel_size is 1000000000, and must be"),
    ({"layout.data_parallel_size": 10**6, "layout.tensor_parallel_size": 2}, "and must be of 1000000 ranks at"),
    ({"layout.expert_parallel_size": 7}, "layout: expert parallel size 7 does not divide the data x "),
    *(
        ({name: ...}, f"it lacks '{name}'")
        for name in ("iteration", "consumed_samples", "model", "layout", "optimizer", "tokenizer")
    ),
]


@pytest.mark.parametrize(("changed", "said"), WRONG)
def test_a_wrong_or_missing_field_is_named(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    facts, directory = asdict(checkpoint_info()), tmp_path / "global_step5"
    for name, value in changed.items():
        section, _, inner = name.rpartition(".")
        (facts[section] if section else facts)[inner] = value
        if value is ...:
            del facts[inner]
    directory.mkdir()
    (directory / "run.json").write_text(json.dumps(facts))
    with pytest.raises(CheckpointError) as caught:
        CheckpointInfo.read(directory)
    line = str(caught.value)
    assert line.startswith(f"checkpoint {directory} has no readable run.json (") and said in line and "\n" not in line


@pytest.mark.parametrize(
    "content", [b"../other", b"a/b", b"..", b"\xff\xfe", b"a" * 300, b"", b"a\nb", b"\x00"], ids=repr
)
def test_latest_holds_a_name_and_no_path(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "latest").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"latest holds no name of a checkpoint: write the tag of one that is"):
        latest_checkpoint(tmp_path)


def test_run_json_is_read_as_written(tmp_path: Path) -> None:
    write_info(checkpoint_info(), tmp_path / "tag")
    assert CheckpointInfo.read(tmp_path / "tag") == checkpoint_info()


EXPERTS = replace(MODEL, num_experts=4, moe_router_topk=2)


@pytest.mark.parametrize(
    ("changed", "refused"),
    [
        ({"num_experts": 8}, "--num-experts 4, this run 8: set --num-experts 4, or load another checkpoint"),
        ({"moe_router_topk": 1, "moe_router_pre_softmax": True}, "--moe-router-topk 2, this run 1: set"),
        ({"moe_router_enable_expert_bias": True}, "--moe-router-enable-expert-bias False, this run True: set"),
        ({"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.1, "moe_token_dispatcher_type": "allgather"}, None),
    ],
)
def test_a_run_may_change_the_losses_of_experts_and_not_their_rule(
    changed: dict[str, Any], refused: str | None
) -> None:
    info = checkpoint_info(EXPERTS)
    run = replace(EXPERTS, **changed), ParallelLayout(data_parallel_size=4, expert_parallel_size=2), "adam"
    if refused is None:
        info.check(*run, weights_only=False)
        return
    with pytest.raises(CheckpointError) as caught:
        info.check(*run, weights_only=False)
    assert refused in str(caught.value)


@settings(max_examples=50, deadline=None)
@given(
    name=st.sampled_from(sorted(asdict(checkpoint_info()))),
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
        max_leaves=5,
    ),
)
def test_whatever_a_field_holds_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, name: str, value: Any
) -> None:
    directory = tmp_path_factory.mktemp("run") / "tag"
    directory.mkdir()
    (directory / "run.json").write_text(json.dumps(asdict(checkpoint_info()) | {name: value}))
    try:
        CheckpointInfo.read(directory)
    except UserError as error:
        assert "\n" not in str(error)
