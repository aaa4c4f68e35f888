"""DeepSpeed's configuration: where it comes from, what has no value or no effect, and what is refused."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.runtime.initialize import read_settings, settings_without_effect, without_settings


def test_it_is_a_dict_a_file_or_in_the_keywords(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_text('{"train_batch_size": 8, "pipeline": {"stages": "auto"}}')
    expected = {"train_batch_size": 8, "pipeline": {"stages": "auto"}}
    assert read_settings(expected, {}) == expected
    assert read_settings(path, {}) == read_settings(str(path), {}) == expected
    assert read_settings(None, {"config_params": expected}) == expected
    assert read_settings(None, {"args": SimpleNamespace(deepspeed_config=str(path))}) == expected


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (None, "initialize got no DeepSpeed configuration"),
        ("nowhere.json", "the DeepSpeed configuration nowhere.json cannot be read"),
        (
            {"train_batch_size": "auto", "optimizer": {"params": {"lr": "auto"}}},
            "the value 'auto' for train_batch_size, optimizer.params.lr",
        ),
        ({"curriculum_learning": {"enabled": True}}, "enables curriculum_learning"),
        (
            {"data_efficiency": {"data_routing": {"random_ltd": {"enabled": True}}}},
            "enables data_efficiency.data_routing.random_ltd",
        ),
        ({"progressive_layer_drop": {"enabled": True}}, "enables progressive_layer_drop"),
        ({"sequence_parallel_size": 2}, "ParallelLayout(sequence_parallel_size=...)"),
    ],
)
def test_what_is_not_done_here_is_refused_in_one_line(settings: Any, said: str) -> None:
    with pytest.raises(UserError) as refused:
        read_settings(settings, {})
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_keywords_bring_no_second_configuration() -> None:
    brought = SimpleNamespace(deepspeed_config="settings.json", seed=1)
    left = without_settings({"args": brought, "config_params": {}, "lr_scheduler": None})
    assert left == {"args": SimpleNamespace(deepspeed_config=None, seed=1), "lr_scheduler": None}
    assert brought.deepspeed_config == "settings.json"


def test_what_is_switched_off_may_stand_there() -> None:
    settings = {"curriculum_learning": {"enabled": False}, "train_batch_size": 8}
    assert read_settings(settings, {}) == settings


def test_sections_without_effect_are_listed_in_one_line() -> None:
    assert settings_without_effect({"train_batch_size": 8, "pipeline": {"activation_checkpoint_interval": 1}}) is None
    assert settings_without_effect({"pipeline": {"pipe_partitioned": False, "grad_partitioned": False}}) is None
    line = settings_without_effect({"activation_checkpointing": {"profile": True}, "pipeline": {"stages": 4}})
    assert line == (
        "without effect in the DeepSpeed configuration: activation_checkpointing (recompute with the module's "
        "activation_checkpoint_interval), pipeline.stages (the module's layout decides)"
    )
