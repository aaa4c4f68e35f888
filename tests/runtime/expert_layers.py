"""A small model with experts that ranks share, trained by the engine and by plain autograd on one process."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec
from deepspeed.runtime.utils import set_random_seed
from torch import Tensor, nn
from torch.nn import functional as F

from deepspeed_ext.runtime.gradients.gradient_norm import ZeroGradients
from deepspeed_ext.runtime.health.states import differences
from deepspeed_ext.runtime.topology import ExpertParallelRanks, is_of_experts, own_group
from tests.distributed import one_by_one
from tests.runtime.models import HIDDEN, VOCAB, batches, loss_fn
from tests.runtime.reference import BASE_SEED
from tests.runtime.training import ROWS, Setup, as_numpy, build

EXPERTS, STEPS, CLIP, LR = 4, 2, 0.05, 0.1
BAD_RANK = 1
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
CUT = (8, 4, 12)


class Exchange(torch.autograd.Function):
    """Give all ranks the tensors of all, by rank; or each rank its part of their sum. Each is the other's adjoint."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: Any, gathers: bool) -> Tensor:
        ctx.ranks, ctx.gathers = ranks, gathers
        whole = tensor.clone()
        if gathers:
            whole = tensor.new_zeros(ranks.size, *tensor.shape)
            whole[ranks.rank] = tensor
        if ranks.size > 1:
            dist.all_reduce(whole, group=ranks.group)
        return whole if gathers else whole[ranks.rank].clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return Exchange.apply(gradient, ctx.ranks, not ctx.gathers), None, None


class Tensors:
    """Tensor-parallel ranks, with whole weights and their parts of the tokens."""

    def __init__(self, setup: Setup) -> None:
        self.size = setup.tp
        self.rank = setup.layout.coordinate(dist.get_rank()).tensor if dist.is_initialized() else 0
        self.group = own_group(setup.layout.groups("tensor")) if setup.tp > 1 else None

    def own(self, module: nn.Module) -> None:
        """Mark the weights of a layer that this rank applies to its tokens."""
        for parameter in module.parameters():
            parameter.sequence_parallel = self.size > 1


class Words(nn.Module):
    def __init__(self, ranks: Tensors) -> None:
        super().__init__()
        self.ranks, self.weight = ranks, nn.Parameter(torch.randn(VOCAB, HIDDEN))
        ranks.own(self)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens // 2  # Gradients of the other rows are 0.
        return F.embedding(tokens.chunk(self.ranks.size, dim=1)[self.ranks.rank], self.weight)


class Dense(nn.Linear):
    def __init__(self, ranks: Tensors) -> None:
        super().__init__(HIDDEN, HIDDEN, bias=False)
        ranks.own(self)


class Layer(nn.Module):
    """Every token goes to all experts, so that no rounding changes a choice."""

    def __init__(self, ranks: Tensors, experts: ExpertParallelRanks) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        ranks.own(self)
        self.ranks, self.own = experts, EXPERTS // experts.size
        whole = torch.randn(EXPERTS, HIDDEN, HIDDEN) * 0.3
        self.experts = nn.Parameter(whole[experts.rank * self.own :][: self.own].clone())
        self.experts.sequence_parallel = ranks.size > 1 and experts.size == 1
        self.experts.expert_parallel = experts.size > 1

    def forward(self, hidden: Tensor) -> Tensor:
        gates = F.softmax(self.router(hidden), dim=-1)
        tokens, gates = (Exchange.apply(each, self.ranks, True) for each in (hidden, gates))
        own = gates[..., self.ranks.rank * self.own :][..., : self.own]
        # The first output of each expert is not used: gradients of 0.
        outputs = F.pad(torch.tanh(torch.einsum("...h,eoh->...eo", tokens, self.experts))[..., 1:], (1, 0))
        return hidden + Exchange.apply((own[..., None] * outputs).sum(-2), self.ranks, False)


class Head(nn.Module):
    def __init__(self, ranks: Tensors) -> None:
        super().__init__()
        self.ranks, self.weight = ranks, nn.Parameter(torch.randn(VOCAB, HIDDEN) * 0.3)

    def forward(self, hidden: Tensor) -> Tensor:
        # Each rank has the loss of all tokens, and so the whole gradient of its own.
        whole = [*Exchange.apply(hidden.detach(), self.ranks, True)]
        whole[self.ranks.rank] = hidden
        return F.linear(torch.cat(whole, dim=1), self.weight)


def layers(setup: Setup, experts: ExpertParallelRanks) -> list[LayerSpec]:
    ranks = Tensors(setup)
    return [
        LayerSpec(Words, ranks),
        *[LayerSpec(Layer, ranks, experts) for _ in range(2)],
        LayerSpec(Dense, ranks),
        LayerSpec(Head, ranks),
    ]


def micro_batches(setup: Setup, replica: int, step: int) -> list[Any]:
    """The same batch for any number of replicas."""
    count = 4 // setup.dp
    return batches(4, ROWS, step)[replica * count :][:count]


def trained(setup: Setup, keywords: dict[str, Any] | None = None) -> dict[str, Any]:
    """Results of a few clipped steps."""
    experts = ExpertParallelRanks.of(setup.layout)
    setup = replace(setup, micro_batches=4 // setup.dp)
    zero = {"stage": setup.zero, "contiguous_gradients": False, "overlap_comm": False}
    engine = build(
        setup,
        layers=layers(setup, experts),
        expert_ranks=experts,
        loss_fn=loss_fn,
        activation_spec=None,
        partition="uniform" if setup.pp == 1 else "0,3,5",  # No experts on the second stage.
        config={"gradient_clipping": CLIP, "zero_optimization": zero} | (FP16 if setup.dtype == "fp16" else {}),
        optimizer=partial(torch.optim.AdamW, lr=LR, eps=1e-3),
        engine_keywords={"check_token_slices": False} | (keywords or {}),
    )
    zeros = ZeroGradients(engine)
    found: dict[str, Any] = {"losses": [], "norms": [], "zeros": [], "first": experts.rank * EXPERTS // experts.size}
    with engine.observers.joined_by(zeros):
        for number in range(STEPS):
            loss = engine.train_batch(iter(micro_batches(setup, engine.replica, number)))
            found["losses"].append(loss.item())
            found["norms"].append(float(engine.get_global_grad_norm()))
            found["zeros"].append(zeros.number())
    found["differences"] = differences(engine)
    found["weights"] = {name: as_numpy(parameter) for name, parameter in engine.module.named_parameters()}
    # The gradient of one rank's experts has a NaN.
    of_experts = [weight for weight in engine.module.parameters() if is_of_experts(weight)]
    if dist.get_rank() == BAD_RANK:
        of_experts[0].register_hook(lambda gradient: gradient * float("nan"))
    engine.train_batch(iter(micro_batches(setup, engine.replica, STEPS)))
    engine.complete_weights()
    after = {name: as_numpy(parameter) for name, parameter in engine.module.named_parameters()}
    found["skipped"] = all(np.array_equal(after[name], weight) for name, weight in found["weights"].items())
    with torch.no_grad():
        if dist.get_rank() == BAD_RANK:
            of_experts[0][0, 0, 0] += 1
    found["broken"] = differences(engine)
    return found


FP32 = Setup(cut=CUT)
SETUPS = [
    replace(FP32, tp=4, ep=2),  # Only experts have copies.
    replace(FP32, tp=4, ep=2, zero=1),
    replace(FP32, dp=4, ep=4),  # No rank has the same experts.
    replace(FP32, pp=2, dp=2, ep=2, zero=1),
    replace(FP32, pp=2, dp=2, ep=2, dtype="bf16"),
    replace(FP32, dp=4, ep=2, dtype="fp16", zero=1),
]


def trained_in_all_setups() -> list[dict[str, Any]]:
    """Results of this rank, with reductions and gathers under ops and after them."""
    get_accelerator().is_fp16_supported = lambda: True
    return one_by_one(
        lambda number: trained(
            SETUPS[number], {"overlap_grad_reduce": number % 3 > 0, "overlap_param_gather": number % 2 == 0}
        ),
        range(len(SETUPS)),
    )


def trained_on_one() -> dict[str, Any]:
    """The same results by plain autograd on one process, in fp64."""
    modules = []
    for number, spec in enumerate(layers(Setup(), ExpertParallelRanks())):
        set_random_seed(BASE_SEED + number)
        modules.append(spec.build())
    model = nn.Sequential(*modules).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=1e-3)
    losses, norms, zeros = [], [], []
    for number in range(STEPS):
        optimizer.zero_grad()
        loss = sum(loss_fn(model(tokens), labels) for tokens, labels in micro_batches(Setup(), 0, number)) / 4
        loss.backward()
        losses.append(loss.item())
        zeros.append(sum(int((weight.grad == 0).sum()) for weight in model.parameters()))
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
    weights = {name: as_numpy(parameter) for name, parameter in model.named_parameters()}
    return {"losses": losses, "norms": norms, "zeros": zeros, "weights": weights}
