"""The fast simulator against the plain one."""

import subprocess
import sys
from pathlib import Path

import numba
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba.core import event

from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.errors import ScheduleDeadlock
from deepspeed_ext.plan.memory import peak_activation
from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.schedules import forward_order
from deepspeed_ext.plan.simulate import arrays as module
from deepspeed_ext.plan.simulate import simulate
from deepspeed_ext.plan.simulate.arrays import COMPILING, cache_folder, compiled, empty_results
from deepspeed_ext.plan.simulate.compiled import CompiledOrders
from tests.plan.simulate.test_simulate import ops
from tests.strategies import costs_with_links, orders_of_pipelines

SHAPE = PipelineShape(num_stages=2, num_micro_batches=1, num_token_slices=2)


def assert_equal(orders, shape, costs) -> None:
    """Times to the last bit; the bubble sums them up in another order."""
    plain = simulate(orders, shape, costs)
    fast = CompiledOrders.of(orders, shape).simulate(costs)
    assert fast.timeline().spans == plain.spans
    assert fast.makespan == plain.makespan
    assert fast.bubble_ratio == pytest.approx(plain.bubble_ratio, rel=0, abs=1e-12)


@given(orders_of_pipelines(), st.data())
def test_equal_to_the_plain_simulator(orders_and_shape, data):
    orders, shape = orders_and_shape
    assert_equal(orders, shape, data.draw(costs_with_links(shape)))


@given(orders_of_pipelines(), st.data())
def test_peaks_of_activation_are_those_of_the_timeline(orders_and_shape, data):
    orders, shape = orders_and_shape
    lengths = data.draw(st.lists(st.integers(1, 99), min_size=shape.num_token_slices, max_size=shape.num_token_slices))
    timeline = simulate(orders, shape, OpCosts.uniform(shape, weight_gradient=1.0))
    compiled = CompiledOrders.of(orders, shape)
    assert compiled.peak_activation(lengths) == peak_activation(timeline, lengths)
    assert compiled.peak_activation() == peak_activation(timeline)


@given(orders_of_pipelines(3, 3, 3), st.data())
def test_replays_do_not_touch_each_other(orders_and_shape, data):
    orders, shape = orders_and_shape
    compiled = CompiledOrders.of(orders, shape)
    costs, others = data.draw(costs_with_links(shape)), data.draw(costs_with_links(shape))
    first = compiled.simulate(costs)
    compiled.simulate(others)
    again = compiled.simulate(costs)
    assert first.starts.tolist() == again.starts.tolist() and first.ends.tolist() == again.ends.tolist()


def test_evaluation_and_ranks_without_ops():
    for orders in ([list(forward_order(SHAPE, rank)) for rank in range(2)], [ops("0F0.0"), []]):
        assert_equal(orders, SHAPE, OpCosts.uniform(SHAPE, transfer=0.5))


def test_deadlocks_are_explained_as_the_plain_simulator_does():
    orders = [ops("0F0.0 0B0.1 0F0.1 0B0.0"), ops("1F0.0 1F0.1 1B0.1 1B0.0")]
    compiled = CompiledOrders.of(orders, SHAPE)
    with pytest.raises(ScheduleDeadlock, match=r"rank 0 at 0B0\.1 waits for 0F0\.1 and 1B0\.1; rank 1 at 1F0\.1 waits"):
        compiled.simulate(OpCosts.uniform(SHAPE))


def test_numba_is_not_loaded_before_it_is_needed():
    program = "import sys, deepspeed_ext.plan.simulate.compiled; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


@pytest.mark.parametrize(
    ("user", "chosen", "folder"),
    [
        ("cache", "", "cache/terapipe"),
        ("cache", "chosen", "chosen"),
        # Not beside the file, where pip would leave it.
        ("file", "", None),
        ("file", "file/below", None),
    ],
)
def test_machine_code_is_cached_outside_of_the_package(
    user: str, chosen: str, folder: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / user))
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / chosen) if chosen else "")
    before = numba.config.CACHE_DIR
    cache_folder.cache_clear()
    try:
        found = compiled(empty_results).stats.cache_path
    finally:
        cache_folder.cache_clear()
    assert numba.config.CACHE_DIR == before
    assert (found and Path(found).parents[1]) == (folder and tmp_path / folder)


def test_the_first_compilation_is_announced_once(capsys: pytest.CaptureFixture[str]) -> None:
    def compile_twice() -> None:
        for _ in range(2):
            with event.trigger_event("numba:compile", data={"dispatcher": compiled(empty_results)}):
                pass

    compile_twice()
    capsys.readouterr()
    module._say_when_compiling.cache_clear()
    compile_twice()
    assert capsys.readouterr().err == f"{COMPILING}\n"
