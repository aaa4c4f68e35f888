"""Token mixers with a state: a causal convolution and linear attention of one token slice, given the state before it.

They are pure functions of tensors; a layer carries the state from token slice to token slice with `Past.carry`. Both
start again where a document begins.

Linear attention keeps one matrix S for each head, of keys times values, in place of all keys and values:

    S_t = a_t S_(t-1) + k_t u_t'        u_t = v_t                              decayed linear attention
    o_t = S_t' q_t                      u_t = b_t (v_t - a_t S_(t-1)' k_t)     gated delta rule

Mamba-2 is the first with C, B and dt x for q, k and v, and a_t = exp(dt A) (Dao and Gu, arXiv 2405.21060 section 7).
The gated delta net is the second: with b_t = 1, S_t maps k_t to v_t (Yang et al., arXiv 2412.06464 section 3). Token by
token both would be many small operations. With log-decays summed up from the start of a chunk of tokens,
G_t = g_1 + ... + g_t, they are

    S_t = exp(G_t) S_0 + sum over s <= t of exp(G_t - G_s) k_s u_s'
    u_t + b_t sum over s < t of exp(G_t - G_s) (k_t k_s) u_s = b_t (v_t - exp(G_t) S_0' k_t)

so all outputs of a chunk are products of matrices, and the second line is a triangular system with u = U - W S_0 for
matrices U and W without S_0. Only S is computed chunk by chunk.
"""

from math import inf

import torch
from torch import Tensor

from deepspeed_ext.plan.costs import CHUNK_TOKENS

__all__ = ["causal_convolution", "linear_attention"]


def causal_convolution(
    inputs: Tensor, weight: Tensor, before: Tensor, begins: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Convolve each channel with its own taps, over the token and those before it.

    Args:
        inputs: [B, N, C].
        weight: taps [C, W]; the last multiplies the token itself.
        before: the inputs [B, W - 1, C] of the tokens before, 0 where there are none.
        begins: whether a document begins at each token [B, N]; None if none does.

    Returns:
        [B, N, C], and the inputs [B, W - 1, C] for the tokens after.
    """
    length, taps = inputs.shape[1], weight.shape[1]
    window = torch.cat((before, inputs), dim=1)
    if begins is None:
        outputs = torch.nn.functional.conv1d(window.transpose(1, 2), weight.unsqueeze(1), groups=len(weight))
        return outputs.transpose(1, 2), window[:, length:]
    # Tokens since the last begin; before the first one, more than the taps reach.
    places = torch.arange(length, device=inputs.device)
    since = places - torch.where(begins, places, -taps).cummax(dim=1).values
    outputs = sum(
        window[:, taps - 1 - back :][:, :length] * weight[:, taps - 1 - back] * (since >= back).unsqueeze(-1)
        for back in range(taps)
    )
    reached = since[:, -1:] >= torch.arange(taps - 2, -1, -1, device=inputs.device)
    return outputs, window[:, length:] * reached.unsqueeze(-1)


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    state: Tensor,
    *,
    rate: Tensor | None = None,
    begins: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Linear attention with decay of a token slice, or the gated delta rule, in the type of the state.

    Args:
        query: [B, N, G, K]; H must be a multiple of G.
        key: [B, N, G, K].
        value: [B, N, H, V].
        log_decay: [B, N, H], at most 0; the logarithm of a_t.
        state: [B, H, K, V], before the first token.
        rate: [B, N, H], b_t of the delta rule; None for linear attention.
        begins: whether a document begins at each token [B, N]; None if none does.

    Returns:
        [B, N, H, V], and the state after the last token.
    """
    # b rows, n chunks, c and s tokens of a chunk, g heads of keys, r heads of values for each of them.
    length, heads_of_keys = value.shape[1], key.shape[2]

    def chunks(tensor: Tensor) -> Tensor:
        """[B, N, ...] to [b, n, c, ...]; tokens that fill the last chunk are 0, which changes no state."""
        size = min(CHUNK_TOKENS, length)
        padded = torch.nn.functional.pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, -length % size))
        return padded.unflatten(1, (-1, size))

    query, key = (chunks(each.to(state.dtype)) for each in (query, key))
    value, log_decay = (chunks(each.to(state.dtype)).unflatten(3, (heads_of_keys, -1)) for each in (value, log_decay))
    state = state.unflatten(1, (heads_of_keys, -1))
    total = log_decay.cumsum(2)  # G
    causal = torch.ones(total.shape[2], total.shape[2], dtype=torch.bool, device=total.device).tril()
    sees_state = in_last = torch.ones((), device=total.device)
    keeps_state = in_last.expand(total.shape[1], 1, 1, 1)
    if begins is not None:
        number = chunks(begins.long()).flatten(1, 2).cumsum(1).view(total.shape[:3])
        before = torch.cat((torch.zeros_like(number[:, :1, -1]), number[:, :-1, -1]), dim=1)
        causal = causal & (number.unsqueeze(-1) == number.unsqueeze(-2))[:, :, None, None]
        sees_state = (number == before.unsqueeze(-1))[..., None, None]
        in_last = (number == number[:, :, -1:])[..., None, None]
        keeps_state = (number[:, :, -1] == before).transpose(0, 1)[..., None, None]
    by_head = total.permute(0, 1, 3, 4, 2)
    passed = (by_head.unsqueeze(-1) - by_head.unsqueeze(-2)).masked_fill(~causal, -inf)
    # From a token to itself there is no decay, and no gradient: added and taken off, it would leave its rounding error.
    itself = torch.eye(total.shape[2], dtype=torch.bool, device=total.device)
    decay = passed.masked_fill(itself, 0.0).exp()  # b n g r c s
    from_state = total.exp() * sees_state
    to_last = total[:, :, -1:] - total[:, :, :-1]
    to_state = torch.nn.functional.pad(to_last, (0, 0, 0, 0, 0, 1)).exp() * in_last
    kept = total[:, :, -1].exp().transpose(0, 1) * keeps_state
    value, read = value.permute(0, 1, 3, 4, 2, 5), None
    if rate is not None:
        rate = chunks(rate.to(state.dtype)).unflatten(3, (heads_of_keys, -1)).permute(0, 1, 3, 4, 2).unsqueeze(-1)
        between = torch.einsum("bncgk,bnsgk->bngcs", key, key).unsqueeze(3) * decay * rate
        reading = torch.einsum("bncgk,bncgr->bngrck", key, from_state)
        solved = torch.linalg.solve_triangular(
            between.tril(-1), torch.cat((value, reading), dim=-1) * rate, upper=False, unitriangular=True
        )
        value, read = solved.split([value.shape[-1], key.shape[-1]], dim=-1)
    written = torch.einsum("bncgk,bncgr->bngrkc", key, to_state)
    states, values = [], []
    for number_of_chunk in range(total.shape[1]):
        states.append(state)
        new = value[:, number_of_chunk]
        values.append(new if read is None else new - read[:, number_of_chunk] @ state)
        state = kept[number_of_chunk][..., None, None] * state + written[:, number_of_chunk] @ values[-1]
    scores = torch.einsum("bncgk,bnsgk->bngcs", query, key).unsqueeze(3) * decay
    outputs = (scores @ torch.stack(values, dim=1)).permute(0, 1, 4, 2, 3, 5)
    outputs = outputs + torch.einsum("bncgk,bngrkv,bncgr->bncgrv", query, torch.stack(states, dim=1), from_state)
    return outputs.flatten(3, 4).flatten(1, 2)[:, :length], state.flatten(1, 2)
