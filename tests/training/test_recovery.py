"""The checkpoint of a run that torchrun may start again."""

from dataclasses import replace
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


@pytest.mark.parametrize(
    ("load", "environment", "changes"),
    [
        ("pretrained", {}, False),
        ("pretrained", AGAIN | {"TORCHELASTIC_MAX_RESTARTS": "0"}, False),
        (None, AGAIN, True),
        ("pretrained", AGAIN, True),
        # It loads from its own directory.
        *(("SAVED/", environment, False) for environment in (FIRST, AGAIN, AGAIN | HOSTS)),
    ],
)
def test_a_restarted_run_resumes_from_its_own_checkpoint(
    saved: str, load: str | None, environment: dict[str, str], changes: bool
) -> None:
    finetunes = load == "pretrained"
    config = CheckpointConfig(save=saved, load=load and load.replace("SAVED", saved), finetune=finetunes)
    found = after_restart(config, environment)
    assert found == CheckpointConfig(save=saved, load=saved) if changes else found is config
    if changes:  # Not before its first checkpoint.
        none = replace(config, save=f"{saved}/none")
        assert after_restart(none, environment) is none


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
