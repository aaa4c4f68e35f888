"""The checkpoint of a run that torchrun may start again."""

from pathlib import Path
from typing import Any

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


def test_without_restarts_flags_do_not_change(saved: str) -> None:
    config = CheckpointConfig(save=saved)
    assert after_restart(config, {}) is config
    assert after_restart(config, AGAIN | {"TORCHELASTIC_MAX_RESTARTS": "0"}) is config


@pytest.mark.parametrize("load", [None, "pretrained"])
def test_a_restarted_run_resumes_from_its_own_checkpoint(saved: str, load: str | None) -> None:
    config = CheckpointConfig(save=saved, load=load, finetune=load is not None)
    assert after_restart(config, AGAIN) == CheckpointConfig(save=saved, load=saved)


def test_before_its_first_checkpoint_flags_do_not_change(tmp_path: Path) -> None:
    config = CheckpointConfig(save=str(tmp_path / "none"), load="pretrained", finetune=True)
    assert after_restart(config, AGAIN) is config


@pytest.mark.parametrize("environment", [FIRST, AGAIN, AGAIN | HOSTS], ids=["first", "again", "on two hosts"])
def test_a_run_that_loads_from_its_own_directory_needs_no_change(saved: str, environment: dict[str, str]) -> None:
    config = CheckpointConfig(save=saved, load=f"{saved}/")
    assert after_restart(config, environment) is config


@pytest.mark.parametrize(
    ("flags", "environment", "part"),
    [
        ({"save": True}, {}, "global_step5 of another run"),
        ({"save": True, "load": True, "ckpt_step": 3}, {}, "global_step5 of another run"),
        ({"save": True, "load": True, "finetune": True}, {}, "global_step5 of another run"),
        ({}, {}, "--max-restarts 3 has no checkpoints"),
        (
            {"save": True, "load": True},
            HOSTS | {"TORCHELASTIC_USE_AGENT_STORE": "True"},
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
        ),
    ],
)
def test_refused_restarts(saved: str, flags: dict[str, Any], environment: dict[str, str], part: str) -> None:
    config = CheckpointConfig(
        **{name: saved if value is True and name != "finetune" else value for name, value in flags.items()}
    )
    with pytest.raises(ConfigError, match=part):
        after_restart(config, FIRST | environment)
