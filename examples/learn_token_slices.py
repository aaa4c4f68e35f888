"""The trainer in small: a schedule is drawn, trains a toy transformer on two processes, and is compared with autograd.

python examples/learn_token_slices.py lesson.svg    # or cell by cell in VS Code and Jupyter: each `# %%` begins one
"""

import sys
import tempfile
from collections import ChainMap, defaultdict
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing import start_processes

from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.draw import render_comparison, render_text
from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.ops import Op, OpKind, PipelineShape
from deepspeed_ext.plan.simulate import check_complete, simulate

STAGES, MICRO_BATCHES, TOKENS, WIDTH, VOCABULARY = 2, 2, 2048, 256, 512
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


# %% 2. The picture: a micro-batch takes 4 forward and 8 backward on a stage, for any number of token slices.
def timeline_of(schedule, shape, costs):
    """Simulate a schedule; raise a PlanError that names the op if the order deadlocks or an op is missing."""
    orders = [list(schedule(shape, rank)) for rank in range(shape.num_stages)]
    check_complete(orders, shape)
    return simulate(orders, shape, costs)


shapes = [PipelineShape(STAGES, MICRO_BATCHES, token_slices) for token_slices in (1, 2, 4)]
costs = [OpCosts.uniform(each, forward=4 / (n := each.num_token_slices), backward=8 / n) for each in shapes]
timelines = [timeline_of(schedule, *each) for each in zip(shapes, costs, strict=True)]
print(render_text(timelines[1]), end="\n\n")
picture = Path(next((word for word in sys.argv[1:] if word.endswith(".svg")), "lesson.svg"))
picture.write_text(render_comparison([(f"token slices: {each.shape.num_token_slices}", each) for each in timelines]))


# %% 3. The model: a causal transformer layer on each stage. Of earlier token slices it needs only keys and values.
class Stage(nn.Module):
    """A layer; the first stage also embeds the tokens, the last one also computes the loss."""

    def __init__(self, index):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH) if index == 0 else nn.Identity()
        self.norm, self.qkv, self.proj = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY) if index == STAGES - 1 else None

    def forward(self, hidden, labels, past=()):
        """Return output (of the last stage: its part of the loss), key, value; `past`: both of each earlier slice."""
        hidden = self.embedding(hidden)
        query, *own = self.qkv(self.norm(hidden)).split(WIDTH, dim=-1)
        keys, values = (torch.cat(each) for each in zip(*past, own, strict=True))
        visible = torch.ones(len(query), len(keys), dtype=torch.bool).tril(len(keys) - len(query))
        hidden = hidden + self.proj(nn.functional.scaled_dot_product_attention(query, keys, values, visible))
        hidden = hidden + self.mlp(hidden)
        if self.head is not None:
            hidden = nn.functional.cross_entropy(self.head(hidden), labels, reduction="sum") / (MICRO_BATCHES * TOKENS)
        return hidden, *own


def toy():
    """Return the stages, then tokens and labels, each [MICRO_BATCHES, TOKENS]; the same in every process."""
    torch.manual_seed(0)
    stages = nn.ModuleList(map(Stage, range(STAGES))).double()
    return stages, *torch.randint(VOCABULARY, (2, MICRO_BATCHES, TOKENS))


# %% 4. A rank: one process with one stage. It runs its ops in the order of the schedule, and waits only to receive.
class Rank:
    """A stage, its keys and values by micro-batch, and the graph of each token slice until its backward."""

    def __init__(self, stage):
        self.stage, self.past, self.graphs = stage, defaultdict(list), {}

    def forward(self, op, hidden, labels):
        """Run a token slice. Its keys and values become leaves, which collect gradients of later token slices."""
        output, *own = self.stage(hidden, labels, self.past[op.micro_batch])
        leaves = [each.detach().requires_grad_() for each in own]
        self.past[op.micro_batch].append(leaves)
        self.graphs[op.micro_batch, op.token_slice] = hidden, (output, *own), leaves
        return output.detach()

    def backward(self, op, gradient):
        """Run its backward, from the gradient of the output and from those that its leaves have collected."""
        hidden, outputs, leaves = self.graphs.pop((op.micro_batch, op.token_slice))
        gradients = gradient, *(leaf.grad for leaf in leaves)
        collected = [pair for pair in zip(outputs, gradients, strict=True) if pair[1] is not None]
        torch.autograd.backward(*zip(*collected, strict=True))
        return hidden.grad


def run_step(rank, ops, tokens, labels):
    """Return this rank's part of the loss, and the milliseconds of each kind of op and token slice."""
    loss, times, requests = 0.0, {}, []
    for op in ops:
        place, forward = (op.micro_batch, op.token_slice), op.kind is F
        source, target = (op.stage - 1, op.stage + 1) if forward else (op.stage + 1, op.stage - 1)
        received = tokens[place] if forward else torch.ones(())  # into the first stage, and into the loss
        if source in range(STAGES):
            received = torch.empty(tokens.shape[-1], WIDTH, dtype=torch.double, requires_grad=forward)
            dist.recv(received, source)
        start = perf_counter()
        result = rank.forward(op, received, labels[place]) if forward else rank.backward(op, received)
        times[op.kind.value, op.stage, op.token_slice] = 1e3 * (perf_counter() - start)
        if target in range(STAGES):
            requests.append(dist.isend(result, target))
        elif forward:
            loss += result.item()
    for request in requests:
        request.wait()
    return loss, times


def run_rank(index, schedule, shape, folder):
    """Run three steps in this process; save the loss, the gradients, and times of the last step in milliseconds."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=index, world_size=STAGES)
    for _ in range(3):
        stages, *data = toy()
        data = [each.view(MICRO_BATCHES, shape.num_token_slices, -1) for each in data]
        dist.barrier()
        start = perf_counter()
        loss, times = run_step(Rank(stages[index]), schedule(shape, index), *data)
        dist.barrier()
    step = 1e3 * (perf_counter() - start)
    gradients = torch.cat([weight.grad.flatten() for weight in stages[index].parameters()])
    torch.save((loss, gradients, times, step), f"{folder}/{index}.pt")
    dist.destroy_process_group()


def pipelined(schedule, shape):
    """Return loss, gradients, and milliseconds of ops and of a step, run by the schedule with a process for a stage."""
    with tempfile.TemporaryDirectory() as folder:
        start_processes(run_rank, (schedule, shape, folder), nprocs=STAGES, start_method="fork")
        saved = [torch.load(f"{folder}/{index}.pt", weights_only=True) for index in range(STAGES)]
    losses, gradients, times, steps = zip(*saved, strict=True)
    return sum(losses), torch.cat(gradients), dict(ChainMap(*times)), max(steps)


# %% 5. The check: loss and gradients are those of plain autograd over whole sequences, and the step is shorter.
def off_by(gradients):
    """Return the largest error of the gradients, relative to the largest gradient."""
    return float((gradients - expected).abs().max() / expected.abs().max())


stages, tokens, labels = toy()
expected_loss = 0.0
for hidden, label in zip(tokens, labels, strict=True):
    for stage in stages:
        hidden, *_ = stage(hidden, label)
    hidden.backward()
    expected_loss += hidden.item()
expected = torch.cat([weight.grad.flatten() for weight in stages.parameters()])
print("token slices  makespan  bubble  by formula     step  simulated with its op times  loss, gradients off by")
for shape, timeline in zip(shapes, timelines, strict=True):
    loss, gradients, times, step = pipelined(schedule, shape)
    tables = ([[times[kind, i, s] for s in range(shape.num_token_slices)] for i in range(STAGES)] for kind in (F, B))
    simulated = timeline_of(schedule, shape, OpCosts(*tables)).makespan
    formula = (STAGES - 1) / (MICRO_BATCHES * shape.num_token_slices + STAGES - 1)
    errors = abs(loss - expected_loss) / expected_loss, off_by(gradients)
    columns = f"{shape.num_token_slices:12}  {timeline.makespan:8.1f}  {timeline.bubble_ratio:6.1%}  {formula:10.1%}"
    print(f"{columns}  {step:4.0f} ms  {simulated:24.0f} ms  {errors[0]:.0e}, {errors[1]:.0e}")
    if max(errors) > 1e-12:
        raise SystemExit("loss or gradients are wrong: an op ran before all its inputs were complete")


# %% 6. A wrong order: the backward from the first token slice to the last. It is refused; executed, it would be wrong.
def reversed_backward(shape, rank):
    """Yield the same ops, each backward for the token slice at the other end."""
    for op in schedule(shape, rank):
        yield op if op.kind is F else op._replace(token_slice=shape.last_token_slice - op.token_slice)


try:
    timeline_of(reversed_backward, shapes[1], costs[1])
except PlanError as error:
    print(f"\nrefused: {error}")
print(f"executed anyway, gradients are off by {off_by(pipelined(reversed_backward, shapes[1])[1]):.0e}")
