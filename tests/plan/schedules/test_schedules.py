"""Schedules compared with drawings. To draw them again after an intended change, and then read the diff:

UPDATE_GOLDEN=1 python -m pytest tests/plan/schedules/test_schedules.py
"""

import os
import re
from pathlib import Path

import pytest

from deepspeed_ext.plan import schedules
from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.draw import render_text
from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.schedules import SCHEDULES, rank_orders, schedule_named
from deepspeed_ext.plan.simulate import simulate

GOLDEN = Path(__file__).parent / "golden"
SHAPES = [
    PipelineShape(4, 4),
    PipelineShape(4, 4, 2),
    PipelineShape(4, 1, 8),  # one micro-batch: only token slices fill the pipeline
    PipelineShape(4, 2, 3),  # fewer micro-batches than stages
    PipelineShape(2, 3, 4),  # more token slices than stages
    PipelineShape(1, 2, 2),
]
SHAPES_WITH_MODEL_CHUNKS = [
    PipelineShape(8, 4, 1, num_model_chunks=2),
    PipelineShape(8, 4, 2, num_model_chunks=2),
    PipelineShape(6, 5, 1, num_model_chunks=2),  # two are left over when three fill the pipeline: they join them
    PipelineShape(4, 3, 4, num_model_chunks=2),  # more token slices than ranks
    PipelineShape(6, 3, 1, num_model_chunks=3),
    PipelineShape(2, 2, 2, num_model_chunks=2),
]
DRAWN = [
    (name, shape)
    for name in SCHEDULES
    for shape in (SHAPES_WITH_MODEL_CHUNKS if name in ("interleaved", "breadth-first") else SHAPES)
]


def file_name(name: str, shape: PipelineShape) -> str:
    extents = f"p{shape.num_ranks}_m{shape.num_micro_batches}_s{shape.num_token_slices}"
    return f"{name}_{extents}" + (f"_v{shape.num_model_chunks}" if shape.num_model_chunks > 1 else "")


def draw(name: str, shape: PipelineShape) -> str:
    costs = OpCosts.uniform(shape, weight_gradient=1.0 if name == "zero-bubble" else None)
    return render_text(simulate(rank_orders(schedule_named(name), shape), shape, costs))


@pytest.mark.parametrize("name, shape", DRAWN, ids=[file_name(*each) for each in DRAWN])
def test_drawing(name, shape):
    path = GOLDEN / f"{file_name(name, shape)}.txt"
    drawing = draw(name, shape) + "\n"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(drawing)
    assert drawing == path.read_text()


def test_every_golden_drawing_is_looked_at():
    assert {path.stem for path in GOLDEN.glob("*.txt")} == {file_name(*each) for each in DRAWN}


IN_DOCSTRING = {
    "interleaved": PipelineShape(4, 1, 2, num_model_chunks=2),
    "breadth-first": PipelineShape(4, 2, 1, num_model_chunks=2),
}
"""Shapes of the drawings that have model chunks."""


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_drawings_in_the_docstring_are_true(name):
    noun = "rank " if name in IN_DOCSTRING else "stage "
    drawn = re.search(rf"^ +{name} +((?:{noun}.*\n\s*)+)", schedules.__doc__, re.MULTILINE)
    lines = [line.strip() for line in drawn[1].strip().splitlines()]
    shape = IN_DOCSTRING.get(name, PipelineShape(2, 2, 2))
    assert lines == draw(name, shape).splitlines()
