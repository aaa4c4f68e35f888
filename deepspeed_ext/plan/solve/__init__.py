"""Finds the lengths of token slices, and how many layers each stage has.

- `terapipe`: micro-batches and token slices, exactly, for gpipe on equal stages: TeraPipe's dynamic program.
- `slicing.TokenSlices.balanced`: token slices of equal forward, in closed form, roughly for any schedule: Seq1F1B's.
- `token_slices`: token slices, by search, for the schedule that runs, fixed or optimised.
- `document_cuts`: token slices of equal cost for the packed documents of one micro-batch, roughly for any schedule.
- `stages`: layers of each stage and token slices, by search, for the same, with a language-model head.

`token_slice_costs` says what a token slice costs wherever it is cut, `grid` where it may be cut, `evaluation` how long
a step takes with a cut. Results depend on the arguments alone, not on the clock.
"""

from deepspeed_ext.plan.solve.stages import SolvedStages, solve_stages
from deepspeed_ext.plan.solve.terapipe import TerapipeCut, TerapipeProblem
from deepspeed_ext.plan.solve.token_slice_costs import PolynomialCosts, TokenSliceCosts, op_costs
from deepspeed_ext.plan.solve.token_slices import SolvedTokenSlices, solve_token_slices

__all__ = [
    "PolynomialCosts",
    "SolvedStages",
    "SolvedTokenSlices",
    "TerapipeCut",
    "TerapipeProblem",
    "TokenSliceCosts",
    "op_costs",
    "solve_stages",
    "solve_token_slices",
]
