"""The helper's own checkpoints of Megatron-LM: megatron-core finds all it needs in them, for other layouts too."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.checkpoint.megatron_files import MODELS, Case, Expected, on_ranks, read, write

pytest.importorskip("megatron.core")

CASES = {
    "A": Case(MODELS["A"], "torch", pipeline=2),
    "B": Case(MODELS["B"], "torch_dist", tensor=2),
    "B-bf16": Case(MODELS["B"], "torch_dist", tensor=2, bf16=True),
}


def test_megatron_trains_on_from_them_with_its_own_optimizer_state(tmp_path: Path) -> None:
    for found, expected in on_ranks(written_and_read, {tmp_path / name: case for name, case in CASES.items()}).values():
        torch.testing.assert_close(found.logits, expected.logits, rtol=1e-6, atol=2e-6)
        assert found.losses == pytest.approx(expected.losses, rel=1e-6)
        assert found.gradient_norms == pytest.approx(expected.gradient_norms, rel=1e-5)
    files = {str(file.relative_to(tmp_path / "A")) for file in (tmp_path / "A").rglob("*") if file.is_file()}
    ranks = {f"iter_0000005/mp_rank_00_{stage:03d}/model_optim_rng.pt" for stage in range(2)}
    assert files == {"latest_checkpointed_iteration.txt", *ranks}


def written_and_read(folder: Path, case: Case) -> tuple[Expected, Expected]:
    """On every rank; read for another layout where the format allows it and fp32 keeps the values equal."""
    expected = write(folder, case)
    if case.file_format == "torch_dist" and not case.bf16:
        case = replace(case, tensor=case.pipeline, pipeline=case.tensor)
    return read(folder, case), expected
