"""The pictures and numbers of the chapter on schedules are those of the code."""

import re
import runpy
from dataclasses import replace
from pathlib import Path

import pytest

from deepspeed_ext.plan.costs import OpCosts, attention_costs
from deepspeed_ext.plan.draw import render_comparison
from deepspeed_ext.plan.memory import TokenBytes, host_memory_over_time, memory_over_time, peak, peak_activation
from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.programs.host_copies import HostCopySettings
from deepspeed_ext.plan.schedules import rank_orders, schedule_named
from deepspeed_ext.plan.simulate import simulate, simulate_with_host_copies
from deepspeed_ext.plan.slicing import TokenSlices

ROOT = Path(__file__).parents[2]
CHAPTER = (ROOT / "docs" / "concepts" / "schedules.md").read_text()
PICTURES = ROOT / "docs" / "img" / "schedules"
drawing = runpy.run_path(str(ROOT / "examples" / "draw_schedules.py"))


@pytest.mark.parametrize("name", [path.stem for path in sorted(PICTURES.glob("*.svg"))])
def test_a_picture_is_the_one_that_is_drawn(name: str) -> None:
    # After a change that is meant: python examples/draw_schedules.py docs/img/schedules
    assert (PICTURES / f"{name}.svg").read_text() == render_comparison(drawing["pictures"]()[name])


def test_every_picture_is_shown_and_there() -> None:
    shown = set(re.findall(r"img/schedules/([\w-]+)\.svg", CHAPTER))
    assert shown == drawing["pictures"]().keys() == {path.stem for path in PICTURES.glob("*.svg")}


def test_the_schedule_shown_keeps_its_memory_limit_and_bubble() -> None:
    timeline = drawing["found"]()
    assert max(peak_activation(timeline, drawing["FOUND_CUT"])) <= 1.75
    assert timeline.bubble_ratio < 0.06


def test_the_table_of_copies_to_the_host() -> None:
    header = "| schedule | V | M | S | without copies | on the device | on the host |"
    rows = CHAPTER.split(header)[1].split("\n\n")[0].splitlines()[2:]
    assert len(rows) == 4
    for name, model_chunks, micro_batches, token_slices, *said in (
        [*map(str.strip, row.split("|"))][1:8] for row in rows
    ):
        shape = PipelineShape(4 * int(model_chunks), int(micro_batches), int(token_slices), int(model_chunks))
        lengths = (1,) * shape.num_token_slices
        each = (1 / (shape.num_token_slices * shape.num_model_chunks),) * shape.num_stages
        nothing = (0.0,) * shape.num_stages
        orders, costs = rank_orders(schedule_named(name), shape), OpCosts.uniform(shape, backward=2.0)
        timeline = simulate_with_host_copies(orders, shape, costs, HostCopySettings(lengths, nothing, each))
        sizes = TokenBytes(nothing, each, nothing)
        curves = (
            memory_over_time(replace(timeline, host_copies=()), lengths, sizes),
            memory_over_time(timeline, lengths, sizes),
            host_memory_over_time(timeline, lengths, sizes),
        )
        found = [max(map(peak, of_ranks)) for of_ranks in curves]
        assert [float(cell) for cell in said] == pytest.approx(found, abs=0.0051)


@pytest.mark.parametrize("attention_share", [0.3, 0.6])
def test_the_table_of_bubbles(attention_share: float) -> None:
    (row,) = re.findall(rf"^\| {attention_share} \| (.*) \|$", CHAPTER, re.MULTILINE)
    said = [float(cell.strip(" *%")) / 100 for cell in row.split("|")]
    shape = PipelineShape(8, 8, 8)
    balanced = TokenSlices.balanced(2**20, 8, attention_share)
    found = [
        simulate(
            rank_orders(schedule_named(name), shape), shape, attention_costs(shape, lengths, attention_share)
        ).bubble_ratio
        for name in ("1f1b", "zero-bubble")
        for lengths in ((1.0,) * 8, balanced.lengths)
    ]
    assert said[:4] == pytest.approx(found, abs=0.0006)
