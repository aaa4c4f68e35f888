"""Balance of the experts of a layer: losses of the router, the bias of its choices, capacity, and jitter.

Let p_ti be the score of expert i for token t, divided by the sum over the experts, and C_i the number of tokens of a
group that chose expert i. The auxiliary loss (Fedus et al., arXiv 2101.03961, equation 4; for K choices as in Megatron)
is the mean over the tokens of the micro-batch

    L_aux = alpha / T * sum_t sum_i f_i p_ti        f_i = E C_i / sum_j C_j,  of the group of t, without a gradient
    L_z   = beta  / T * sum_t (log sum_i exp x_ti)^2        of the logits x (Zoph et al., arXiv 2202.08906, equation 5)

Groups are sequences, documents, the micro-batch, or the micro-batches of the step so far on all replicas. A loss of
several groups is their mean by tokens. T counts the micro-batch, never a token slice: so the gradient of a token
depends on others only by its group's C, and is exact in token slices (`deepspeed_ext/runtime/state/counts.py`).

The bias (Wang et al., arXiv 2408.15664) changes once a step by u sign(mean C - C_i), with C of the step.
"""

from collections.abc import Callable
from math import ceil
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.runtime.state.counts import CountingLayer, Counts
from deepspeed_ext.runtime.state.sequence_state import Past
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.model.tensor_parallel import TensorParallelRanks

JITTER = 4
"""Site of the jitter among the uses of random numbers in a layer, after the sites of `DropoutSite`."""


class Balance(CountingLayer):
    """Counts and losses of the router of one layer. It has no weights.

    Tokens [T] are those [B, n] that this rank has between the matrices, row after row.

    Args:
        bias: returns the bias [E] of the choices, which changes after each step; None for none.
    """

    def __init__(
        self, model: ModelConfig, ranks: TensorParallelRanks, bias: Callable[[], Tensor] | None = None
    ) -> None:
        groups_of = model.moe_router_load_balancing_type if model.moe_aux_loss_coeff else "none"
        of_step = groups_of == "global_aux_loss"
        super().__init__(
            width=model.num_experts or 0,
            num_values=len(model.router_losses),
            reads=None if groups_of == "none" else "step" if of_step else "micro-batch",
        )
        self._model, self._ranks, self._groups_of = model, ranks, groups_of
        self._softmax = model.moe_router_score_function == "softmax"
        self._auxiliary, self._z = model.moe_aux_loss_coeff, model.moe_z_loss_coeff or 0.0
        self._rate, self._bias = model.moe_router_bias_update_rate, bias

    def jittered(self, hidden_BnC: Tensor, past: Past) -> Tensor:
        """Inputs of the router, multiplied by random numbers in training."""
        if self._model.moe_input_jitter_eps is None or not self.training:
            return hidden_BnC
        first_token = self._ranks.first_token(hidden_BnC.shape[1])
        return past.jittered(hidden_BnC, self._model.moe_input_jitter_eps, site=JITTER, first_token=first_token)

    def count(self, chosen_TK: Tensor, num_rows: int, past: Past) -> None:
        """Count the choices of a token slice. Call it once, where they are made."""
        if not self.training:
            return
        counts, groups_T = self._groups(len(chosen_TK), num_rows, past, chosen_TK.device)
        index_TK = chosen_TK if groups_T is None else chosen_TK + self.width * groups_T.unsqueeze(1)
        counts.own.view(-1).scatter_add_(0, index_TK.flatten(), torch.ones_like(index_TK).flatten())

    def with_losses(self, logits_TE: Tensor, num_rows: int, past: Past) -> Tensor:
        """The same logits; their backward adds the gradient of the losses."""
        if not (self._auxiliary or self._z) or not self.training or not torch.is_grad_enabled():
            return logits_TE
        counts, groups_T = self._groups(len(logits_TE), num_rows, past, logits_TE.device)
        tokens = num_rows * past.seq_length
        return _Losses.apply(logits_TE, lambda *tensors: self.add_gradient(*tensors, counts, groups_T, past, tokens))

    def within_capacity(self, chosen_TK: Tensor, num_rows: int, past: Past) -> Tensor | None:
        """Which choices [T, K] are processed: of each expert the first of a sequence; None for all of them.

        Call it once for a token slice, as `count`.
        """
        factor, experts = self._model.moe_expert_capacity_factor, self.width
        if factor is None:
            return None
        capacity = ceil(factor * self._model.seq_length * chosen_TK.shape[1] / experts)
        by_token = torch.zeros(len(chosen_TK), experts, dtype=torch.int64, device=chosen_TK.device)
        by_token.scatter_(1, chosen_TK, 1)
        by_token = by_token.unflatten(0, (num_rows, -1))
        totals = by_token.sum(1)
        ahead, everywhere = self._before(totals, past)
        earlier = past.carried("tokens of experts", torch.zeros_like(totals))
        before = by_token.cumsum(1) - by_token + (earlier + ahead).unsqueeze(1)
        past.carry("tokens of experts", earlier + everywhere)
        return before.flatten(0, 1).gather(1, chosen_TK) < capacity

    def _before(self, own: Tensor, past: Past) -> tuple[Tensor, Tensor]:
        """Sums of the counts [B, E] of the ranks with earlier tokens of the token slice, and of all of its ranks."""
        if not self._ranks.sequence_parallel:
            return past.sum_before(own)
        # Tensor-parallel ranks share the tokens of a sequence-parallel rank.
        by_rank = self._ranks.start_gather(own.unsqueeze(1))()
        before, total = past.sum_before(by_rank.sum(1))
        return before + by_rank[:, : self._ranks.rank].sum(1), total

    def _groups(self, num_tokens: int, num_rows: int, past: Past, device: torch.device) -> tuple[Counts, Tensor | None]:
        """The counts of this layer in the micro-batch, and each token's group in them: [T]; None if there is one."""
        length, number, groups_T = num_tokens // num_rows, 1, None
        if self._groups_of == "seq_aux_loss" and num_rows > 1:
            number = num_rows
            groups_T = torch.arange(num_rows, device=device).repeat_interleave(length, output_size=num_tokens)
        elif self._groups_of == "document_aux_loss":
            groups_Bn, number = past.document_numbers(self._ranks.first_token(length), length)
            groups_T = groups_Bn.flatten()
        return past.counts(self, number, device), groups_T

    def after_step(self, counts_E: Tensor, updated: bool | Tensor) -> None:
        """Change the bias, given the counts of all tokens of a step. Called by the engine."""
        if self._bias is None:
            return
        bias = self._bias()
        # In whole numbers, so that equal counts have no sign.
        change = torch.sign(counts_E.sum() - self.width * counts_E) * self._rate
        # A product, because the host does not wait for `updated`.
        bias += (change * updated).to(bias.dtype)

    def add_gradient(
        self, gradient_TE: Tensor, logits_TE: Tensor, counts: Counts, groups_T: Tensor | None, past: Past, tokens: int
    ) -> Tensor:
        """The gradient of the logits, plus the gradient of the losses of a token slice."""
        values = []
        scale = past.loss_factor / tokens
        if self._auxiliary:
            counts_GE = counts.summed().to(logits_TE.dtype)
            share_GE = counts_GE / counts_GE.sum(-1, keepdim=True) * self.width
            share = share_GE if groups_T is None else share_GE[groups_T]
            if self._softmax:
                p_TE, slope_TE = logits_TE.softmax(-1), 1
            else:
                score_TE = logits_TE.sigmoid()
                p_TE, slope_TE = score_TE / score_TE.sum(-1, keepdim=True), 1 - score_TE
            loss_T1 = (p_TE * share).sum(-1, keepdim=True)
            gradient_TE = gradient_TE + scale * self._auxiliary * p_TE * slope_TE * (share - loss_T1)
            values.append(loss_T1.sum())
        if self._z:
            log_T1 = logits_TE.logsumexp(-1, keepdim=True)
            gradient_TE = gradient_TE + scale * self._z * 2 * log_T1 * (logits_TE - log_T1).exp()
            values.append(log_T1.square().sum())
        if self.values_in_step is not None:
            self.values_in_step += torch.stack(values) / tokens
        return gradient_TE


class _Losses(torch.autograd.Function):
    """The identity of logits, with the gradient of the losses of `Balance`."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, add_gradient: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.add_gradient = add_gradient
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.add_gradient(gradient, *ctx.saved_tensors), None
