"""A mixture of experts in place of an MLP (Shazeer et al., arXiv 1701.06538; Mixtral, arXiv 2401.04088).

    x_Th --router--> logits_TE --rule--> chosen_TK, weights_TK
      |
      +--permute---> x_Rh --up--> activation x weight --down--> y_Rh --unpermute, sum over K--> output_Th
      +--shared experts, an MLP of every token------------------------------------------------> +

Letters of shapes: B rows, n tokens of a row that this rank has, T = B n, h hidden size, E experts, K chosen by a token,
R = T K pairs of a token and an expert, sorted by expert, f hidden width of an expert.

A token chooses by itself, so token slices change nothing of this. The chosen experts of a token slice are kept: a
forward that is computed again does not choose again, since rounding could change the choice. Losses and limits that
depend on several tokens are in `balance.py`. A weight enters before the last product, W (w a) = w (W a), so that the
outputs of the experts are not kept for its gradient.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepspeed_ext.runtime.gradients.weight_gradients import now_or_deferred, sum_of
from deepspeed_ext.runtime.state.sequence_state import Past
from deepspeed_ext.runtime.topology import ExpertParallelRanks
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.config.experts import ExpertSettings
from megatron_terapipe.config.layers import BlockShape
from megatron_terapipe.model.balance import Balance
from megatron_terapipe.model.expert_dispatch import AllGather, AllToAll, Here, Pairs
from megatron_terapipe.model.initialization import normal
from megatron_terapipe.model.mlp import MLP, WeightedActivation
from megatron_terapipe.model.tensor_parallel import Initializer, TensorParallelRanks

# ---------------------------------------------------------------------- the rule


def choose(logits_TE: Tensor, rule: ExpertSettings, bias_E: Tensor | None = None) -> Tensor:
    """Return the experts that each token chooses, the best first: chosen_TK, int64.

    Groups are experts one after the other; a token chooses in those with the largest sums of their best scores, of
    which there are as many as it takes to choose as many in each.

    Args:
        logits_TE: of the router, in fp32 or fp64.
        bias_E: added to the scores here, and not in `weigh`; None for none.
    """
    # A softmax keeps the order of its logits.
    groups, kept = rule.moe_router_num_groups or 1, rule.moe_router_group_topk or 1
    scored = rule.moe_router_score_function == "sigmoid" or bias_E is not None or groups > 1
    scores_TE = scores(logits_TE, rule) if scored else logits_TE
    if bias_E is not None:
        scores_TE = scores_TE + bias_E
    if groups > 1:
        scores_TGe = scores_TE.unflatten(1, (groups, -1))
        best_TG = scores_TGe.topk(rule.moe_router_topk // kept, dim=2).values.sum(2)
        dropped_TG = torch.ones_like(best_TG, dtype=torch.bool)
        dropped_TG.scatter_(1, best_TG.topk(kept, dim=1).indices, False)
        # Not 0, which is more than a score with a negative bias.
        scores_TE = scores_TGe.masked_fill(dropped_TG.unsqueeze(2), float("-inf")).flatten(1)
    return scores_TE.topk(rule.moe_router_topk, dim=1).indices


def scores(logits_TE: Tensor, rule: ExpertSettings) -> Tensor:
    """Return the scores of all experts: scores_TE, each in [0, 1]."""
    return logits_TE.softmax(1) if rule.moe_router_score_function == "softmax" else logits_TE.sigmoid()


def weigh(logits_TE: Tensor, chosen_TK: Tensor, rule: ExpertSettings) -> Tensor:
    """Return the weights of the chosen experts' outputs: weights_TK, differentiable in the logits."""
    if rule.moe_router_score_function == "softmax" and rule.renormalises:
        weights_TK = logits_TE.gather(1, chosen_TK).softmax(1)
    else:
        weights_TK = scores(logits_TE, rule).gather(1, chosen_TK)
        if rule.renormalises:
            weights_TK = weights_TK / (weights_TK.sum(1, keepdim=True) + 1e-20)
    scale = rule.moe_router_topk_scaling_factor or 1.0
    return weights_TK if scale == 1 else weights_TK * scale


class Router(nn.Module):
    """Logits of the experts, computed in fp32 or wider from inputs and weights of any type."""

    def __init__(self, model: ModelConfig, ranks: TensorParallelRanks) -> None:
        super().__init__()
        assert model.num_experts is not None, "made only in layers of experts"
        self.rule, drawn = model, normal(model.init_method_std)
        experts = self.num_experts = model.num_experts
        self.weight = ranks.whole(experts, model.hidden_size, initialize=drawn)
        self.bias = ranks.whole(experts, initialize=drawn) if model.has_router_bias else None
        bias_E = torch.zeros(experts, dtype=torch.float32) if model.moe_router_enable_expert_bias else None
        self.register_buffer("expert_bias", bias_E)
        self.balance = Balance(model, ranks, None if bias_E is None else lambda: self.expert_bias)

    def forward(self, x_Bnh: Tensor, past: Past) -> tuple[Tensor, Tensor]:
        """Return the chosen experts and their weights, E and 0 beyond the capacity: chosen_TK, weights_TK."""
        rows = len(x_Bnh)
        logits_TE = _WideProduct.apply(self.balance.jittered(x_Bnh, past).flatten(0, 1), self.weight)
        if self.bias is not None:
            logits_TE = logits_TE + self.bias
        kept = past.cached_for_recompute("chosen experts", lambda: self._choose(logits_TE.detach(), rows, past))
        chosen_TK = kept[0].long()
        weights_TK = weigh(self.balance.with_losses(logits_TE, rows, past), chosen_TK, self.rule)
        if kept[1] is None:
            return chosen_TK, weights_TK
        return chosen_TK.masked_fill(~kept[1], self.num_experts), weights_TK * kept[1]

    def _choose(self, logits_TE: Tensor, rows: int, past: Past) -> tuple[Tensor, Tensor | None]:
        """Choose, count the choices, and find those within the capacity: chosen_TK, int16, within_TK."""
        chosen_TK = choose(logits_TE, self.rule, self.expert_bias)
        self.balance.count(chosen_TK, rows, past)
        return chosen_TK.short(), self.balance.within_capacity(chosen_TK, rows, past)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Convert all but the type of the bias: bf16 does not resolve its steps."""
        bias_E = self.expert_bias
        super()._apply(fn, recurse)
        if bias_E is not None and not bias_E.is_meta:
            self.expert_bias = bias_E.to(self.expert_bias.device)
        return self


class _WideProduct(torch.autograd.Function):
    """`x @ weight.T` in fp32 or wider, which keeps its inputs as they are."""

    @staticmethod
    def forward(ctx, x_Th, weight_Eh):
        ctx.save_for_backward(x_Th, weight_Eh)
        wide = torch.promote_types(x_Th.dtype, torch.float32)
        return x_Th.to(wide) @ weight_Eh.to(wide).t()

    @staticmethod
    def backward(ctx, gradient_TE):
        x_Th, weight_Eh = ctx.saved_tensors
        of_x = (gradient_TE @ weight_Eh.to(gradient_TE.dtype)).to(x_Th.dtype)
        return of_x, (gradient_TE.t() @ x_Th.to(gradient_TE.dtype)).to(weight_Eh.dtype)


# ---------------------------------------------------------------------- products of experts


def _has_grouped_products(weight_Eoi: Tensor) -> bool:
    """Whether a device has a kernel for the products of all experts.

    CUDA has one from compute capability 8.0 on, in bf16, for rows of whole 16 bytes.
    """
    on_cuda = weight_Eoi.device.type == "cuda" and weight_Eoi.dtype is torch.bfloat16
    aligned = not any(size % 8 for size in weight_Eoi.shape[1:])
    return on_cuda and aligned and torch.cuda.get_device_capability(weight_Eoi.device) >= (8, 0)


def grouped_product(x_Ri: Tensor, weight_Eoi: Tensor, pairs: Pairs) -> Tensor:
    """Return the product of each pair with the matrix of its expert: y_Ro; 0 for pairs of no expert."""
    if _has_grouped_products(weight_Eoi):
        y_Ro = F.grouped_mm(x_Ri, weight_Eoi.transpose(1, 2), offs=pairs.ends_E)
        if pairs.complete:
            return y_Ro
        # The kernel does not write rows after the last expert's.
        beyond_R = torch.arange(len(x_Ri), device=x_Ri.device) >= pairs.ends_E[-1]
        return y_Ro.masked_fill_(beyond_R.unsqueeze(1), 0)
    y_Ro, end = x_Ri.new_empty(len(x_Ri), weight_Eoi.shape[1]), 0
    for weight_oi, own in zip(weight_Eoi, pairs.of_experts(), strict=True):
        torch.mm(x_Ri[own], weight_oi.t(), out=y_Ro[own])
        end = own.stop
    y_Ro[end:].zero_()
    return y_Ro


def _weight_gradient(weight: Tensor, gradient_Ro: Tensor, x_Ri: Tensor, pairs: Pairs) -> Tensor | None:
    """The products of all experts' weights, or None once they are added to a sum."""
    total = sum_of(weight)
    if _has_grouped_products(weight.flatten(1, -2)):
        of_weight = F.grouped_mm(gradient_Ro.t(), x_Ri, offs=pairs.ends_E).view_as(weight)
        if total is None:
            return of_weight
        total.total.add_(of_weight)
        return None
    if total is not None:
        for of_expert, own in zip(total.of_first_dimension, pairs.of_experts(), strict=True):
            of_expert.add_product(gradient_Ro[own], x_Ri[own])
        return None
    first = torch.empty_like(weight)
    for of_expert, own in zip(first.flatten(1, -2), pairs.of_experts(), strict=True):
        # With a factor of 0 the memory is not read, and the gradient of an expert without tokens becomes 0.
        of_expert.addmm_(gradient_Ro[own].t(), x_Ri[own], beta=0)
    return first


class _ExpertProduct(torch.autograd.Function):
    """Products of pairs with the matrices of their experts, of inputs or of a function of them, which is repeated."""

    @staticmethod
    def forward(ctx, weight, pairs: Pairs, before: WeightedActivation | None, *inputs):
        ctx.save_for_backward(weight, *inputs)
        # Where a forward is repeated, autograd gives back a copy of the weight that has no gradient.
        ctx.parameter, ctx.pairs, ctx.before = weight, pairs, before
        x_Ri = inputs[0] if before is None else before(*inputs)
        return grouped_product(x_Ri, weight.flatten(1, -2), pairs)

    @staticmethod
    def backward(ctx, gradient_Ro):
        weight, *inputs = ctx.saved_tensors
        of_x = grouped_product(gradient_Ro, weight.flatten(1, -2).transpose(1, 2), ctx.pairs)
        x_Ri, *of_inputs = (*inputs, of_x) if ctx.before is None else ctx.before.backward(of_x, *inputs)
        product = partial(_weight_gradient, ctx.parameter, gradient_Ro, x_Ri, ctx.pairs)
        of_weight = now_or_deferred(ctx.parameter, product) if ctx.needs_input_grad[0] else None
        return of_weight, None, None, *of_inputs


class Experts(nn.Module):
    """The MLPs of the experts of this rank. With a gate, its matrix and the gated one are one parameter."""

    def __init__(
        self, model: ModelConfig, block: BlockShape, ranks: TensorParallelRanks, expert_ranks: ExpertParallelRanks
    ) -> None:
        super().__init__()

        def parameter(*shape: int, initialize: Initializer | None) -> nn.Parameter:
            """The part of this rank's experts, drawn by their numbers among all."""
            if expert_ranks.size == 1:
                return ranks.whole(*shape, initialize=initialize)
            shared = TensorParallelRanks(expert_ranks.rank, expert_ranks.size)
            weight = shared.parameter(*shape, cut=0, initialize=initialize)
            # Read by the runtime, which sums the gradient over the ranks with the same experts.
            weight.expert_parallel = True
            return weight

        experts, hidden, width = block.num_experts, model.hidden_size, block.ffn_hidden_size
        widened = (2, width) if model.gated else (width,)
        self.up = parameter(experts, *widened, hidden, initialize=normal(model.init_method_std))
        self.down = parameter(experts, hidden, width, initialize=normal(model.output_layer_init_std))
        has_bias = model.has_mlp_bias
        self.up_bias = parameter(experts, *widened, initialize=None) if has_bias else None
        self.down_bias = parameter(experts, hidden, initialize=None) if has_bias else None
        self.weighted_activation = WeightedActivation(model)

    def forward(self, x_Rh: Tensor, weights_R: Tensor, pairs: Pairs) -> Tensor:
        """Return the weighted outputs of the experts: y_Rh."""
        up_Rf = _ExpertProduct.apply(self.up, pairs, None, x_Rh)
        if self.up_bias is None:
            return _ExpertProduct.apply(self.down, pairs, self.weighted_activation, up_Rf, weights_R)
        places_R = torch.arange(len(x_Rh), device=x_Rh.device)
        expert_R = torch.searchsorted(pairs.ends_E, places_R, right=True).clamp(max=len(self.up) - 1)
        up_Rf = up_Rf + F.embedding(expert_R, self.up_bias.flatten(1))
        y_Rh = _ExpertProduct.apply(self.down, pairs, self.weighted_activation, up_Rf, weights_R)
        return y_Rh + F.embedding(expert_R, self.down_bias) * weights_R.to(y_Rh.dtype).unsqueeze(1)


# ---------------------------------------------------------------------- the layer


class ExpertLayer(nn.Module):
    """Router, experts, and shared experts, of the tokens that this rank has between the matrices.

    Args:
        ranks: ranks that share the matrices of attention and of the shared experts; each routes its own tokens.
        expert_ranks: ranks that share the experts; None for a single rank.
    """

    def __init__(
        self,
        model: ModelConfig,
        block: BlockShape,
        ranks: TensorParallelRanks,
        expert_ranks: ExpertParallelRanks | None = None,
    ) -> None:
        super().__init__()
        assert ranks.size == 1 or ranks.sequence_parallel, "the configuration gives each rank its own tokens"
        self.router = Router(model, ranks)
        expert_ranks = expert_ranks or ExpertParallelRanks()
        self.experts = Experts(model, block, ranks, expert_ranks)
        kind = AllGather if model.moe_token_dispatcher_type == "allgather" else AllToAll
        experts = block.num_experts
        here = Here(experts, model.moe_expert_capacity_factor is None)
        self.dispatch = here if expert_ranks.size == 1 else kind(experts, expert_ranks)
        width = block.shared_ffn_hidden_size
        shared = replace(block, ffn_hidden_size=width, num_experts=0)
        self.shared = MLP(model, shared, ranks) if width else None
        has_gate, drawn = model.moe_shared_expert_gate, normal(model.init_method_std)
        self.shared_gate = ranks.whole(1, model.hidden_size, initialize=drawn) if has_gate else None

    def forward(self, x_Bnh: Tensor, past: Past) -> Tensor:
        """Return the output of the layer: [B, n, h]."""
        x_Th = x_Bnh.flatten(0, 1)
        chosen_TK, weights_TK = self.router(x_Bnh, past)
        dispatched = self.dispatch(x_Th, chosen_TK, weights_TK, past)
        # The first half of the shared experts runs while tokens are sent, the second while outputs are sent back.
        shared = None if self.shared is None else self.shared.up(x_Bnh)
        x_Rh, weights_R, pairs = dispatched.given()
        arriving = dispatched.start_back(self.experts(x_Rh, weights_R, pairs))
        if self.shared is not None:
            shared = self.shared.down(self.shared.activation(shared))
        if self.shared_gate is not None:
            shared = shared * F.linear(x_Bnh, self.shared_gate).sigmoid()
        y_Bnh = arriving().view_as(x_Bnh)
        return y_Bnh if shared is None else y_Bnh + shared
