"""Finds the lengths of token slices, and how many layers each stage has.

| file | finds | for |
|---|---|---|
| `terapipe` | micro-batches and token slices, exactly | gpipe on equal stages: TeraPipe's dynamic program |
| `slicing.TokenSlices.balanced` | token slices of equal forward, in closed form | any schedule, roughly: Seq1F1B's |
| `token_slices` | token slices, by search | the schedule that runs, fixed or optimised |
| `document_cuts` | token slices of equal cost, for the packed documents of one micro-batch | any schedule, roughly |
| `stages` | layers of each stage and token slices, by search | the same, with a language-model head |

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
