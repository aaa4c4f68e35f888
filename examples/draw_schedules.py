"""Draws the pictures of docs/concepts/schedules.md into the directory that is named."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from deepspeed_ext.plan.costs import attention_costs
from deepspeed_ext.plan.draw import render_comparison
from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.programs.host_copies import HostCopySettings
from deepspeed_ext.plan.schedule_file import read_schedule
from deepspeed_ext.plan.schedules import rank_orders, schedule_named
from deepspeed_ext.plan.simulate import simulate, simulate_with_host_copies
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.plan.timeline import Timeline

FOUND = Path(__file__).parent / "schedules" / "optimised_p4_m4_s4.txt"
"""Written by the command that docs/concepts/schedules.md shows."""
FOUND_CUT = (1666, 994, 804, 632)
EVEN, BALANCED = (1.0,) * 4, TokenSlices.balanced(4096, 4, 0.6).lengths


def played(
    name: str,
    lengths: Sequence[float] = EVEN,
    *,
    attention_share: float = 0.0,
    ranks: int = 4,
    micro_batches: int = 4,
    model_chunks: int = 1,
    reductions: Sequence[float] = (),
    copying: float | None = None,
) -> Timeline:
    """Simulate a schedule.

    Args:
        lengths: lengths of the token slices.
        attention_share: share of attention in the forward.
        reductions: times of each stage's reductions, by piece.
        copying: time to copy the keys and values of a whole micro-batch on a stage to the host, and as long back;
            a stage input takes half of it. None for no copies.
    """
    shape = PipelineShape(ranks * model_chunks, micro_batches, len(lengths), model_chunks)
    costs = attention_costs(shape, lengths, attention_share)
    if reductions:
        costs = replace(costs, reductions=(tuple(reductions),) * shape.num_stages)
    orders = rank_orders(schedule_named(name), shape)
    if copying is None:
        return simulate(orders, shape, costs)
    # A token slice has as many tokens as there are token slices, so that lengths are whole numbers.
    each = copying / len(lengths) ** 2
    inputs = (0.0, *(each / 2,) * shape.last_stage)
    settings = HostCopySettings((len(lengths),) * len(lengths), inputs, (each,) * shape.num_stages, 1.0, 1.0)
    return simulate_with_host_copies(orders, shape, costs, settings)


def found() -> Timeline:
    """The schedule that the optimiser found."""
    shape, orders = read_schedule(FOUND)
    return simulate(orders, shape, attention_costs(shape, FOUND_CUT, 0.6))


def pictures() -> dict[str, list[tuple[str, Timeline]]]:
    """Panels of each picture, by its file's name."""
    whole = (1.0,)
    return {
        "token-slices": [
            ("gpipe, whole micro-batches", played("gpipe", whole, micro_batches=2)),
            ("gpipe, 4 token slices", played("gpipe", micro_batches=2)),
        ],
        "1f1b": [("gpipe, 4 token slices", played("gpipe")), ("1f1b, 4 token slices", played("1f1b"))],
        "interleaved": [
            ("1f1b", played("1f1b", whole)),
            ("interleaved, 2 model chunks", played("interleaved", whole, model_chunks=2)),
            ("interleaved, 2 model chunks, 4 token slices", played("interleaved", model_chunks=2)),
        ],
        "zero-bubble": [("1f1b", played("1f1b", whole)), ("zero-bubble", played("zero-bubble", whole))],
        "host-copies": [
            (
                "breadth-first, 4 model chunks, one micro-batch",
                played("breadth-first", ranks=2, micro_batches=1, model_chunks=4, copying=0.25),
            )
        ],
        "reductions": [
            ("1f1b, each rank reduces its gradients after its last op", played("1f1b", whole, reductions=(3.0,))),
            ("1f1b, reduced layer by layer as they are complete", played("1f1b", whole, reductions=(0.375,) * 8)),
            (
                "zero-bubble, reduced layer by layer as they are complete",
                played("zero-bubble", whole, reductions=(0.375,) * 8),
            ),
        ],
        "attention": [
            ("1f1b, even token slices", played("1f1b", attention_share=0.6, micro_batches=2)),
            ("1f1b, balanced token slices", played("1f1b", BALANCED, attention_share=0.6, micro_batches=2)),
        ],
        "optimised": [
            ("1f1b, balanced token slices", played("1f1b", BALANCED, attention_share=0.6)),
            ("zero-bubble, balanced token slices", played("zero-bubble", BALANCED, attention_share=0.6)),
            ("optimised, two stages on each rank", found()),
        ],
    }


def main(directory: str) -> None:
    """Write every picture."""
    for name, panels in pictures().items():
        (Path(directory) / f"{name}.svg").write_text(render_comparison(panels))


if __name__ == "__main__":
    main(sys.argv[1])
