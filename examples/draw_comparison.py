"""Draws the picture of the README: the same work with and without token slices, into the file that is named."""

import sys
from pathlib import Path

from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.draw.svg import render_comparison
from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.schedules import one_f_one_b, rank_orders
from deepspeed_ext.plan.simulate import simulate

STAGES, MICRO_BATCHES, FORWARD, BACKWARD = 4, 2, 4.0, 8.0

panels = []
for count, name in ((1, "1F1B, whole micro-batches"), (4, "1F1B, 4 token slices per micro-batch")):
    shape = PipelineShape(STAGES, MICRO_BATCHES, count)
    costs = OpCosts.uniform(shape, forward=FORWARD / count, backward=BACKWARD / count)
    panels.append((name, simulate(rank_orders(one_f_one_b, shape), shape, costs)))
Path(sys.argv[1]).write_text(render_comparison(panels))
