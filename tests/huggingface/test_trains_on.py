"""A run from a folder of Hugging Face continues from its checkpoint; contradictions to the folder are named."""

from pathlib import Path

import pytest

from megatron_terapipe.convert import main
from megatron_terapipe.errors import CheckpointError
from tests.distributed import run_distributed
from tests.huggingface.folder_runs import resume, run_of
from tests.huggingface.models import MODELS, save, whole_model

transformers = pytest.importorskip("transformers")
from tests.huggingface.tiny import tiny_model  # noqa: E402


def test_the_same_command_continues_from_its_checkpoint(tmp_path: Path) -> None:
    tiny_model("qwen3").save_pretrained(tmp_path / "theirs")
    for start, family, loss, loss_again in run_distributed(resume, 2, tmp_path / "theirs", tmp_path / "ours"):
        assert (start, family, loss_again) == (1, "qwen3", loss)
    assert main(["to-huggingface", "--load", str(tmp_path / "ours"), "--output", str(tmp_path / "back")]) == 0
    assert transformers.AutoConfig.from_pretrained(tmp_path / "back").model_type == "qwen3"
    theirs, back = (tmp_path / each / "generation_config.json" for each in ("theirs", "back"))
    assert theirs.read_bytes() == back.read_bytes()


def test_a_folder_of_another_model_than_the_checkpoint_is_named(tmp_path: Path) -> None:
    for name in ("qwen3", "llama"):
        tiny_model(name).save_pretrained(tmp_path / name)
    save(whole_model(MODELS["llama"]), MODELS["llama"], tmp_path / "ours")
    with pytest.raises(CheckpointError, match="the checkpoint has --hidden-size 48, this run 32: set --hidden-size 48"):
        run_of(tmp_path / "llama", f"--save {tmp_path / 'ours'} --no-load-optim")


def test_flags_that_contradict_a_folder_are_named(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="the checkpoint has --ffn-hidden-size 48, this run 56: set --ffn-hidden"):
        run_of(tmp_path, "--ffn-hidden-size 56")
    assert run_of(tmp_path, "--make-vocab-size-divisible-by 8 --hidden-dropout 0.1").checkpoint is not None
