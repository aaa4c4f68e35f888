"""The one place where DeepSpeed learns of our engine."""

from typing import Any

import deepspeed
import deepspeed.ops
import pytest
from deepspeed.runtime.pipe.engine import PipelineEngine

from deepspeed_ext.plan.errors import PlanError, UserError
from deepspeed_ext.runtime import initialize as initialize_module
from deepspeed_ext.runtime import supported_versions
from deepspeed_ext.runtime.engine import TokenSlicePipelineEngine
from deepspeed_ext.runtime.initialize import init_distributed, initialize
from tests.distributed import run_distributed
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


def test_deepspeeds_engine_is_put_back_even_after_a_failure() -> None:
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


def test_both_engines_live_in_one_process() -> None:
    (found,) = run_distributed(_engines, 1)
    assert found == {"ours": True, "theirs": True, "restored": True, "compiles": False, "trains": True}
