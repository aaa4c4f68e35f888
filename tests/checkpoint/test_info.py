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
from tests.inference.checkpoints import MODEL, checkpoint_info

VALUES: dict[str, tuple[dict[str, Any], str]] = {
    "text_as_number": ({"iteration": "5"}, "iteration is '5', and must be a whole number from 0 to 1000000000"),
    "fraction": ({"iteration": 5.5}, "iteration is 5.5, and must be a whole number from 0 to 1000000000"),
    "null": ({"iteration": None}, "iteration is None, and must be a whole number from 0 to 1000000000"),
    "yes": ({"iteration": True}, "iteration is True, and must be a whole number from 0 to 1000000000"),
    "negative": ({"iteration": -5}, "iteration is -5, and must be a whole number from 0 to 1000000000"),
    "huge": ({"iteration": 10**12}, "iteration is 1000000000000, and must be a whole number from 0 to 1000000000"),
    "another": ({"iteration": 6}, "iteration is 6, and the directory is named global_step5"),
    "many": ({"consumed_samples": 10**18}, "consumed_samples is 1000000000000000000, and must be"),
    "few": ({"consumed_samples": 4}, "consumed_samples is 4, and must be a whole number from 5 to 5000000000"),
    "skipped": ({"skipped_iterations": 6}, "skipped_iterations is 6, and must be a whole number from 0 to 5"),
    "skipped_text": ({"skipped_iterations": "a"}, "skipped_iterations is 'a', and must be"),
    "skipped_samples": ({"skipped_samples": None}, "skipped_samples is None, and must be"),
    "no_layout": ({"layout": {}}, "layout is {}, and must be an object with data_parallel_size, "),
    "null_layout": ({"layout": None}, "layout is None, and must be an object with"),
    "no_model": ({"model": None}, "model is None, and must be an object with num_layers, hidden_size, "),
    "empty_model": ({"model": {}}, "model is {}, and must be an object with num_layers, "),
    "partitioned": ({"partitioned": 0}, "partitioned is 0, and must be true or false"),
    "manifest": ({"has_manifest": "no"}, "has_manifest is 'no', and must be true or false"),
    "optimizer": ({"optimizer": 1}, "optimizer is 1, and must be a name or null"),
    "family": ({"family": "lama"}, "family is 'lama', and must be a family of this version"),
    "tokenizer": ({"tokenizer": []}, "tokenizer is [], and must be an object"),
    "schedule": ({"optimizer_schedule": 1}, "optimizer_schedule is 1, and must be an object"),
    "rate": ({"optimizer_schedule": {"lr": True}}, "optimizer_schedule.lr is True, and must be a text, a number or"),
    "file": ({"tokenizer": {"vocab_file": 1.5}}, "tokenizer.vocab_file is 1.5, and must be a text, a whole number"),
}
INSIDE: dict[str, tuple[str, dict[str, Any], str]] = {
    "layers": ("model", {"num_layers": "2"}, "model.num_layers is '2', and must be of another type"),
    "word": ("model", {"activation": "gelu2"}, "model.activation is 'gelu2', and must be of another type"),
    "no_layers": ("model", {"num_layers": 0}, "model: --num-layers 0 "),
    "replicas": ("layout", {"data_parallel_size": "1"}, "layout.data_parallel_size is '1', and must be"),
    "stages": ("layout", {"pipeline_parallel_size": 10**9}, "layout.pipeline_parallel_size is 1000000000, and must be"),
    "ranks": ("layout", {"data_parallel_size": 10**6, "tensor_parallel_size": 2}, "and must be of 1000000 ranks at"),
    "experts": ("layout", {"expert_parallel_size": 7}, "layout: expert parallel size 7 does not divide the data x "),
}


def refusal(folder: Path, facts: dict[str, Any]) -> str:
    """The reason that the line gives."""
    directory = folder / "global_step5"
    directory.mkdir(exist_ok=True)
    (directory / "run.json").write_text(json.dumps(facts))
    with pytest.raises(CheckpointError) as caught:
        CheckpointInfo.read(directory)
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith(f"checkpoint {directory} has no readable run.json (")
    return line.partition("run.json (")[2]


@pytest.mark.parametrize(("changed", "said"), VALUES.values(), ids=VALUES)
def test_a_field_with_a_wrong_value_is_named(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    assert refusal(tmp_path, asdict(checkpoint_info()) | changed).startswith(said)


@pytest.mark.parametrize(("section", "changed", "said"), INSIDE.values(), ids=INSIDE)
def test_a_field_inside_a_section_is_named(tmp_path: Path, section: str, changed: dict[str, Any], said: str) -> None:
    facts = asdict(checkpoint_info())
    assert said in refusal(tmp_path, facts | {section: facts[section] | changed})


@pytest.mark.parametrize("name", ["iteration", "consumed_samples", "model", "layout", "optimizer", "tokenizer"])
def test_a_missing_field_is_named(tmp_path: Path, name: str) -> None:
    facts = asdict(checkpoint_info())
    del facts[name]
    assert refusal(tmp_path, facts).startswith(f"it lacks '{name}'")


@pytest.mark.parametrize(
    "content", [b"../other", b"a/b", b"..", b"\xff\xfe", b"a" * 300, b"", b"a\nb", b"\x00"], ids=repr
)
def test_latest_holds_a_name_and_no_path(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "latest").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"latest holds no name of a checkpoint: write the tag of one that is"):
        latest_checkpoint(tmp_path)


def test_run_json_is_read_as_written(tmp_path: Path) -> None:
    checkpoint_info().write(tmp_path / "tag")
    assert CheckpointInfo.read(tmp_path / "tag") == checkpoint_info()


def test_versions_without_experts_can_read_what_a_dense_model_saves() -> None:
    names = {*checkpoint_info().model, *checkpoint_info().layout}
    assert {"num_layers", "data_parallel_size"} <= names
    assert [name for name in names if name.startswith("moe_") or "expert" in name] == []


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
