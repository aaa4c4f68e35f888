"""Which iterations leave a checkpoint, and flags of a dry run that need another."""

import pytest

from megatron_terapipe.config import CheckpointConfig, TrainingConfig
from megatron_terapipe.errors import ConfigError


def test_checkpoints_that_are_due() -> None:
    every = CheckpointConfig(save="x", save_interval=4, extra_save_iterations=(0, 3, 4))
    assert [done for done in range(10) if every.saves_after(done)] == [0, 3, 4, 8]
    assert not any(CheckpointConfig(save="x").saves_after(done) for done in range(10))
    assert not CheckpointConfig(save="x", save_interval=4).saves_after(0)


@pytest.mark.parametrize(
    ("extra", "save", "line"),
    [
        ((5, 7), None, "--extra-save-iterations 5 does not say where to save: add --save"),
        ((5, -7), "x", "--extra-save-iterations -7 is out of range: give 0 or more"),
        ((), "x", "--extra-save-iterations (nothing) is no list of iterations: give numbers from 0 on"),
    ],
)
def test_extra_saves_that_are_wrong(extra: tuple[int, ...], save: str | None, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CheckpointConfig(save=save, extra_save_iterations=extra)
    assert str(caught.value) == line


def test_a_hostfile_is_for_dry_runs() -> None:
    assert TrainingConfig(train_iters=1, hostfile="hosts", dry_run_without_files=True).dry_run
    with pytest.raises(ConfigError, match=r"^--hostfile hosts is for the launcher: .*, or add --dry-run$"):
        TrainingConfig(train_iters=1, hostfile="hosts")
