"""The norm that clipping uses is that of the whole model's gradient, in every mode, on two stages."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.accelerator import get_accelerator

from deepspeed_ext.runtime.engine import TokenSlicePipelineEngine
from tests.distributed import run_distributed
from tests.runtime.reference import reference_gradients
from tests.runtime.training import Setup, build, feed, weights

CUT = (9, 1, 8, 6)
SCALE_POWER = 8
FP16 = (("fp16", {"enabled": True, "initial_scale_power": SCALE_POWER}),)

MODES = [
    Setup(pp=2, cut=CUT),
    Setup(pp=2, cut=CUT, zero=1),
    Setup(pp=2, cut=CUT, dtype="bf16"),
    Setup(pp=2, cut=CUT, dtype="bf16", zero=1, accumulate="fp32"),
    Setup(pp=2, cut=CUT, dtype="fp16", zero=1, config=FP16),
    Setup(pp=2, cut=CUT, dtype="fp16", zero=1, accumulate="fp32", config=FP16),
]
REPLICATED = [replace(mode, dp=2) for mode in MODES]
ROUNDING = {"fp32": 1e-6, "bf16": 2e-2, "fp16": 2e-3}
"""Of the weights and activations in that type, relative to the norm: 2**-24, 2**-8 and 2**-11, with room for sums."""

CLIP = 0.25


def _engine(setup: Setup, clip: float) -> TokenSlicePipelineEngine:
    # DeepSpeed asks for a CPU with fast fp16; slow will do.
    get_accelerator().is_fp16_supported = lambda: True
    return build(
        setup, config={"gradient_clipping": clip}, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=64.0)
    )


def _norm_and_update(setup: Setup, clip: float) -> tuple[float, dict[str, np.ndarray]]:
    """The norm an engine reports of one step, and what the step with this clipping took off this rank's weights."""
    engine = _engine(setup, clip)
    before = weights(engine)
    engine.train_batch(feed(engine, setup))
    assert engine.was_step_applied()
    after = weights(engine)
    update = {name: (before[name].astype(np.float64) - after[name]) / 64.0 for name in before}
    return float(engine.get_global_grad_norm()), update


def _norms_and_updates(setups: list[Setup]) -> list[tuple[float, dict[str, np.ndarray]]]:
    return [_norm_and_update(setup, CLIP) for setup in setups]


def norm_of(parts: list[dict[str, Any]]) -> float:
    """2-norm over all stages. What several hold counts once, as the first has it: that of the head has no positions."""
    whole = {name: value for part in reversed(parts) for name, value in part.items()}
    return float(np.sqrt(sum(np.square(value.astype(np.float64)).sum() for value in whole.values())))


@pytest.mark.parametrize("setups", [MODES, REPLICATED], ids=["pp2", "pp2-dp2"])
def test_the_norm_and_the_clipped_step_are_autograds(setups: list[Setup]) -> None:
    by_rank = run_distributed(_norms_and_updates, setups[0].world_size, setups)
    for index, setup in enumerate(setups):
        expected = norm_of([reference_gradients(setup)[1]])
        assert expected > 4 * CLIP, "clipping must have something to do"
        for found in by_rank:
            assert found[index][0] == pytest.approx(expected, rel=ROUNDING[setup.dtype]), f"{setup}: before clipping"
        clipped = norm_of([found[index][1] for found in by_rank])
        assert clipped == pytest.approx(CLIP, rel=max(1e-5, ROUNDING[setup.dtype])), f"{setup}: after clipping"
