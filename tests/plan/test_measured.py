"""Measured steps compared with their simulation: op costs, the unexplained time, and its parts."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ext.plan.command import main
from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.measured import Comparison, Gap, RankTime, StepRecord, gaps, measured_costs
from deepspeed_ext.plan.ops import Op, OpKind, PipelineShape
from deepspeed_ext.plan.schedules import SCHEDULES, rank_orders
from deepspeed_ext.plan.simulate import simulate
from deepspeed_ext.plan.timeline import Span, Timeline
from tests.strategies import tables


def timeline_of(*ranks: str, shape: PipelineShape) -> Timeline:
    """A timeline written as `0F0.0 0-1, 0B0.0 1-3` for each rank."""
    spans = []
    for text in ranks:
        words = [part.split() for part in text.split(",")]
        spans.append(tuple(Span(Op.parse(op), *map(float, times.split("-"))) for op, times in words))
    return Timeline(shape, tuple(spans), "s")


TWO_RANKS = PipelineShape(2, 1, 1)
# Rank 1 gets the activation 0.5 after it is done, and rank 0 the gradient 1 after; rank 1 idles for 0.25 in between.
LATE = timeline_of("0F0.0 0-2, 0B0.0 9-12", "1F0.0 2.5-4.5, 1B0.0 4.75-8", shape=TWO_RANKS)


@st.composite
def simulated(draw) -> tuple[Timeline, OpCosts]:
    """A simulated timeline, and the costs it was simulated with."""
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    model_chunks = draw(st.integers(1, 3)) if name == "interleaved" else 1
    num_ranks = draw(st.integers(1, 3))
    shape = PipelineShape(num_ranks * model_chunks, draw(st.integers(1, 3)), draw(st.integers(1, 3)), model_chunks)
    apart = draw(tables(shape)) if name == "zero-bubble" else None
    costs = OpCosts(draw(tables(shape)), draw(tables(shape)), apart)
    return simulate(rank_orders(SCHEDULES[name], shape), shape, costs), costs


# Costs


@given(simulated())
def test_a_simulated_step_gives_the_costs_it_was_simulated_with(step):
    timeline, costs = step
    found = measured_costs([timeline])
    for name in ("forward", "backward", "weight_gradient"):
        expected = getattr(costs, name)
        assert (getattr(found, name) is None) == (expected is None)
        for mine, theirs in zip(getattr(found, name) or (), expected or (), strict=True):
            assert mine == pytest.approx(theirs, abs=1e-9, rel=1e-6)


def test_costs_are_medians_over_micro_batches_and_steps():
    shape = PipelineShape(1, 2, 1)
    steps = [
        timeline_of("0F0.0 0-1, 0F1.0 1-3, 0B0.0 3-4, 0B1.0 4-9", shape=shape),
        timeline_of("0F0.0 0-3, 0F1.0 3-13, 0B0.0 13-14, 0B1.0 14-15", shape=shape),
    ]
    costs = measured_costs(steps)
    assert costs.forward == ((2.5,),)  # of 1, 2, 3 and 10
    assert costs.backward == ((1.0,),) and costs.weight_gradient is None


def test_whole_backwards_are_divided_as_those_in_two_parts():
    shape = PipelineShape(1, 1, 3)
    step = timeline_of(
        "0F0.0 0-1, 0F0.1 1-2, 0F0.2 2-3, 0BI0.2 3-6, 0BW0.2 6-7, 0BI0.1 7-13, 0BW0.1 13-15, 0B0.0 15-19", shape=shape
    )
    costs = measured_costs([step])
    assert costs.backward == ((3.0, 6.0, 3.0),)
    assert costs.weight_gradient == ((1.0, 2.0, 1.0),)
    assert Comparison((step,)).efficiency == 1.0


# The unexplained time


@given(simulated())
def test_a_simulation_explains_itself(step):
    timeline, _ = step
    comparison = Comparison((timeline,))
    assert comparison.efficiency == pytest.approx(1.0)
    assert comparison.transfer == pytest.approx(0.0, abs=1e-9)
    assert comparison.host_overhead == pytest.approx(0.0, abs=1e-9)
    assert all(abs(difference.size) < 1e-6 for difference in comparison.differences())
    assert comparison.simulated_with_gaps.makespan == pytest.approx(timeline.makespan)


@given(simulated(), st.floats(0, 10))
def test_the_time_of_a_rank_adds_up(step, later):
    timeline, _ = step

    def after(row: tuple[Span, ...], time: float) -> tuple[Span, ...]:
        return tuple(Span(op, time + start, time + end) for op, start, end in row)

    first, *others = timeline.spans
    moved = replace(timeline, spans=(after(first, 3), *(after(row, 3 + later) for row in others)))
    for spent in Comparison((moved,)).rank_times:
        total = spent.busy + spent.dependency + spent.transfer + spent.host_overhead
        assert total == pytest.approx(moved.makespan)
        assert min(spent.dependency, spent.transfer, spent.host_overhead) >= -1e-9


def test_transfer_and_overhead_are_estimated_and_close_the_gap():
    comparison = Comparison((LATE,))
    found = gaps(LATE)
    assert found == [[Gap(0.0, 0.0, False), Gap(6.0, 1.0, True)], [Gap(2.0, 0.5, True), Gap(0.0, 0.25, False)]]
    assert comparison.rank_times == [RankTime(5.0, 6.0, 1.0, 0.0), RankTime(5.25, 6.0, 0.5, 0.25)]
    (forward, backward) = comparison.mean_times().items()
    assert forward == (OpKind.FORWARD, (2.0, 2.0)) and backward == (OpKind.BACKWARD, (3.125, 3.125))
    assert comparison.simulated.makespan == 10.25  # 2 + 2 + 3.25 + 3
    assert comparison.efficiency == 10.25 / 12
    assert comparison.transfer == 0.75  # the median of 0.5 and 1
    assert comparison.host_overhead == 0.25
    # Each op a quarter longer, and two transfers of the time that the receiver waits beyond that.
    assert comparison.simulated_with_gaps.makespan == 10.25 + 4 * 0.25 + 2 * 0.5


def test_with_their_own_times_only_gaps_remain():
    shape = PipelineShape(1, 3, 1)
    step = timeline_of("0F0.0 0-1, 0F1.0 1-2, 0F2.0 2-7, 0B0.0 8-9, 0B1.0 9-10, 0B2.0 10-11", shape=shape)
    comparison = Comparison((step,))
    assert comparison.simulated.makespan == 6.0  # one op that is slow for once is not expected to be
    assert comparison.simulated_with_own_times.makespan == 10.0
    assert comparison.measured.makespan == 11.0
    assert comparison.step_efficiencies == (10 / 11,)  # the mean of its forwards is 7/3


def test_the_largest_differences_come_first():
    slow = replace(LATE, spans=(LATE.spans[0], (LATE.spans[1][0], Span(Op.parse("1B0.0"), 4.75, 8.75))))
    longest = replace(slow, spans=((LATE.spans[0][0], Span(Op.parse("0B0.0"), 9.0, 12.125)), slow.spans[1]))
    # Of steps of 12, 12.125 and 13 the middle one is shown; of ops, the median time is expected.
    comparison = Comparison(
        (LATE, longest, replace(LATE, spans=((LATE.spans[0][0], Span(Op.parse("0B0.0"), 9.0, 13.0)), LATE.spans[1])))
    )
    assert comparison.measured is longest
    assert comparison.costs.backward == ((3.125,), (3.25,))
    shown = [(str(each.op), each.duration, each.late) for each in comparison.differences()]
    assert shown == [("1B0.0", 0.75, 0.25), ("1F0.0", 0.0, 0.5), ("0B0.0", 0.0, 0.25), ("0F0.0", 0.0, 0.0)]


# Files


def test_a_directory_of_steps_is_read_in_order_and_the_last_program_is_shown(capsys, tmp_path):
    other = timeline_of("0F0.0 0-1, 0B0.0 1-2", shape=PipelineShape(1, 1, 1))
    for iteration, timeline in ((3, other), (4, LATE), (10, LATE)):
        record = StepRecord(timeline, "1f1b", iteration, (16,))
        assert StepRecord.from_json(record.to_json()) == record and Timeline.from_json(record.to_json()) == timeline
        (tmp_path / f"iteration_{iteration:06d}.json").write_text(record.to_json())
    (tmp_path / "timeline.json").write_text("drawn from one of them")
    svg = tmp_path / "both.svg"
    assert main(["--timeline", str(tmp_path), "--svg", str(svg)]) == 0
    printed = capsys.readouterr().out
    assert "1f1b, iterations 4 to 10: measured" in svg.read_text()
    assert "measured steps           2, of 12 s to 12 s; the median one is shown" in printed
    assert "estimated transfer       750 ms from" in printed
    assert "  0B0.0                  +0 ms          +1 s" in printed
