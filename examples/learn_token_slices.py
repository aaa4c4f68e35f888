"""A lesson in token slices: a schedule as a generator, drawn, run on a toy model, and checked. Change it, run it again.

    python examples/learn_token_slices.py lesson.svg

Each `# %%` begins a cell in VS Code and Jupyter. docs/concepts/token-slices.md leads through the cells.
"""

import sys
from collections import defaultdict, deque
from pathlib import Path
from time import perf_counter

import torch
from torch import nn

from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.draw import render_comparison, render_text
from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.ops import Op, OpKind, PipelineShape
from deepspeed_ext.plan.simulate import check_complete, simulate

# %% What is used: torch for the toy model; from this project ops, the simulator and the drawings.


STAGES, MICRO_BATCHES, TOKENS, HIDDEN = 3, 2, 512, 64
F, B = OpKind.FORWARD, OpKind.BACKWARD


# %% 1. The schedule: the order in which a rank runs its ops. This one is 1F1B, with one stage on each rank.
def schedule(shape, rank):
    """Yield the ops of a rank: forwards to warm up, then one backward and one forward in turn."""
    micro_batches, token_slices = range(shape.num_micro_batches), range(shape.num_token_slices)
    forwards = [Op(F, rank, m, s) for m in micro_batches for s in token_slices]
    # Last token slice first: no other uses its keys and values. All use those of the first.
    backwards = [Op(B, rank, m, s) for m in micro_batches for s in reversed(token_slices)]
    warmup = shape.num_stages - rank - 1 + shape.num_token_slices
    yield from forwards[:warmup]
    for done, backward in enumerate(backwards):
        yield backward
        yield from forwards[warmup + done : warmup + done + 1]


# %% 2. The picture: a micro-batch takes 4 forward and 8 backward on a stage, into however many parts it is cut.
def timeline_of(schedule, shape, costs):
    """Simulate a schedule. An order that cannot run, or that lacks an op, ends in a PlanError, which names the op."""
    orders = [list(schedule(shape, rank)) for rank in range(shape.num_stages)]
    check_complete(orders, shape)
    return simulate(orders, shape, costs)


def even_costs(shape):
    """Return the costs of token slices that all cost the same."""
    return OpCosts.uniform(shape, forward=4 / shape.num_token_slices, backward=8 / shape.num_token_slices)


shapes = [PipelineShape(STAGES, MICRO_BATCHES, token_slices) for token_slices in (1, 2, 4)]
timelines = [timeline_of(schedule, shape, even_costs(shape)) for shape in shapes]
print(render_text(timelines[1]), end="\n\n")
panels = [(f"token slices: {each.shape.num_token_slices}", each) for each in timelines]
picture = Path(next((word for word in sys.argv[1:] if word.endswith(".svg")), "lesson.svg"))
picture.write_text(render_comparison(panels))


# %% 3. The toy model: a block with causal attention on each stage. All it needs of earlier tokens is keys and values.
class Block(nn.Module):
    """Attention with one head, and a feed-forward, each beside a residual."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN))

    def forward(self, hidden, past=()):
        """Return output, key and value, each [rows, tokens, HIDDEN]; `past` has the keys and values before them."""
        query, *own = self.qkv(hidden).split(HIDDEN, dim=-1)
        keys, values = (torch.cat(each, dim=1) for each in zip(*past, own, strict=True))
        visible = torch.ones(query.shape[1], keys.shape[1]).tril(keys.shape[1] - query.shape[1])
        scores = (query @ keys.mT / HIDDEN**0.5).masked_fill(visible == 0, -torch.inf)
        hidden = hidden + scores.softmax(dim=-1) @ values
        return hidden + self.mlp(hidden), *own


class Rank:
    """A stage, its keys and values by micro-batch, and the graph of each token slice until its backward."""

    def __init__(self, block):
        self.block, self.past, self.graphs = block, defaultdict(list), {}

    def forward(self, op, hidden):
        """Run a token slice. Its key and value become leaves, on which later token slices leave their gradients."""
        hidden = hidden.detach().requires_grad_()
        outputs = self.block(hidden, self.past[op.micro_batch])
        self.past[op.micro_batch].append([each.detach().requires_grad_() for each in outputs[1:]])
        self.graphs[op.micro_batch, op.token_slice] = hidden, outputs
        return outputs[0].detach()

    def backward(self, op, gradient):
        """Run it back, from the gradient of its output and from those that its key and value have by now."""
        hidden, outputs = self.graphs.pop((op.micro_batch, op.token_slice))
        gradients = gradient, *(leaf.grad for leaf in self.past[op.micro_batch][op.token_slice])
        known = [pair for pair in zip(outputs, gradients, strict=True) if pair[1] is not None]
        torch.autograd.backward(*zip(*known, strict=True))
        return hidden.grad


# %% 4. The step: a rank starts its next op as soon as its neighbour's tensor is there. Nothing here checks the order.
def pipelined(blocks, data, target, schedule, shape):
    """Return the loss, and milliseconds by kind of op, stage and token slice; gradients add up in the blocks."""
    ranks, loss, times = [Rank(block) for block in blocks], 0.0, {}
    inputs, targets = (each.split(TOKENS // shape.num_token_slices, dim=2) for each in (data, target))
    inbox = {Op(F, 0, m, s): part[m] for s, part in enumerate(inputs) for m in range(MICRO_BATCHES)}
    todo = [deque(schedule(shape, rank)) for rank in range(STAGES)]
    while any(todo):
        ready = [order.popleft() for order in todo if order and order[0] in inbox]
        if not ready:
            raise PlanError(f"no rank can go on: their next ops are {[str(order[0]) for order in todo if order]}")
        for op in ready:
            start = perf_counter()
            result = (ranks[op.stage].forward if op.kind is F else ranks[op.stage].backward)(op, inbox.pop(op))
            part, time = (op.kind, op.stage, op.token_slice), 1e3 * (perf_counter() - start)
            times[part] = min(time, times.get(part, time))
            if op.kind is F and op.stage == STAGES - 1:  # the mean squared error, and its gradient
                error = result - targets[op.token_slice][op.micro_batch]
                loss += float(error.square().sum()) / data.numel()
                inbox[op._replace(kind=B)] = 2 * error / data.numel()
            else:
                inbox[op._replace(stage=op.stage + (1 if op.kind is F else -1))] = result
    return loss, times


def plain(blocks, data, target):
    """Return the loss of whole sequences in one batch, and no times; autograd alone computes the gradients."""
    hidden = data.flatten(0, 1)
    for block in blocks:
        hidden = block(hidden)[0]
    loss = (hidden - target.flatten(0, 1)).square().mean()
    loss.backward()
    return loss.item(), {}


def trained(step, *plan):
    """Return loss, gradients and times of a step with the weights and data that all steps here have."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block() for _ in range(STAGES)).double()
    data, target = torch.randn(2, MICRO_BATCHES, 1, TOKENS, HIDDEN, dtype=torch.float64)
    loss, times = step(blocks, data, target, *plan)
    return loss, torch.cat([weight.grad.flatten() for weight in blocks.parameters()]), times


# %% 5. The check: loss and gradients are those of plain autograd, and the step is shorter.
expected_loss, expected, _ = trained(plain)
print("token slices  makespan  bubble  by formula  makespan with measured op times  loss, gradients off by")
for shape, timeline in zip(shapes, timelines, strict=True):
    (loss, gradients, times), *again = (trained(pipelined, schedule, shape) for _ in range(3))
    fastest = {part: min(time, *(other[part] for *_, other in again)) for part, time in times.items()}
    tables = ([[fastest[kind, i, s] for s in range(shape.num_token_slices)] for i in range(STAGES)] for kind in (F, B))
    measured = timeline_of(schedule, shape, OpCosts(*tables)).makespan
    formula = (STAGES - 1) / (MICRO_BATCHES * shape.num_token_slices + STAGES - 1)
    off = abs(loss - expected_loss) / expected_loss, float((gradients - expected).abs().max() / expected.abs().max())
    print(
        f"{shape.num_token_slices:12}  {timeline.makespan:8.1f}  {timeline.bubble_ratio:6.1%}  {formula:10.1%}"
        f"  {measured:28.1f} ms  {off[0]:.0e}, {off[1]:.0e}"
    )
    if max(off) > 1e-12:
        raise SystemExit("loss or gradients are wrong: an op ran before all that it needs was there")


# %% 6. A wrong order: the backward from the first token slice to the last. It is refused. If it ran, it would be wrong.
def turned_round(shape, rank):
    """Yield the same ops, each backward for the token slice at the other end."""
    for op in schedule(shape, rank):
        yield op if op.kind is F else op._replace(token_slice=shape.last_token_slice - op.token_slice)


try:
    timeline_of(turned_round, shapes[1], even_costs(shapes[1]))
except PlanError as error:
    print(f"\nrefused: {error}")
_, gradients, _ = trained(pipelined, turned_round, shapes[1])
print(f"run all the same, gradients are off by {float((gradients - expected).abs().max() / expected.abs().max()):.0e}")
