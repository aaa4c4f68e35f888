"""Finds orders of ops, lengths of token slices, and the number of layers of each stage.

- `orders`: op orders that are better than the fixed schedules, for any costs, and under a memory limit.
- `slicing.TokenSlices.balanced`: token slices of equal forward, roughly for any schedule: Seq1F1B's.
- `token_slices`: token slices, and layers of each stage with them, by search, for the schedule that runs.
- `cuts.DocumentCuts`: token slices of equal cost for the packed documents of one micro-batch, roughly for any schedule.

Results depend only on the arguments, not on the clock.
"""

from deepspeed_ext.plan.solve.cuts import PolynomialCosts, TokenSliceCosts, op_costs
from deepspeed_ext.plan.solve.token_slices import SolvedStages, SolvedTokenSlices, solve_stages, solve_token_slices

__all__ = [
    "PolynomialCosts",
    "SolvedStages",
    "SolvedTokenSlices",
    "TokenSliceCosts",
    "op_costs",
    "solve_stages",
    "solve_token_slices",
]
