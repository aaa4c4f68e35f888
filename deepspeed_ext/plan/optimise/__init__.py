r"""Finds op orders that are better than the fixed schedules, for any costs, and under a memory limit.

What there is to decide. On every stage the forwards have one order, the input gradients another, and the weight
gradients that same one: micro-batches first to last (ADR 0005), token slices first to last forward and last to first
backward. A rank only decides from which of its queues the next op comes, 3 queues for each of its stages:

    rank 1, stages 1 and 6     F  of stage 1   F0.2 F0.3 F1.0 ...    \
                               BI of stage 1   BI0.3 BI0.2 ...        |   which of the heads
                               BW of stage 1   BW0.3 BW0.2 ...        |   is the next op?
                               F, BI, BW of stage 6                  /

1.  `list_scheduler` decides by priorities: the most urgent op that can start now. It reserves room for the oldest
    micro-batch, so it neither breaks the memory limit nor runs into a deadlock, whatever the priorities.
2.  `priority_rules` makes all priorities from seven numbers: how closely token slices follow each other, when backwards
    become more urgent than forwards, how long weight gradients wait for a gap. `search` draws thousands of rules, keeps
    the best, and varies these (an evolution strategy); then it leaves the rules and makes some ops of the best more
    urgent, or less, as long as that helps. Each try costs one list schedule, some tenths of a microsecond for each op.
3.  `anneal` takes the best orders, or those of a fixed schedule if they are better, and moves single ops that lie on
    the critical path. Rules see the steady state; this sees every corner of the warmup and the cooldown.
4.  `search.merged` joins input and weight gradients that stand next to each other into whole backwards, where it costs
    no time.
5.  `bound` says what no order can beat, so that one knows when to stop.

The fixed schedules that keep the limit compete, so the result is never worse than the best of them. It depends on the
arguments alone, not on the clock. Copies to the host are no part of it: costs and memory limit know none, and they are
planned on what it finds (`programs.host_copies`). `problem` holds everything as arrays, `replay` simulates orders as
`simulate` does, `kernel` compiles. Other ways to the same end: zero-bubble's automatic scheduler (arXiv 2401.10241
section 3.1), which is a greedy pass without token slices; integer programs (OptPipe, arXiv 2510.05186), which are exact
for tens of ops.
"""

from deepspeed_ext.plan.optimise.search import OptimisedSchedule, optimise

__all__ = ["OptimisedSchedule", "optimise"]
