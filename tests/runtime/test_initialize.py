"""The version gate, and the one place where DeepSpeed learns of our engine."""

from typing import Any

import deepspeed
import deepspeed.ops
import pytest
from deepspeed.runtime.pipe.engine import PipelineEngine

from deepspeed_ext.plan.errors import PlanError, UserError
from deepspeed_ext.runtime import initialize as initialize_module
from deepspeed_ext.runtime.engine import TokenSlicePipelineEngine
from deepspeed_ext.runtime.initialize import check_deepspeed_version, init_distributed, initialize
from tests.distributed import run_distributed
from tests.runtime import stock
from tests.runtime.training import Setup, build, losses


@pytest.mark.parametrize("version", ["0.19.2", "0.19.7", "0.20.0", "1.0"])
def test_other_versions_are_refused_in_one_line(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initialize_module, "version", lambda package: version)
    for call in (check_deepspeed_version, init_distributed, lambda: initialize(None, {})):
        with pytest.raises(UserError) as refused:
            call()
        message = str(refused.value)
        assert message.startswith(f"deepspeed {version} is installed")
        assert "pip install 'deepspeed<0.20,>=0.19.8'" in message
        assert "\n" not in message


@pytest.mark.parametrize("version", ["0.19.8", "0.19.12"])
def test_supported_versions_pass(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initialize_module, "version", lambda package: version)
    check_deepspeed_version()


def test_the_installed_version_is_supported() -> None:
    check_deepspeed_version()


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
