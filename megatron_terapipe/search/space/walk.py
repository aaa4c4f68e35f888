"""Goes through the space, layout by layout, and leaves out what rules reject."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_terapipe.search.space.block import AXES, Block
from megatron_terapipe.search.space.choices import Choices
from megatron_terapipe.search.space.duplicates import DUPLICATE_RULES
from megatron_terapipe.search.space.funnel import Funnel
from megatron_terapipe.search.space.problem import Problem
from megatron_terapipe.search.space.rules import LAYOUT_RULES, TRAINER_RULES, Rule
from megatron_terapipe.strategy import Strategy

RULES: tuple[Rule, ...] = (*TRAINER_RULES, *DUPLICATE_RULES)

USES_DEVICES = "parallel sizes multiply to the devices"


@dataclass(frozen=True)
class LegalBlock:
    """A grid, and which of its strategies keep all rules.

    Attributes:
        block: the grid; values that no strategy can have are gone from its axes.
        legal: [grid] whether a strategy keeps the rules.
    """

    block: Block
    legal: NDArray[np.bool_]


def layouts(choices: Choices, num_devices: int) -> list[tuple[int, int, int]]:
    """Data-, tensor- and pipeline-parallel sizes that use all devices; data-parallel size 0 where none does."""
    found = []
    for tensor in choices.tensor_parallel_size:
        for pipeline in choices.pipeline_parallel_size:
            data, rest = divmod(num_devices, tensor * pipeline)
            found.append((0 if rest else data, tensor, pipeline))
    if choices.data_parallel_size is not None:
        found = [sizes for sizes in found if sizes[0] in choices.data_parallel_size]
    return found


def legal_blocks(problem: Problem, choices: Choices, funnel: Funnel) -> Iterator[LegalBlock]:
    """The strategies of the space that keep all rules, a grid for each layout.

    Args:
        problem: what is asked.
        choices: values of each dimension.
        funnel: counts what is rejected.
    """
    funnel.expect((USES_DEVICES, *(rule.name for rule in RULES)))
    for sizes in layouts(choices, problem.cluster.num_devices):
        funnel.total += choices.per_layout
        if not sizes[0]:
            funnel.reject(USES_DEVICES, choices.per_layout)
            continue
        found = _legal(Block.of_choices(choices, sizes, problem.global_batch_size), problem, funnel)
        if found is not None:
            yield found


def _legal(block: Block, problem: Problem, funnel: Funnel) -> LegalBlock | None:
    """What is left of a grid."""
    legal: NDArray[np.bool_] | None = None
    for rule in RULES:
        holds = rule.holds(block, problem)
        axes = [axis for axis, length in enumerate(holds.shape) if length > 1]
        if legal is None and len(axes) <= 1:
            # About one axis at most: drop its values, so that what follows is smaller.
            axis = AXES[axes[0]] if axes else AXES[0]
            kept = holds.ravel() if axes else np.full(block.shape[0], holds.all())
            smaller = block.keep(axis, kept)
            funnel.reject(rule.name, block.size - smaller.size)
            block = smaller
            if not block.size:
                return None
            continue
        before = np.ones(block.shape, dtype=bool) if legal is None else legal
        legal = before & holds
        funnel.reject(rule.name, int(before.sum()) - int(legal.sum()))
    if legal is None:
        legal = np.ones(block.shape, dtype=bool)
    return LegalBlock(block, legal) if legal.any() else None


def broken_rule(strategy: Strategy, problem: Problem, rules: Sequence[Rule] = TRAINER_RULES) -> str | None:
    """Why a strategy cannot be run; None if it can.

    Args:
        strategy: any.
        problem: model and cluster; the batch is the strategy's own.
        rules: rules to hold it to, in order.
    """
    block = Block.of_strategy(strategy)
    for rule in rules:
        if not rule.holds(block, problem).all():
            return rule.reason(block, problem)
    return None


__all__ = ["LAYOUT_RULES", "RULES", "LegalBlock", "broken_rule", "layouts", "legal_blocks"]
