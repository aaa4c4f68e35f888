"""Engines are made of DeepSpeed's configuration, and settings that cannot be followed are refused."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import deepspeed
import deepspeed.ops
import pytest
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.utils import logger
from torch import nn

from deepspeed_ext.plan.errors import PlanError, UserError
from deepspeed_ext.plan.layout import ParallelLayout
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime import initialize as initialize_module
from deepspeed_ext.runtime import supported_versions
from deepspeed_ext.runtime.engine import TokenSlicePipelineEngine
from deepspeed_ext.runtime.initialize import (
    init_distributed,
    initialize,
    read_settings,
    settings_without_effect,
    without_settings,
)
from deepspeed_ext.runtime.module import TokenSlicePipelineModule
from tests.distributed import run_distributed
from tests.runtime import models
from tests.runtime.equivalence import stock
from tests.runtime.training import Setup, build, losses


def test_other_versions_are_refused_before_anything_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supported_versions, "version", lambda package: "0.19.2")
    for call in (init_distributed, lambda: initialize(None, {})):
        with pytest.raises(UserError, match=r"^deepspeed 0\.19\.2 is installed"):
            call()


def test_an_unknown_schedule_is_refused_before_anything_is_made() -> None:
    with pytest.raises(PlanError, match="schedule 'dualpipe' is not known"):
        initialize(None, {}, schedule="dualpipe")


def test_deepspeeds_engine_is_restored_after_a_failure() -> None:
    with pytest.raises(ZeroDivisionError), initialize_module._engine_class(TokenSlicePipelineEngine):
        assert deepspeed.PipelineEngine is TokenSlicePipelineEngine
        raise ZeroDivisionError
    assert deepspeed.PipelineEngine is PipelineEngine


def _engines() -> dict[str, Any]:
    setup = Setup(cut=(12, 12))
    engine = build(setup)
    theirs = stock.stock_engine(stock.dense_layers(), {}, stages=1)
    compiled = deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"]
    reversed_names = build(Setup(cut=(12, 12), schedule="gpipe"))
    return {
        "ours": type(engine) is TokenSlicePipelineEngine and isinstance(engine, PipelineEngine),
        "theirs": type(theirs) is PipelineEngine,
        "restored": deepspeed.PipelineEngine is PipelineEngine,
        "compiles": compiled,
        "trains": losses(engine, setup, 1) == losses(reversed_names, setup, 1),
    }


CUT = (12, 12)
CONFIG = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}


def module(ranks: int = 1) -> TokenSlicePipelineModule:
    layout = ParallelLayout(pipeline_parallel_size=ranks, num_token_slices=2)
    return TokenSlicePipelineModule(models.layers(), layout=layout, token_slices=TokenSlices(CUT))


SETUP = Setup(cut=CUT)
FP16 = {"fp16": {"enabled": True}}
REFUSALS: dict[str, Callable[[TokenSlicePipelineEngine, str], Any]] = {
    "deepspeed.initialize makes an engine that ignores token slices: call initialize of": (
        lambda engine, folder: deepspeed.initialize(model=module(), config=CONFIG)
    ),
    "initialize takes a TokenSlicePipelineModule, and the model is a PipelineModule": (
        lambda engine, folder: initialize(PipelineModule([LayerSpec(nn.Linear, 4, 4)], num_stages=1), CONFIG)
    ),
    "initialize takes a TokenSlicePipelineModule, and the model is a Linear": (
        lambda engine, folder: initialize(nn.Linear(4, 4), CONFIG)
    ),
    "initialize got no DeepSpeed configuration": lambda engine, folder: initialize(module()),
    "the layout has 4 ranks (data 1 x tensor 1 x pipeline 4), and 1 processes run": lambda *_: module(ranks=4),
    "schedule 'zero-bubble' has one stage on each pipeline rank, and there are 2 model chunks": (
        lambda engine, folder: build(Setup(cut=CUT, model_chunks=2, schedule="zero-bubble"))
    ),
    "costs are for schedule='optimised'": lambda *_: build(SETUP, engine_keywords={"costs": lambda shape: None}),
    "has no checkpoint 'other', but saved: give one of its tags": (
        lambda engine, folder: engine.load_checkpoint(folder, tag="other")
    ),
    "has no checkpoint 'other', but none at all": (
        lambda engine, folder: engine.load_checkpoint(f"{folder}/none", tag="other")
    ),
    # DeepSpeed divides gradients by a loss scale that it never applied (U3).
    "use ZeRO stage 1": lambda engine, folder: build(SETUP, config=FP16),
}


def _refusals(folder: str) -> dict[str, str]:
    engine = build(SETUP)
    engine.save_checkpoint(folder, tag="saved")
    get_accelerator().is_fp16_supported = lambda: True
    found = {}
    for line, call in REFUSALS.items():
        with pytest.raises((UserError, PlanError)) as refused:
            call(engine, folder)
        found[line] = str(refused.value)
    return found


def _warnings() -> list[str]:
    with patch.object(logger, "log") as logged:
        build(Setup(cut=CUT, schedule="interleaved"), config={"activation_checkpointing": {"profile": False}})
    lines = [str(call.args[1]) for call in logged.call_args_list]
    return [line for line in lines if "without effect" in line or "interleaved" in line]


def _all(directory: str) -> tuple[dict[str, str], list[str], dict[str, Any]]:
    return _refusals(directory), _warnings(), _engines()


@pytest.fixture(scope="module")
def found_by_rank(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], list[str], dict[str, Any]]:
    return run_distributed(_all, 1, str(tmp_path_factory.mktemp("checkpoint")))[0]


def test_mistakes_are_refused_in_one_line(found_by_rank) -> None:
    for line, found in found_by_rank[0].items():
        assert line in found and "\n" not in found


def test_settings_without_effect_are_logged(found_by_rank) -> None:
    effect, schedule = found_by_rank[1]
    assert "without effect in the DeepSpeed configuration: activation_checkpointing" in effect
    assert "the schedule 'interleaved' is '1f1b' with one model chunk" in schedule


def test_both_engines_in_one_process(found_by_rank) -> None:
    assert found_by_rank[2] == {"ours": True, "theirs": True, "restored": True, "compiles": False, "trains": True}


def test_settings_are_a_dict_a_file_or_in_the_keywords(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    expected = {"train_batch_size": 8, "pipeline": {"stages": "auto"}, "curriculum_learning": {"enabled": False}}
    path.write_text(json.dumps(expected))
    assert read_settings(expected, {}) == expected
    assert read_settings(path, {}) == read_settings(str(path), {}) == expected
    assert read_settings(None, {"config_params": expected}) == expected
    assert read_settings(None, {"args": SimpleNamespace(deepspeed_config=str(path))}) == expected


@pytest.mark.parametrize(
    ("settings", "line"),
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
def test_settings_that_cannot_be_followed_are_refused(settings: Any, line: str) -> None:
    with pytest.raises(UserError) as refused:
        read_settings(settings, {})
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


def test_keywords_bring_no_second_configuration() -> None:
    brought = SimpleNamespace(deepspeed_config="settings.json", seed=1)
    others = without_settings({"args": brought, "config_params": {}, "lr_scheduler": None})
    assert others == {"args": SimpleNamespace(deepspeed_config=None, seed=1), "lr_scheduler": None}
    assert brought.deepspeed_config == "settings.json"


def test_sections_without_effect_are_listed_in_one_line() -> None:
    assert settings_without_effect({"train_batch_size": 8, "pipeline": {"activation_checkpoint_interval": 1}}) is None
    assert settings_without_effect({"pipeline": {"pipe_partitioned": False, "grad_partitioned": False}}) is None
    line = settings_without_effect({"activation_checkpointing": {"profile": True}, "pipeline": {"stages": 4}})
    assert line == (
        "without effect in the DeepSpeed configuration: activation_checkpointing (recompute with the module's "
        "activation_checkpoint_interval), pipeline.stages (the module's layout decides)"
    )
