"""Times of every token slice there can be, looked up in tables: solvers ask for thousands of cuts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from deepspeed_ext.plan.optimise.problem import Numbers
from deepspeed_ext.plan.solve.cut_grid import CutGrid
from megatron_terapipe.search.cost.cost_model import SPLIT_SCHEDULES, CostModel
from megatron_terapipe.search.cost.placed_strategy import PlacedStrategy
from megatron_terapipe.search.cost.stage_ops import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT
from megatron_terapipe.strategy import Strategy


@dataclass(frozen=True, eq=False)
class TabulatedCosts:
    """Times of token slices whose bounds are points of a grid; a `TokenSliceCosts`. Make it with `of`."""

    table: Numbers
    """[3, U, points, points] seconds of F, BI and BW of a stage of each of U kinds, from point to point."""
    kind_of_stage: NDArray[np.int64]
    """[stages] which kind each stage is."""
    sending: Numbers
    """[2, stages, 2] seconds by which messages make F and B longer: fixed, and by token."""
    index: NDArray[np.int64]
    """[seq_length + 1] number of the point at each position."""

    def __call__(self, stages: Sequence[int], starts: Numbers, ends: Numbers) -> Numbers:
        """See `TokenSliceCosts`: [3, stages, *shape of starts]."""
        which = np.asarray(stages, np.int64)
        kinds = self.kind_of_stage[which].reshape(-1, *(1,) * np.ndim(starts))
        times = self.table[:, kinds, self.index[starts], self.index[ends]]
        fixed, by_token = np.moveaxis(self.sending[:, which], -1, 0).reshape(2, 2, -1, *(1,) * np.ndim(starts))
        times[:2] += fixed + by_token * (np.asarray(ends) - starts)
        return times

    def busiest_and_others(self, num_ranks: int) -> "TabulatedCosts":
        """Two stages that stand for a pipeline: that of its busiest rank, and the mean of all others.

        A rank with several model chunks has the mean of their times.
        """
        of_rank = np.arange(len(self.kind_of_stage)) % num_ranks
        model_chunks = len(of_rank) // num_ranks
        shares = np.zeros((num_ranks, self.table.shape[1]))
        np.add.at(shares, (of_rank, self.kind_of_stage), 1 / model_chunks)
        sending = self.sending.reshape(2, model_chunks, num_ranks, 2).mean(axis=1)
        whole = shares @ self.table[:, :, 0, -1].sum(axis=0) + (sending @ [1, len(self.index) - 1]).sum(axis=0)
        busiest = np.arange(num_ranks) == whole.argmax()
        others = ~busiest if num_ranks > 1 else busiest
        weights = np.stack([shares[ranks].mean(axis=0) for ranks in (busiest, others)])
        table = np.einsum("uk,tkse->tuse", weights, self.table)
        joined = np.stack([sending[:, ranks].mean(axis=1) for ranks in (busiest, others)], axis=1)
        return TabulatedCosts(table, np.arange(2), joined, self.index)

    @classmethod
    def of(cls, cost_model: CostModel, strategy: Strategy, grid: CutGrid) -> "TabulatedCosts":
        """Return all times of a cost model at once, [points, points] for the token slices between two places.

        Args:
            grid: places at which token slices may begin and end.

        Raises:
            ConfigError: if the strategy does not fit the cluster or the model.
        """
        points = grid.points
        first, last = np.triu_indices(len(points), 1)
        placed = cost_model.placed(strategy)
        sizes = placed.sizes(points[first] / grid.seq_length, points[last] / grid.seq_length)
        # All tokens in one token slice say which device is the slowest.
        whole = int(np.flatnonzero((first == 0) & (last == len(points) - 1))[0])
        stages, kind_of_stage = _different_stages(placed)
        # Times of layers are kept, for the same strategy with other layers on its stages.
        ops = cost_model.priced_stages(placed, sizes, stages=stages, whole=whole, key=(*placed.key, grid))
        if strategy.schedule in SPLIT_SCHEDULES:
            times = ops[[FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT]]
        else:
            times = np.array([ops[FORWARD], ops[BACKWARD], np.zeros_like(ops[FORWARD])])
        table = np.zeros((3, times.shape[1], len(points), len(points)))
        table[:, :, first, last] = times
        index = np.searchsorted(points, np.arange(grid.seq_length + 1))
        silent = np.zeros((2, len(kind_of_stage), 2))
        costs = cls(table, kind_of_stage, silent, index)
        if cost_model.software.communication.overlaps_transfers or len(kind_of_stage) == 1 or len(points) < 3:
            return costs
        return replace(costs, sending=_sending(cost_model, strategy, costs, points))


def _different_stages(placed: PlacedStrategy) -> tuple[list[int], NDArray[np.int64]]:
    """The first stage of each kind, and [stages] the kind of each: the same layers, devices and links."""
    kind_of_rank = np.empty(len(placed.groups.devices), np.int64)
    for number, kind in enumerate(placed.groups.kinds):
        kind_of_rank[kind.ranks] = number
    numbers: dict[tuple[int, bytes], int] = {}
    first: list[int] = []
    kinds: list[int] = []
    for stage, row in enumerate(placed.counts.per_stage):
        key = int(kind_of_rank[stage % len(kind_of_rank)]), row.tobytes()
        if key not in numbers:
            numbers[key] = len(first)
            first.append(stage)
        kinds.append(numbers[key])
    return first, np.array(kinds)


def _sending(cost_model: CostModel, strategy: Strategy, costs: TabulatedCosts, points: Numbers) -> Numbers:
    """By how much messages that block make ops longer: a straight line in the tokens, which two lengths tell."""
    longer = []
    short, whole = int(points[1]), int(points[-1])
    for cut in ((whole,), (short, whole - short)):
        priced = cost_model.pipeline_costs(replace(strategy, num_token_slices=len(cut), token_slices=cut))
        ops = costs(range(len(costs.kind_of_stage)), np.zeros(1, np.int64), np.array(cut[:1]))
        longer.append(np.array([priced.forward, priced.backward])[..., 0] - ops[:2, :, 0])
    by_token = (longer[0] - longer[1]) / (whole - short)
    return np.stack([longer[1] - by_token * short, by_token], axis=-1)
