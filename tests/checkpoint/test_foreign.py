"""Folders with checkpoints of other trainers: refused in one line, with their origin, before anything is written."""

from pathlib import Path

import pytest

import pretrain_gpt
from megatron_terapipe.checkpoint.foreign import foreign_origin

RUN = """--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1
--global-batch-size 1 --lr 1e-3 --train-iters 1 --mock-data --vocab-size 32
--tokenizer-type NullTokenizer --dry-run""".split()
FOLDERS = {
    "Megatron-LM, torch": ("latest_checkpointed_iteration.txt", "iter_0000005/mp_rank_00/model_optim_rng.pt"),
    "Megatron-LM, torch_dist": (
        "latest_checkpointed_iteration.txt",
        "iter_0000005/.metadata",
        "iter_0000005/common.pt",
    ),
    "Megatron-DeepSpeed": (
        *("latest", "latest_checkpointed_iteration.txt", "global_step5/mp_rank_00_model_states.pt"),
        "global_step5/layer_01-model_00-model_states.pt",
    ),
    "GPT-NeoX": ("latest", "global_step5/configs/125M.yml", "global_step5/mp_rank_00_model_states.pt"),
    "DeepSpeed's universal format": (
        *("latest_universal", "global_step5_universal/zero/1.norm.weight/fp32.pt"),
        "global_step5_universal/mp_rank_00_model_states.pt",
    ),
    "torchtitan": ("step-5/.metadata", "step-5/__0_0.distcp"),
    "nanotron": ("latest.txt", "5/checkpoint_metadata.json", "5/model_config.json"),
}
"""Files of one checkpoint by trainer and format."""


def write(folder: Path, files: tuple[str, ...]) -> Path:
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("5")
    return folder


@pytest.mark.parametrize("name", FOLDERS)
def test_origins_are_recognised_in_the_directory_and_in_the_checkpoint(name: str, tmp_path: Path) -> None:
    origin = name.partition(",")[0]
    load = write(tmp_path / "load", FOLDERS[name])
    (checkpoint,) = [path for path in load.iterdir() if path.is_dir()]
    assert foreign_origin(load) == foreign_origin(checkpoint) == origin


def test_a_checkpoint_of_ours_is_not_foreign(tmp_path: Path) -> None:
    ours = ("latest", "global_step5/run.json", "global_step5/mp_rank_00_model_states.pt")
    assert foreign_origin(write(tmp_path / "ours", ours)) is None
    assert foreign_origin(write(tmp_path / "first", ("global_step5.partial/mp_rank_00_model_states.pt",))) is None
    assert foreign_origin(tmp_path) is None and foreign_origin(tmp_path / "missing") is None


@pytest.mark.parametrize("flag", ["--load", "--save"])
@pytest.mark.parametrize("name", FOLDERS)
def test_a_run_refuses_them(name: str, flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "folder", FOLDERS[name])
    before = sorted(folder.rglob("*"))
    assert pretrain_gpt.main([*RUN, flag, str(folder)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    # Those of Megatron-LM are read, and these files are damaged.
    assert (str(folder) if flag == "--load" else f"--save {folder}") in line and name.partition(",")[0] in line
    assert sorted(folder.rglob("*")) == before
