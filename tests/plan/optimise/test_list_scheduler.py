import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_ext.plan.memory import peak_activation
from deepspeed_ext.plan.simulate import check_complete, simulate
from deepspeed_ext.plan.solve.list_scheduler import list_schedule
from deepspeed_ext.plan.solve.problem import NumberedOrders, peaks, replay
from tests.plan.optimise.pipelines import problems


def drawn(problem, seed):
    return np.random.default_rng(seed).random((3, problem.shape.num_stages, problem.num_units))


@given(problems(is_split=True), st.integers(0, 1000), st.sampled_from([0.0, 0.5, 1e9]))
@settings(max_examples=200, deadline=None)
def test_whatever_the_priorities_nothing_deadlocks_and_the_limit_is_kept(problem, seed, patience):
    makespan, rows = list_schedule(problem, drawn(problem, seed), patience)
    orders = problem.named(list(rows))
    check_complete(orders, problem.shape)
    timeline = simulate(orders, problem.shape, problem.costs)
    assert max(peak_activation(timeline, problem.lengths)) <= problem.memory_limit + 1e-9
    # With patience a rank says what it will do next and waits; the simulator does not wait for less.
    assert abs(timeline.end - makespan) <= 1e-9 * makespan


@given(problems(is_split=True), st.integers(0, 1000))
@settings(max_examples=100, deadline=None)
def test_a_replay_is_what_the_simulator_says(problem, seed):
    _, rows = list_schedule(problem, drawn(problem, seed), 0.0)
    orders = NumberedOrders.of(list(rows))
    timeline = simulate(problem.named(list(rows)), problem.shape, problem.costs)
    assert replay(problem, orders) == timeline.end
    expected = peak_activation(timeline, problem.lengths)
    assert np.allclose(peaks(problem, orders), expected, rtol=0, atol=1e-12)


@given(problems(is_split=True))
@settings(max_examples=50, deadline=None)
def test_numbers_name_their_ops(problem):
    _, rows = list_schedule(problem, drawn(problem, 0), 0.0)
    again = problem.numbered(problem.named(list(rows)))
    assert all(np.array_equal(before, after) for before, after in zip(rows, again, strict=True))


def test_orders_that_deadlock_have_no_makespan():
    from deepspeed_ext.plan.costs import OpCosts
    from deepspeed_ext.plan.ops import PipelineShape
    from deepspeed_ext.plan.schedules import gpipe, rank_orders
    from deepspeed_ext.plan.solve.problem import SchedulingProblem

    shape = PipelineShape(2, 2, 1)
    problem = SchedulingProblem.of(shape, OpCosts.uniform(shape, weight_gradient=1.0))
    first, second = problem.numbered(rank_orders(gpipe, shape))
    assert replay(problem, NumberedOrders.of([first, second])) == 9.0
    assert replay(problem, NumberedOrders.of([first, second[::-1]])) == np.inf
