"""run.json and latest: as they were written, or refused in one line."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepspeed_ext.plan.layout import ParallelLayout
from megatron_terapipe.checkpoint.directories import latest_checkpoint
from megatron_terapipe.checkpoint.info import CheckpointInfo
from megatron_terapipe.errors import CheckpointError
from tests.inference.checkpoints import MODEL, checkpoint_info, write_checkpoint, write_info


@pytest.mark.parametrize("name", ["run.json", "manifest.json"])
@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b"null", b"\xff\xfe\x00", b'{"iteration": 5}'], ids=str)
def test_another_run_json_or_manifest_is_refused_in_one_line(tmp_path: Path, name: str, content: bytes | None) -> None:
    path = write_checkpoint(tmp_path) / name
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        CheckpointInfo.read(path.parent)
    assert str(caught.value).startswith(f"checkpoint {path.parent} ") and "\n" not in str(caught.value)
    assert name in str(caught.value)


def test_a_checkpoint_with_the_name_of_another_iteration_is_refused(tmp_path: Path) -> None:
    moved = write_checkpoint(tmp_path).rename(tmp_path / "global_step6")
    with pytest.raises(CheckpointError, match=r"global_step6 was saved after iteration 5: name it global_step5$"):
        CheckpointInfo.read(moved)


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
