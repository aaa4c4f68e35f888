"""Schedules held against drawings. To draw them anew after a change that is meant, and then read the diff:

UPDATE_GOLDEN=1 python -m pytest tests/plan/test_schedules.py
"""

import os
import re
from pathlib import Path

import pytest

from deepspeed_ext.plan import schedules
from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.render import render_text
from deepspeed_ext.plan.schedules import SCHEDULES, schedule_named, stage_orders
from deepspeed_ext.plan.simulate import simulate

GOLDEN = Path(__file__).parent / "golden"
SHAPES = [
    PipelineShape(4, 4),
    PipelineShape(4, 4, 2),
    PipelineShape(4, 1, 8),  # one micro-batch: token slices alone fill the pipeline
    PipelineShape(4, 2, 3),  # fewer micro-batches than stages
    PipelineShape(2, 3, 4),  # more token slices than stages
    PipelineShape(1, 2, 2),
]


def draw(name: str, shape: PipelineShape) -> str:
    return render_text(simulate(stage_orders(schedule_named(name), shape), shape, OpCosts.uniform(shape)))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"p{s.num_stages}_m{s.num_micro_batches}_s{s.num_token_slices}")
@pytest.mark.parametrize("name", SCHEDULES)
def test_drawing(name, shape):
    path = GOLDEN / f"{name}_p{shape.num_stages}_m{shape.num_micro_batches}_s{shape.num_token_slices}.txt"
    drawing = draw(name, shape) + "\n"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(drawing)
    assert drawing == path.read_text()


def test_every_golden_drawing_belongs_to_a_schedule():
    assert {path.name.split("_p")[0] for path in GOLDEN.glob("*.txt")} == set(SCHEDULES)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_drawings_in_the_docstring_are_true(name):
    drawn = re.search(rf"^ +{name} +((?:stage .*\n\s*)+)", schedules.__doc__, re.MULTILINE)
    lines = [line.strip() for line in drawn[1].strip().splitlines()]
    assert lines == draw(name, PipelineShape(2, 2, 2)).splitlines()


def test_an_unknown_schedule_is_named_with_the_known_ones():
    with pytest.raises(PlanError, match=r"schedule '2f2b' is not known: choose one of gpipe, 1f1b"):
        schedule_named("2f2b")
