"""Calls that would train something else, or stop without a reason: each is one line."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.utils import logger, safe_get_full_fp32_param
from torch import nn

from deepspeed_ext.plan.errors import PlanError, UserError
from deepspeed_ext.plan.layout import ParallelLayout
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.initialize import initialize
from deepspeed_ext.runtime.module import TokenSlicePipelineModule
from tests.distributed import run_distributed
from tests.runtime import models
from tests.runtime.training import Setup, as_numpy, build, losses, weights

CUT = (12, 12)
CONFIG = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}


def module(ranks: int = 1) -> TokenSlicePipelineModule:
    layout = ParallelLayout(pipeline_parallel_size=ranks, num_token_slices=2)
    return TokenSlicePipelineModule(models.layers(), layout=layout, token_slices=TokenSlices(CUT))


def _said(call: Callable[[], Any]) -> str:
    try:
        call()
    except (UserError, PlanError) as error:
        return str(error)
    return ""


def _refusals(directory: str) -> dict[str, str]:
    stock = PipelineModule([LayerSpec(nn.Linear, 4, 4)], num_stages=1)
    setup = Setup(cut=CUT)
    engine = build(setup)
    engine.save_checkpoint(directory, tag="saved")
    return {
        "deepspeed.initialize": _said(lambda: deepspeed.initialize(model=module(), config=CONFIG)),
        "stock module": _said(lambda: initialize(stock, CONFIG)),
        "plain module": _said(lambda: initialize(nn.Linear(4, 4), CONFIG)),
        "no config": _said(lambda: initialize(module())),
        "layout": _said(lambda: module(ranks=4)),
        "model chunks": _said(lambda: build(Setup(cut=CUT, model_chunks=2, schedule="zero-bubble"))),
        "costs": _said(lambda: build(setup, engine_keywords={"costs": lambda shape: None})),
        "tag": _said(lambda: engine.load_checkpoint(directory, tag="other")),
        "directory": _said(lambda: engine.load_checkpoint(directory + "/none", tag="other")),
    }


EXPECTED = {
    "deepspeed.initialize": "deepspeed.initialize makes an engine that ignores token slices: call initialize of",
    "stock module": "initialize takes a TokenSlicePipelineModule, and the model is a PipelineModule",
    "plain module": "initialize takes a TokenSlicePipelineModule, and the model is a Linear",
    "no config": "initialize got no DeepSpeed configuration",
    "layout": "the layout has 4 ranks (data 1 x tensor 1 x pipeline 4), and 1 processes run",
    "model chunks": "schedule 'zero-bubble' has one stage on each pipeline rank, and there are 2 model chunks",
    "costs": "costs are for schedule='optimised'",
    "tag": "has no checkpoint 'other', but saved: give one of its tags",
    "directory": "has no checkpoint 'other', but none at all",
}


def test_each_is_refused_in_one_line(tmp_path: Path) -> None:
    (found,) = run_distributed(_refusals, 1, str(tmp_path))
    assert found.keys() == EXPECTED.keys()
    for name, said in EXPECTED.items():
        assert said in found[name], name
        assert "\n" not in found[name]


class Lines(logging.Handler):
    """Remembers what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _warnings() -> list[str]:
    lines = Lines()
    logger.addHandler(lines)
    build(Setup(cut=CUT, schedule="interleaved"), config={"activation_checkpointing": {"profile": False}})
    return [line for line in lines.lines if "without effect" in line or "interleaved" in line]


def test_what_runs_instead_and_what_has_no_effect_is_said() -> None:
    ((effect, schedule),) = run_distributed(_warnings, 1)
    assert "without effect in the DeepSpeed configuration: activation_checkpointing" in effect
    assert "the schedule 'interleaved' is '1f1b' with one model chunk" in schedule


def _saved(directory: str, setup: Setup) -> dict[str, Any]:
    engine = build(setup)
    losses(engine, setup, 1)
    before = weights(engine)
    if setup.dtype == "fp32":
        engine.save_checkpoint(directory)
        engine.load_checkpoint(directory)
    engine.save_16bit_model(directory)
    state = {name: as_numpy(weight) for name, weight in engine.module_state_dict().items()}
    full = [safe_get_full_fp32_param(weight) for weight in engine.module.parameters()]
    return {"weights": before, "state": state, "full": None if full[0] is None else [as_numpy(each) for each in full]}


def test_weights_of_all_stages_are_saved_in_one_file(tmp_path: Path) -> None:
    setup = Setup(pp=2, cut=CUT)
    by_rank = run_distributed(_saved, 2, str(tmp_path), setup)
    whole = torch.load(tmp_path / "pytorch_model.bin")
    expected = by_rank[1]["weights"] | by_rank[0]["weights"]
    assert whole.keys() == expected.keys()
    for name, weight in expected.items():
        assert np.array_equal(as_numpy(whole[name]), weight), name
    for found in by_rank:
        assert found["state"].keys() == found["weights"].keys()
        # In fp32 the weight itself is what DeepSpeed would look up.
        assert found["full"] is None


def test_fp32_copies_of_bf16_weights_are_found(tmp_path: Path) -> None:
    (found,) = run_distributed(_saved, 1, str(tmp_path), Setup(cut=CUT, dtype="bf16"))
    for full, weight in zip(found["full"], found["weights"].values(), strict=True):
        assert full.dtype == np.float32
        assert np.allclose(full, weight, rtol=1e-2)
