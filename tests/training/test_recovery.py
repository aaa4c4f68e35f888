"""What a run loads that torchrun may start again."""

from pathlib import Path

import pytest

from megatron_terapipe.checkpoint.directories import LATEST
from megatron_terapipe.checkpoint.info import RUN_FILE
from megatron_terapipe.config import CheckpointConfig
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.training.recovery import after_restart

FIRST = {"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_RESTART_COUNT": "0", "GROUP_WORLD_SIZE": "1"}
AGAIN = FIRST | {"TORCHELASTIC_RESTART_COUNT": "1"}
HOSTS = {"GROUP_WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "False"}


@pytest.fixture
def saved(tmp_path: Path) -> str:
    (tmp_path / "global_step5").mkdir()
    (tmp_path / "global_step5" / RUN_FILE).write_text("{}")
    (tmp_path / LATEST).write_text("global_step5")
    return str(tmp_path)


def test_without_restarts_flags_mean_what_they_say(saved: str) -> None:
    config = CheckpointConfig(save=saved)
    assert after_restart(config, {}) is config
    assert after_restart(config, AGAIN | {"TORCHELASTIC_MAX_RESTARTS": "0"}) is config


@pytest.mark.parametrize("load", [None, "pretrained"])
def test_a_run_that_is_started_again_goes_on_from_what_it_saved(saved: str, load: str | None) -> None:
    config = CheckpointConfig(save=saved, load=load, finetune=load is not None)
    assert after_restart(config, AGAIN) == CheckpointConfig(save=saved, load=saved)


def test_before_its_first_checkpoint_it_starts_as_at_first(tmp_path: Path) -> None:
    config = CheckpointConfig(save=str(tmp_path / "none"), load="pretrained", finetune=True)
    assert after_restart(config, AGAIN) is config


@pytest.mark.parametrize("environment", [FIRST, AGAIN, AGAIN | HOSTS], ids=["first", "again", "on two hosts"])
def test_a_run_that_loads_what_it_saves_needs_no_change(saved: str, environment: dict[str, str]) -> None:
    config = CheckpointConfig(save=saved, load=f"{saved}/")
    assert after_restart(config, environment) is config


@pytest.mark.parametrize("flags", [{}, {"ckpt_step": 3}, {"finetune": True}], ids=str)
def test_checkpoints_of_another_run_are_not_taken_for_its_own(saved: str, flags: dict[str, object]) -> None:
    load = saved if flags else None
    with pytest.raises(ConfigError, match=r"holds global_step5, from which this run does not go on.*: add --load"):
        after_restart(CheckpointConfig(save=saved, load=load, **flags), FIRST)


def test_restarts_without_checkpoints_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--max-restarts 3 has no checkpoints to go on from: add --save"):
        after_restart(CheckpointConfig(), FIRST)


def test_hosts_that_would_find_old_addresses_are_refused(saved: str) -> None:
    with pytest.raises(ConfigError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        after_restart(
            CheckpointConfig(save=saved, load=saved), FIRST | HOSTS | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        )
