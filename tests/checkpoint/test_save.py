"""What is saved is whole or has no name, and is as much as was asked for."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from megatron_terapipe.checkpoint import save as saving
from megatron_terapipe.checkpoint.directories import latest_checkpoint
from megatron_terapipe.checkpoint.save import save_checkpoint
from megatron_terapipe.checkpoint.verify import find_checkpoint
from megatron_terapipe.errors import CheckpointError
from megatron_terapipe.training.build_engine import build_engine
from tests.checkpoint.runs import Way, info_of, run_of
from tests.distributed import run_distributed

WAYS = [Way("whole", 1, "--zero-stage 0"), Way("partitioned", 2, "--zero-stage 1")]


def _save(way: Way, folder: str, iterations: list[int], keep_last: int | None, with_optimizer: bool) -> None:
    run = run_of(way)
    engine = build_engine(run)
    for iteration in iterations:
        info = replace(info_of(run), iteration=iteration)
        info = info if with_optimizer else replace(info, optimizer=None)
        save_checkpoint(engine, folder, info, keep_last=keep_last)


def _die_while_saving(way: Way, folder: str, iteration: int, function: str) -> str:
    """Save an iteration, and raise in a function that saving calls."""
    run = run_of(way)
    engine = build_engine(run)
    owner: Any = engine if function == "save_checkpoint" else saving
    original = getattr(owner, function)

    def die(*arguments: Any, **keywords: Any) -> None:
        if function == "save_checkpoint":
            original(*arguments, **keywords)
        raise KeyboardInterrupt

    with patch.object(owner, function, die):
        try:
            save_checkpoint(engine, folder, replace(info_of(run), iteration=iteration))
        except KeyboardInterrupt:
            return "died"
    return "lived"


def _tags(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_what_was_saved_is_there_and_nothing_else(tmp_path: Path) -> None:
    run_distributed(_save, 1, WAYS[0], str(tmp_path), [3, 5], None, True)
    assert _tags(tmp_path) - {"zero_to_fp32.py", "zero_to_torch.py"} == {"global_step3", "global_step5", "latest"}
    assert latest_checkpoint(tmp_path) == tmp_path / "global_step5"


@pytest.mark.parametrize("function", ["save_checkpoint", "put_in_place"])
@pytest.mark.parametrize("iteration", [3, 7], ids=["over_an_older_one", "a_new_one"])
def test_who_dies_while_saving_leaves_the_last_whole_one(tmp_path: Path, function: str, iteration: int) -> None:
    way, folder = WAYS[0], tmp_path
    run_distributed(_save, 1, way, str(folder), [3], None, True)
    before = {path.name: path.read_bytes() for path in (folder / "global_step3").iterdir()}
    assert run_distributed(_die_while_saving, 1, way, str(folder), iteration, function) == ["died"]
    assert latest_checkpoint(folder) == folder / "global_step3"
    assert {path.name: path.read_bytes() for path in (folder / "global_step3").iterdir()} == before
    assert (folder / f"global_step{iteration}.partial").is_dir()
    # The next one that is saved does not mind what was left.
    run_distributed(_save, 1, way, str(folder), [iteration], None, True)
    assert latest_checkpoint(folder) == folder / f"global_step{iteration}"
    assert not (folder / f"global_step{iteration}.partial").exists()


def test_the_newest_are_kept(tmp_path: Path) -> None:
    others = ["global_step2", "notes", "global_step9"]
    for name in others:
        (tmp_path / name).mkdir()
    (tmp_path / "global_step9" / "run.json").write_text("{}")  # of a run that was set back
    run_distributed(_save, 1, WAYS[0], str(tmp_path), [3, 4, 6, 8], 2, True)
    assert {name for name in _tags(tmp_path) if name.startswith("global")} == {
        *("global_step6", "global_step8"),
        *("global_step2", "global_step9"),  # not whole, and not older
    }


@pytest.mark.parametrize("way", WAYS, ids=[way.name for way in WAYS])
def test_the_optimizer_may_be_left_out(tmp_path: Path, way: Way) -> None:
    run_distributed(_save, way.world_size, way, str(tmp_path / "with"), [3], None, True)
    run_distributed(_save, way.world_size, way, str(tmp_path / "without"), [3], None, False)
    sizes = [
        sum(path.stat().st_size for path in (tmp_path / each / "global_step3").glob("*.pt"))
        for each in ("with", "without")
    ]
    assert not list((tmp_path / "without").rglob("*optim_states*"))
    assert sizes[1] < 0.6 * sizes[0] if way.name == "partitioned" else sizes[1] < sizes[0]
    run_distributed(_loads_weights_alone, way.world_size, way, tmp_path / "without")


def _loads_weights_alone(way: Way, folder: Path) -> None:
    run = run_of(replace(way, flags=f"{way.flags} --no-load-optim"), folder)
    assert run.checkpoint is not None
    build_engine(run)
    config = replace(run.config.checkpoint, no_load_optim=False)
    with pytest.raises(CheckpointError, match="no state of the optimizer"):
        find_checkpoint(config, run.config.model, run.layout, "adam")
