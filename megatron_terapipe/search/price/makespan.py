"""The makespan of a schedule: in closed form, bounds that no order of its ops beats, and simulated op by op.

In closed form arguments broadcast. P pipeline ranks, M micro-batches, S token slices, V model chunks. A rank's *total*
is the time of all its ops of one micro-batch. The slowest rank works all the time but for the ops of one token slice on
one stage of every other rank, which it waits for while the pipeline fills and drains:

    time = M * total of the slowest + (sum of the totals of the others) / (S V)

With equal ranks that is SC'21's bubble (arXiv 2104.04473 section 2.2), (P - 1)/(V M S + P - 1). `zero-bubble` fills
its drain with weight gradients: of each other rank F + BI - BW remain (arXiv 2401.10241 section 3, ZB-H1).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.programs.host_copies import HostCopySettings
from deepspeed_ext.plan.schedules import OPTIMISED, memory_of_1f1b, schedule_named
from deepspeed_ext.plan.simulate.compiled import CompiledOrders, SimulatedOrders
from deepspeed_ext.plan.simulate.host_copies import HostCopyPlan
from deepspeed_ext.plan.slicing import TokenSlices
from megatron_terapipe.search.price.activations import orders_of_ranks
from megatron_terapipe.search.price.layer_times import ScalarOrArray
from megatron_terapipe.search.price.stages import StageOps
from megatron_terapipe.strategy import Strategy

Floats = NDArray[np.float64]


class Pipeline(NamedTuple):
    """A schedule and the extent of its pipeline, with its closed forms; numbers, or arrays that broadcast."""

    schedule: str
    num_ranks: int
    num_model_chunks: int
    num_micro_batches: ScalarOrArray
    num_token_slices: ScalarOrArray

    @classmethod
    def of(cls, strategy: Strategy) -> "Pipeline":
        """Return the pipeline of a strategy."""
        ranks, model_chunks = strategy.pipeline_parallel_size, strategy.stages_of_a_rank
        return cls(strategy.schedule, ranks, model_chunks, strategy.num_micro_batches, strategy.num_token_slices)

    @property
    def defers(self) -> bool:
        """Whether weight gradients are ops of their own, for which the formulas have a place."""
        return self.schedule == "zero-bubble"

    @property
    def runs_ahead(self) -> bool:
        """Whether the first rank runs P - 2 + S forwards ahead, and then waits for backwards to come back."""
        return self.schedule in ("1f1b", "zero-bubble") and self.num_model_chunks == 1

    @property
    def turns(self) -> ScalarOrArray:
        """Ops of a rank from the last one of its first complete stage to the last one of its last.

        Interleaved stages of a rank take turns with as many ops each as there are ranks.
        """
        if self.completed == 1:
            return 1
        group = np.minimum(self.num_ranks, self.num_micro_batches * self.num_token_slices)
        return 1 + (self.num_model_chunks - 1) * group

    @property
    def completed(self) -> int:
        """Stages of a rank whose gradients are complete in turn; 1 where they are complete together."""
        return self.num_model_chunks if self.schedule == "interleaved" else 1

    def total_s(self, ops: StageOps) -> ScalarOrArray:
        """Seconds of all ops of a rank, with the backward in one op or in two, as the schedule has it."""
        return ops.forward + (ops.input_gradient + ops.weight_gradient if self.defers else ops.backward)

    def makespan_s(
        self,
        ops: Floats,
        multiplicity: Floats | None = None,
        *,
        travelling_s: ScalarOrArray = 0.0,
        activation_limit: float = 1.0,
    ) -> Floats:
        """Seconds of one iteration's ops.

        Args:
            ops: [parts of `StageOps`, rows, ...] seconds of one micro-batch on each rank, all its stages and token
                slices.
            multiplicity: [rows] number of ranks in each row; None = one each.
            travelling_s: messages of a token slice through one stage of each rank and back, where they run under ops.
            activation_limit: of `zero-bubble`: activations that a rank may hold, as a multiple of 1F1B's peak. With
                twice as many, weight gradients of two ranks' worth fill the drain (the same paper, ZB-H2: F + BI - 2
                BW); then ranks start the next iteration one after the other, as they end this one.
        """
        totals = np.asarray(self.total_s(StageOps(*ops)))
        of_slowest = np.take_along_axis(ops, np.argmax(totals, axis=0)[None, None], axis=1)[:, 0]
        everything = ops.sum(axis=1) if multiplicity is None else np.tensordot(ops, multiplicity, axes=([1], [0]))
        slowest, others = StageOps(*of_slowest), StageOps(*(everything - of_slowest))
        waits, back = others.forward + others.backward, slowest.backward + others.backward
        if self.defers:
            filling = activation_limit * others.weight_gradient
            waits = np.maximum(others.forward + others.input_gradient - filling, 0.0)
            back = slowest.input_gradient + others.input_gradient
        token_slices, model_chunks = self.num_token_slices, self.num_model_chunks
        time = self.num_micro_batches * self.total_s(slowest)
        time = time + waits / (token_slices * model_chunks) + model_chunks * travelling_s
        if self.runs_ahead:
            # The first rank holds no more than P - 1 + S token slices, and waits for one of them to come back.
            held = activation_limit * (self.num_ranks - 1) + token_slices
            there_and_back = (slowest.forward + others.forward + back) / token_slices + travelling_s
            time = np.maximum(time, self.num_micro_batches * token_slices / held * there_and_back)
        return np.asarray(time)

    def lower_bound_s(self, ops: StageOps, before: StageOps) -> ScalarOrArray:
        """Seconds of an iteration that no costs of the other ranks' ops make shorter.

        A rank runs all its ops. Its first one starts when the first token slice has passed the stages before it, and
        when its last backward is done, that token slice must go back through them. The same holds for a single stage of
        a rank.

        Args:
            before: of the first token slice on the stages that it passes before the rank, messages included.
        """
        working = self.num_micro_batches * self.total_s(ops)
        if not self.defers:
            return before.forward + working + before.backward
        # Weight gradients may all be still to do after the last input gradient.
        turning = self.num_micro_batches * (ops.forward + ops.input_gradient) + before.input_gradient
        return before.forward + np.maximum(turning, working)

    def round_trip_bound_s(
        self,
        *,
        filling_s: ScalarOrArray,
        forward_s: ScalarOrArray,
        backward_s: ScalarOrArray,
        last: tuple[ScalarOrArray, ScalarOrArray],
        draining_s: ScalarOrArray,
    ) -> ScalarOrArray:
        """Seconds that schedules which `runs_ahead` take because the first rank waits for token slices to come back.

        The first rank runs P - 2 + S forwards ahead; from there on forward u + P follows the backward that answers
        forward u, the last one of its micro-batch (`plan.schedules`: `one_f_one_b`, `zero_bubble`). So every ceil(P /
        S) micro-batches a token slice passes all ranks both ways, one after the other. When the last of these turns,
        the last rank still has the rest to do. A backward is an input gradient where these are apart.

        Args:
            filling_s: forwards of all token slices of a micro-batch but the last on the first rank.
            forward_s: forwards of the last token slice on all ranks, messages included.
            backward_s: its backwards on all ranks, messages included.
            last: forward and backward of a micro-batch on the last rank.
            draining_s: backwards of the first token slice on all ranks but the last, messages included.
        """
        together = np.ceil(self.num_ranks / self.num_token_slices)
        waited = (self.num_micro_batches - 1) // together
        left = self.num_micro_batches - waited * together
        rest = (left - 1) * last[0] + left * last[1]
        return filling_s + waited * (forward_s + backward_s) + forward_s + rest + draining_s


MOST_OPS = 8_000
"""Ops that are simulated one by one: compiling their orders takes a few hundredths of a second, once per shape."""

EFFORT = 0.02
"""Effort of their search: within a percent of the result of more effort, in a tenth of a second."""


class FewerMicroBatches(NamedTuple):
    """Numbers of micro-batches that are simulated in place of many.

    Once the pipeline is full every period takes the same time on the slowest rank: the makespan of many is on the
    straight line through two smaller numbers, a period apart.
    """

    numbers: tuple[int, ...]
    """Two; one where there are not many."""
    periods: float
    """From the last of them to the number of the shape."""

    @classmethod
    def of(cls, shape: PipelineShape, most_ops: int, period: int | None = None) -> "FewerMicroBatches":
        """Return numbers with about so many ops, but enough for the slowest rank to set the pace.

        Args:
            period: micro-batches after which the order of ops repeats itself; None = those that pass a model chunk
                together.
        """
        period, wanted = period or max(-(-shape.num_ranks // shape.num_token_slices), 1), shape.num_micro_batches
        periods = max(most_ops // (2 * shape.num_stages * shape.num_token_slices) // period - 1, 4)
        least = periods * period + wanted % period
        return (
            cls((least, least + period), wanted // period - periods - 1)
            if wanted > least + period
            else cls((wanted,), 0)
        )

    def makespan(self, of: Callable[[int], float]) -> float:
        """Seconds of the shape, extrapolated from `of(number)`."""
        *shorter, longest = map(of, self.numbers)
        return longest + self.periods * (longest - shorter[0]) if shorter else longest

    @property
    def notes(self) -> tuple[str, ...]:
        """Whether times are extrapolated, in words."""
        return (f"extrapolated from {' and '.join(map(str, self.numbers))} micro-batches",) if self.periods else ()


@dataclass(frozen=True, slots=True)
class SimulatedTime:
    """Seconds of the ops of an iteration."""

    makespan: float
    makespan_without_transfers: float
    """Seconds with the same ops, if messages took no time and without copies to hosts."""
    host_copy_s: float = 0.0
    """Part of the makespan in which ranks wait for copies from their hosts."""
    notes: tuple[str, ...] = ()


class ScheduleSimulator:
    """Simulates schedules, and caches the orders of every shape."""

    def __init__(self) -> None:
        self.columns = cache(orders_of_ranks)
        self.orders = cache(lambda schedule, shape: CompiledOrders.of_schedule(schedule_named(schedule), shape))
        self._planned: tuple[tuple[object, ...], SimulatedOrders, HostCopyPlan] | None = None
        """The copies that were planned last: memory and time of a strategy need the same."""

    def simulate(
        self,
        schedule: str,
        shape: PipelineShape,
        costs: OpCosts,
        *,
        token_slices: TokenSlices | None = None,
        memory_limit: float | None = None,
    ) -> SimulatedTime:
        """Return the makespan of a schedule without host copies, in the seconds of its costs.

        Beyond `MOST_OPS` it is extrapolated.

        Args:
            token_slices: lengths of the token slices, which an optimised order keeps; None for equal ones.
            memory_limit: activations of one micro-batch that a rank may keep under an optimised order; None for those
                that 1f1b keeps, as the trainer does.
        """
        if schedule == OPTIMISED:
            cut = token_slices or TokenSlices((1,) * shape.num_token_slices)
            return self._optimised(shape, costs, cut, memory_limit or memory_of_1f1b(shape, cut))
        without = replace(costs, transfer=0.0)
        free = costs.transfer == 0.0
        fewer = FewerMicroBatches.of(shape, MOST_OPS)

        def line(of: Callable[[PipelineShape], float]) -> float:
            return fewer.makespan(lambda number: of(replace(shape, num_micro_batches=number)))

        makespan = line(lambda each: self._makespan(schedule, each, costs))
        within = makespan if free else line(lambda each: self._makespan(schedule, each, without))
        return SimulatedTime(makespan, within, notes=fewer.notes)

    def copying_s(self, schedule: str, shape: PipelineShape, costs: OpCosts, settings: HostCopySettings) -> float:
        """Return the seconds by which copies from hosts that come late make the makespan longer."""

        def late_s(number: int) -> float:
            fewer = replace(shape, num_micro_batches=number)
            simulated, plan = self.with_host_copies(schedule, fewer, costs, settings)
            return max(self.orders(schedule, fewer).simulate(costs, plan).makespan - simulated.makespan, 0.0)

        return max(FewerMicroBatches.of(shape, MOST_OPS).makespan(late_s), 0.0)

    def with_host_copies(
        self, schedule: str, shape: PipelineShape, costs: OpCosts, settings: HostCopySettings
    ) -> tuple[SimulatedOrders, HostCopyPlan]:
        """Return a schedule simulated without copies, and the copies that are planned on it, as the trainer does."""
        key = schedule, shape, costs, settings
        if self._planned is None or self._planned[0] != key:
            simulated = self.orders(schedule, shape).simulate(costs)
            self._planned = key, simulated, HostCopyPlan.of(simulated.columns(), shape, settings)
        return self._planned[1:]

    def _optimised(
        self, shape: PipelineShape, costs: OpCosts, token_slices: TokenSlices, memory_limit: float
    ) -> SimulatedTime:
        from deepspeed_ext.plan.solve.orders import optimise

        search = partial(optimise, costs=costs, memory_limit=memory_limit, lengths=token_slices.lengths, effort=EFFORT)
        fewer = FewerMicroBatches.of(shape, 0, shape.num_ranks)
        seconds = fewer.makespan(lambda number: search(replace(shape, num_micro_batches=number)).makespan)
        return SimulatedTime(seconds, seconds, notes=fewer.notes)

    def _makespan(self, schedule: str, shape: PipelineShape, costs: OpCosts) -> float:
        return self.orders(schedule, shape).simulate(costs).makespan


def num_searched_ops(shape: PipelineShape) -> int:
    """Return the number of ops of the longest order that is searched for to price `optimised`."""
    # A forward and the two parts of its backward.
    longest = FewerMicroBatches.of(shape, 0, shape.num_ranks).numbers[-1]
    return 3 * shape.num_stages * shape.num_token_slices * longest
