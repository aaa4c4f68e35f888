"""The equivalence ladder of the GPT: token slices and stages change neither the loss nor any gradient.

Each setup trains one step through the trainer's own engine, and is compared with plain autograd in fp64 over all layers
on one process, whose attention is torch's. An error is the norm of a tensor's difference over the norm of the tensor.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from deepspeed_ext.runtime.attention.positional_dropout import DropoutPlace
from deepspeed_ext.runtime.state.counts import Counts
from megatron_terapipe.arguments import parse_arguments
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.config.layers import prediction_layers
from megatron_terapipe.data.loader import MicroBatch
from megatron_terapipe.inference import WholeModel
from megatron_terapipe.model.logits import Logits
from tests.distributed import results_by_setup
from tests.runtime.attention.masks import attention_keep_mask, keep_mask
from tests.training.gpt_runs import SEQ, VOCAB, Setup, Step, batches, gradients

TOLERANCE = {"fp64": 1e-12, "fp32": 1e-6, "bf16": 3e-2}
"""Of every gradient. bf16 has 8 bits, so each product is off by up to 2^-9 = 2e-3, and some ten of them add up."""
LOSS_TOLERANCE = {"fp64": 1e-12, "fp32": 1e-6, "bf16": 1e-2}

UNIFORM, UNEVEN, SINGLES = "--num-token-slices 4", "--token-slices 13,1,7,11", "--token-slices 1,1,1,1,1,27"
BALANCED = "--num-token-slices 3 --token-slices balanced"
GROUPED, UNTIED, GPIPE = "--num-key-value-heads 2", "--untie-embeddings-and-output-weights", "--pipeline-schedule gpipe"
PP2, PP4 = "--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 4"
ZERO, BF16 = "--zero-stage 1", "--bf16"
TP2, TP4, SP = "--tensor-model-parallel-size 2", "--tensor-model-parallel-size 4", "--sequence-parallel"
SEQ2, SEQ4 = "--context-parallel-size 2", "--context-parallel-size 4"
EVEN, EVEN4, EVEN8 = "--token-slices 14,2,6,10", "--token-slices 12,4,16", "--token-slices 8,16,8"
DROPOUT, PACKED = "--hidden-dropout 0.1 --attention-dropout 0.2", "--reset-position-ids --reset-attention-mask"
BY_DOCUMENTS = f"--num-token-slices 4 --token-slices balanced-by-documents --kv-channels 64 {PACKED}"
SELECTIVE, FULL, STAGE = (f"--recompute-granularity {mode}" for mode in ("selective", "full", "stage"))
OFFLOAD = f"{STAGE} --offload-token-slices"
LLAMA4 = (
    "--use-rotary-position-embeddings --normalization RMSNorm --swiglu --ffn-hidden-size 40 --disable-bias-linear"
    " --untie-embeddings-and-output-weights"
)
LLAMA = f"{LLAMA4} --num-key-value-heads 2"
HETEROGENEOUS = (
    '--heterogeneous-layers-config-path {"block_configs":[{"mlp":{"ffn_hidden_size":48}},{"attention":{"no_op":true}},'
    '{"attention":{"num_query_groups":2}},{"mlp":{"no_op":true}}]}'
)
MODEL_CHUNKS, ZERO_BUBBLE = "--num-layers-per-virtual-pipeline-stage 1", "--pipeline-schedule zero-bubble"
THERE_AND_BACK = (
    "--num-model-chunks 2 --model-chunk-placement v --num-token-slices 4"
    f" --pipeline-schedule {Path(__file__).parent / 'schedules' / 'there_and_back.csv'}"
)
PER_TOKEN = "--calculate-per-token-loss"
MTP = "--mtp-num-layers 2 --mtp-loss-scaling-factor 0.7"
VOCABULARY, LATENT = "--vocabulary-stages", "--latent-kept latent"
EP2, EP4 = "--expert-model-parallel-size 2", "--expert-model-parallel-size 4"
CLAMPED = "--activation-func-clamp-value 0.3"
FOUND = "--pipeline-schedule optimised --token-slices auto"
SETUPS = [
    Setup(1, UNIFORM, fp64=True),
    Setup(1, f"{UNEVEN} {GROUPED} {GPIPE}", fp64=True),
    Setup(1, UNEVEN),
    Setup(1, f"{UNIFORM} {ZERO} {UNTIED}"),
    Setup(1, f"{UNEVEN} {BF16}"),
    Setup(1, f"{UNIFORM} {BF16} {ZERO}"),
    Setup(2, PP2, fp64=True),
    Setup(2, f"{PP2} {UNEVEN} {UNTIED}", fp64=True, micro_batches=3),
    Setup(2, f"{PP2} {SINGLES} --ffn-hidden-size 48", fp64=True, micro_batches=1),
    Setup(2, f"{PP2} {UNIFORM} --stage-partition 0,1,4"),
    Setup(2, f"{PP2} {UNEVEN} {GPIPE} --stage-partition parameters"),
    Setup(2, f"{PP2} {UNEVEN} {ZERO} {GROUPED}"),
    Setup(2, f"{PP2} {UNEVEN} {BF16}"),
    Setup(2, UNEVEN, fp64=True),
    Setup(2, f"{UNIFORM} {ZERO}"),
    Setup(4, f"{PP4} {UNIFORM}", fp64=True, micro_batches=3),
    Setup(4, f"{PP4} {BALANCED} {GROUPED}", fp64=True, micro_batches=5),
    Setup(4, f"{PP4} {SINGLES} {GROUPED} {UNTIED}", micro_batches=1),
    Setup(4, f"{PP4} {UNIFORM} {GPIPE}"),
    Setup(4, f"{PP2} {UNEVEN} {ZERO}"),
    # The embedding alone on a stage, and the output layer on another.
    Setup(4, f"{PP4} {UNIFORM} --stage-partition 0,0,2,4,4 {GPIPE}", fp64=True, micro_batches=3),
    # Llama blocks, uneven layers, dropout, packed documents, recomputation.
    Setup(1, f"{UNEVEN} {LLAMA} {DROPOUT} {PACKED}", fp64=True),
    Setup(1, f"{UNIFORM} {LLAMA} {SELECTIVE} {DROPOUT}", fp64=True),
    Setup(1, f"{UNIFORM} {DROPOUT} {PACKED} --recompute-granularity full --recompute-num-layers 2", fp64=True),
    Setup(1, f"{UNEVEN} {LLAMA} {PACKED} {SELECTIVE}"),
    Setup(2, f"{PP2} {BALANCED} {HETEROGENEOUS} {SELECTIVE} {GPIPE}", fp64=True),
    Setup(1, f"{UNEVEN} {LLAMA} {DROPOUT} {BF16}"),
    Setup(2, f"{PP2} {UNEVEN} {LLAMA} {DROPOUT} {PACKED}", fp64=True, micro_batches=3),
    Setup(2, f"{PP2} {UNIFORM} {HETEROGENEOUS} {DROPOUT} {PACKED} {FULL} {GPIPE}", fp64=True),
    Setup(2, f"{UNEVEN} {DROPOUT} {PACKED} {SELECTIVE}", fp64=True),
    Setup(2, f"{PP2} {UNIFORM} {LLAMA} {PACKED} {ZERO}"),
    Setup(4, f"{PP4} {BALANCED} {LLAMA} {DROPOUT} {PACKED} {SELECTIVE} {ZERO_BUBBLE}", fp64=True, micro_batches=3),
    # Tensor parallelism.
    Setup(2, f"{TP2} --num-token-slices 1", fp64=True),
    Setup(2, f"{TP2} {UNEVEN} {UNTIED} {GROUPED}", fp64=True),
    Setup(2, f"{TP2} {UNEVEN} {LLAMA} {DROPOUT} {PACKED}", fp64=True),
    Setup(2, f"{TP2} {EVEN} {SP}", fp64=True),
    Setup(2, f"{TP2} {EVEN} {SP} {LLAMA} {DROPOUT} {PACKED} {SELECTIVE}", fp64=True),
    Setup(2, f"{TP2} {EVEN} {SP} {HETEROGENEOUS} {DROPOUT} {FULL}", fp64=True),
    Setup(2, f"{TP2} {UNEVEN}"),
    Setup(2, f"{TP2} {EVEN} {SP} {LLAMA} {ZERO}"),
    Setup(2, f"{TP2} {EVEN} {SP} {UNTIED} {BF16} {ZERO}"),
    Setup(4, f"{TP2} {PP2} {UNEVEN} {DROPOUT}", fp64=True, micro_batches=3),
    Setup(4, f"{TP2} {PP2} {EVEN} {SP} {LLAMA} {DROPOUT} {PACKED}", fp64=True),
    Setup(4, f"{TP2} {EVEN} {SP} {DROPOUT} {PACKED}", fp64=True),
    Setup(4, f"{TP4} {EVEN4} {SP} {LLAMA4} {DROPOUT}", fp64=True),
    Setup(4, f"{TP2} {PP2} {EVEN} {SP} {UNTIED}"),
    Setup(4, f"{TP2} {EVEN} {SP} {ZERO}"),
    # What sets families of models apart.
    Setup(1, f"{UNEVEN} {SELECTIVE}", fp64=True, family="gemma"),
    Setup(2, f"{PP2} {UNEVEN} {DROPOUT} {PACKED} {MTP}", fp64=True, family="neox", micro_batches=3),
    Setup(2, f"{TP2} {EVEN} {SP} {PACKED} {SELECTIVE}", fp64=True, family="qwen"),
    Setup(2, f"{TP2} {UNEVEN} {FULL}", fp64=True, family="olmo"),
    Setup(2, f"{TP2} {UNEVEN} {ZERO}", family="qwen"),
    Setup(2, f"{TP2} {UNEVEN} {DROPOUT} {SELECTIVE}", fp64=True, family="neox"),
    Setup(4, f"{TP2} {PP2} {EVEN} {SP} {DROPOUT} {PACKED}", fp64=True, family="gemma", micro_batches=3),
    Setup(4, f"{TP2} {PP2} {UNEVEN} {SELECTIVE} {MTP}", fp64=True, family="granite"),
    Setup(4, f"{TP2} {PP2} {EVEN} {SP} {ZERO_BUBBLE} {SELECTIVE}", fp64=True, family="gptj"),
    # A window that hides keys from every kernel but that of dropout; token slices shorter and longer than it.
    Setup(2, f"{PP2} {UNEVEN} {ZERO_BUBBLE} {PACKED}", fp64=True, family="mistral", micro_batches=3),
    Setup(2, f"{TP2} {EVEN} {SP} {FULL}", fp64=True, family="mistral", micro_batches=3),
    Setup(2, f"{PP2} {UNIFORM} {BF16} {ZERO}", family="mistral"),
    # States carried from token slice to token slice, some of them shorter than the taps of a convolution.
    Setup(1, f"{UNEVEN} {FULL} {DROPOUT} {PACKED}", fp64=True, family="hybrid"),
    Setup(2, f"{PP2} {UNEVEN} {STAGE}", fp64=True, family="hybrid", micro_batches=3),
    Setup(2, f"{PP2} {UNEVEN} {ZERO_BUBBLE} {SELECTIVE} {PACKED}", fp64=True, family="hybrid", micro_batches=3),
    Setup(4, f"{SEQ2} {TP2} {EVEN4} {SP} {PACKED}", fp64=True, family="hybrid"),
    # Every axis at once.
    Setup(8, f"{SEQ2} {TP2} {PP2} {EVEN4} {SP} {LLAMA} {DROPOUT} {PACKED} {SELECTIVE}", fp64=True),
    Setup(8, f"{TP2} {PP2} {UNEVEN} {UNTIED} {DROPOUT} {ZERO}"),
    # Model chunks, with more token slices than ranks and with fewer; weight gradients apart; schedules from elsewhere.
    Setup(1, f"{UNEVEN} {ZERO_BUBBLE} {MODEL_CHUNKS.replace('1', '4')} {DROPOUT}", fp64=True),
    Setup(2, f"{PP2} {UNIFORM} {MODEL_CHUNKS} {SELECTIVE}", fp64=True, micro_batches=5),
    Setup(2, f"{PP2} --num-token-slices 1 {MODEL_CHUNKS} {FULL} {UNTIED} {ZERO}", micro_batches=4),
    Setup(2, f"{PP2} {UNEVEN} --num-model-chunks 2 {GPIPE} {GROUPED}", fp64=True),
    Setup(2, f"{PP2} {UNEVEN} {ZERO_BUBBLE} {LLAMA} {DROPOUT} {PACKED} {SELECTIVE} {MTP}", fp64=True, micro_batches=3),
    Setup(2, f"{PP2} {UNIFORM} {ZERO_BUBBLE} {HETEROGENEOUS} {DROPOUT} {FULL}", fp64=True),
    Setup(2, f"{PP2} {UNEVEN} {ZERO_BUBBLE} {ZERO} {GROUPED}"),
    Setup(2, f"{PP2} {UNEVEN} {ZERO_BUBBLE} {BF16}"),
    Setup(2, f"{PP2} {UNEVEN} {ZERO_BUBBLE} {BF16} {ZERO} {SELECTIVE}", micro_batches=3),
    Setup(2, f"{PP2} {THERE_AND_BACK} {UNTIED} {ZERO}"),
    Setup(
        2,
        f"{PP2} {FOUND} --num-token-slices 5 --num-model-chunks 2 --model-chunk-placement v {LLAMA} {DROPOUT} {PACKED}"
        f" {MTP}",
        fp64=True,
        micro_batches=3,
    ),
    Setup(4, f"{TP2} {PP2} {FOUND} --num-token-slices 4 {SP} {SELECTIVE}"),
    Setup(4, f"{PP2} {UNEVEN} {MODEL_CHUNKS} {ZERO}"),
    Setup(4, f"{TP2} {PP2} {EVEN} {SP} {ZERO_BUBBLE} {LLAMA} {DROPOUT} {PACKED} {SELECTIVE}", fp64=True),
    Setup(4, f"{TP2} {PP2} {EVEN} {SP} {MODEL_CHUNKS} {DROPOUT} {FULL}", fp64=True, micro_batches=3),
    Setup(4, f"{TP2} {PP2} {SP} {THERE_AND_BACK} {DROPOUT} {PACKED} {SELECTIVE}", fp64=True),
    Setup(8, f"{TP2} {PP2} {EVEN} {SP} {ZERO_BUBBLE} {DROPOUT} {ZERO}"),
    # Each micro-batch cut by its documents: whatever passes between stages has other lengths each time.
    Setup(1, f"{BY_DOCUMENTS} {LLAMA} {SELECTIVE}", fp64=True, micro_batches=3),
    Setup(2, f"{PP2} {BY_DOCUMENTS} {DROPOUT} {PER_TOKEN} {ZERO_BUBBLE}", fp64=True, micro_batches=5),
    Setup(4, f"{TP2} {PP2} {BY_DOCUMENTS} {SP} {LLAMA} {DROPOUT} {MODEL_CHUNKS} {MTP}", fp64=True, micro_batches=3),
    Setup(4, f"{SEQ2} {PP2} {BY_DOCUMENTS} {OFFLOAD} {MODEL_CHUNKS}", fp64=True, micro_batches=3),
    # Recomputation of the first layers of each stage.
    Setup(1, f"{UNEVEN} {FULL} --recompute-method block --recompute-num-layers 2 {DROPOUT} {PACKED}", fp64=True),
    Setup(2, f"{PP2} {UNIFORM} {FULL} --recompute-method block {MODEL_CHUNKS} {PER_TOKEN}", fp64=True, micro_batches=3),
    Setup(2, f"{PP2} {BALANCED} {FULL} --recompute-method block {ZERO_BUBBLE} {LLAMA} {MTP}", fp64=True),
    # Recomputation of whole stages.
    Setup(1, f"{UNEVEN} {STAGE} {DROPOUT} {PACKED} {PER_TOKEN} {MTP}", fp64=True, family="gemma"),
    Setup(2, f"{PP2} {UNIFORM} {STAGE} {ZERO_BUBBLE} {LLAMA} {ZERO}", micro_batches=3),
    Setup(2, f"{PP2} {UNEVEN} {OFFLOAD} {MODEL_CHUNKS} {UNTIED}", fp64=True, family="mistral", micro_batches=3),
    Setup(2, f"{TP2} {UNIFORM} {SP} {STAGE} {GPIPE} {BF16} {GROUPED}"),
    # The mean over all tokens of the batch, not over micro-batches.
    Setup(1, f"{UNEVEN} {PER_TOKEN} {PACKED}", fp64=True, micro_batches=3),
    Setup(2, f"{PP2} {UNEVEN} {PER_TOKEN} {ZERO_BUBBLE}", fp64=True, micro_batches=3),
    Setup(2, f"{UNIFORM} {PER_TOKEN} {ZERO}", micro_batches=3),
    Setup(4, f"{TP2} {EVEN} {SP} {PER_TOKEN} {LLAMA}", fp64=True),
    # Sequence-parallel ranks, with every other axis; as many key heads as ranks, more, and fewer.
    Setup(2, f"{SEQ2} {EVEN}", fp64=True),
    Setup(2, f"{SEQ2} {EVEN} {LLAMA} {DROPOUT} {PACKED} {SELECTIVE}", fp64=True, micro_batches=3),
    Setup(2, f"{SEQ2} {BALANCED} {STAGE} {UNTIED} {ZERO}"),
    Setup(2, f"{SEQ2} --num-token-slices 1 {PACKED}", fp64=True, family="gemma"),
    Setup(2, f"{SEQ2} {UNIFORM} {BF16} {ZERO}"),
    Setup(4, f"{SEQ2} {PP2} {EVEN} {OFFLOAD} {ZERO_BUBBLE} {PACKED}", fp64=True, family="mistral"),
    Setup(4, f"{SEQ2} {TP2} {EVEN4} {SP} {LLAMA} {DROPOUT} {PACKED} {SELECTIVE}", fp64=True),
    Setup(4, f"{SEQ2} {TP2} {EVEN} {PER_TOKEN} {UNTIED}", fp64=True, micro_batches=3),
    Setup(4, f"{SEQ2} {UNIFORM} {PER_TOKEN} {DROPOUT} {ZERO}"),
    Setup(4, f"{SEQ4} {EVEN4} {LLAMA} {DROPOUT} {PACKED} {FULL}", fp64=True),
    Setup(4, f"{SEQ4} {EVEN4} {OFFLOAD} {ZERO_BUBBLE} {DROPOUT} {PACKED}", fp64=True, family="mistral"),
    Setup(8, f"{SEQ4} {TP2} {EVEN8} {SP} --num-attention-heads 8 {UNTIED} {DROPOUT} {ZERO}"),
    Setup(8, f"{SEQ4} {PP2} {EVEN8} {LLAMA} {PACKED} {SELECTIVE}", fp64=True, micro_batches=3),
    # The output layer in parts, on stages of their own.
    Setup(2, f"{PP2} {UNIFORM} {VOCABULARY} {UNTIED} {GPIPE} {FULL} {PER_TOKEN}", fp64=True),
    Setup(4, f"{PP4} {UNIFORM} {VOCABULARY} {UNTIED} --pipeline-schedule interleaved {ZERO}", micro_batches=3),
    Setup(4, f"{TP2} {PP2} {EVEN} {SP} {VOCABULARY} {OFFLOAD}", fp64=True, family="gemma", micro_batches=3),
    Setup(4, f"{SEQ2} {PP2} {EVEN} {VOCABULARY} {LLAMA} {DROPOUT} {PACKED} {SELECTIVE}", fp64=True, micro_batches=3),
    # Keys and values from latents, beside experts; either of both is kept for later token slices.
    Setup(1, f"{UNEVEN} {DROPOUT} {PACKED} {LATENT} {MTP}", fp64=True, family="deepseek"),
    Setup(2, f"{PP2} {UNEVEN} {ZERO_BUBBLE} {SELECTIVE} {PACKED} {LATENT} {MTP}", fp64=True, family="deepseek"),
    Setup(2, f"{EP2} {TP2} {EVEN} {SP} {FULL} {MTP}", fp64=True, family="deepseek"),
    Setup(4, f"{TP2} {PP2} {EVEN} {SP} {ZERO_BUBBLE} {LATENT} {MTP}", fp64=True, family="deepseek", micro_batches=3),
    Setup(4, f"{SEQ2} {TP2} {EVEN4} {SP} {OFFLOAD} {LATENT} {MTP}", fp64=True, family="deepseek"),
    Setup(4, f"{SEQ2} {PP2} {EVEN} {PACKED} {MODEL_CHUNKS} {ZERO} {MTP}", family="deepseek"),
    Setup(2, f"{PP2} {UNIFORM} {BF16} {ZERO} {LATENT} {MTP}", family="deepseek"),
    # Sinks in attention, beside windows; gates with clamps and an offset, routers with biases. Rounding in bf16 would
    # move numbers over a clamp, where gradients jump.
    Setup(1, f"{UNEVEN} {DROPOUT} {PACKED} {CLAMPED}", fp64=True, family="gpt_oss"),
    Setup(
        2, f"{PP2} {UNEVEN} {ZERO_BUBBLE} {SELECTIVE} {PACKED} {CLAMPED}", fp64=True, family="gpt_oss", micro_batches=3
    ),
    Setup(2, f"{EP2} {TP2} {EVEN} {SP} {FULL} {CLAMPED}", fp64=True, family="gpt_oss"),
    Setup(4, f"{SEQ2} {TP2} {EVEN4} {SP} {PACKED} {DROPOUT} {CLAMPED}", fp64=True, family="gpt_oss"),
    Setup(4, f"{SEQ2} {PP2} {EVEN} {OFFLOAD} {MODEL_CHUNKS} {CLAMPED}", fp64=True, family="gpt_oss", micro_batches=3),
    Setup(4, f"{EP2} {PP2} {UNEVEN} {STAGE} {ZERO} {CLAMPED}", family="gpt_oss"),
    Setup(2, f"{PP2} {UNIFORM} {BF16} {ZERO}", family="gpt_oss"),
    # Experts, on one rank and on ranks of every other axis.
    Setup(1, f"{UNEVEN} {ZERO_BUBBLE} {DROPOUT} {SELECTIVE}", fp64=True, family="mixtral"),
    Setup(2, f"{TP2} {EVEN} {SP} {FULL}", fp64=True, family="experts"),
    Setup(2, f"{EP2} {UNEVEN} {DROPOUT} {PACKED}", fp64=True, family="mixtral", micro_batches=3),
    Setup(2, f"{EP2} {TP2} {EVEN} {SP} {SELECTIVE}", fp64=True, family="experts"),
    Setup(2, f"{EP2} {UNIFORM} {BF16} {ZERO}", family="experts"),
    Setup(4, f"{EP2} {PP2} {UNEVEN} {ZERO_BUBBLE} {STAGE}", fp64=True, family="mixtral", micro_batches=3),
    Setup(4, f"{EP4} {SEQ2} {TP2} {EVEN4} {SP} {FULL}", fp64=True, family="mixtral"),
    Setup(2, f"{EP2} {TP2} {EVEN} {SP} {ZERO}", family="mixtral"),
    Setup(4, f"{EP2} {TP4} {EVEN4} {SP} {BF16}", family="experts"),
    Setup(4, f"{EP4} {UNEVEN} {PER_TOKEN} --moe-token-dispatcher-type allgather", fp64=True, family="experts"),
    Setup(8, f"{EP4} {TP2} {PP2} {EVEN} {SP} {MODEL_CHUNKS} {DROPOUT}", fp64=True, family="mixtral", micro_batches=3),
]


@dataclass(frozen=True)
class WholePast:
    """State of a sequence for the reference: the whole sequence at once, attention written out under plain autograd."""

    seed: int
    sequences: tuple[int, ...]
    starts: tuple[tuple[int, ...], ...]
    layer: int = 0
    prefix_len: int = 0
    positions_restart: bool = True

    def past(self, layer: int, token_slice: int) -> "WholePast":
        return replace(self, layer=layer)

    def positions(self, length: int, device: torch.device | None = None) -> Tensor:
        return torch.stack([_positions(row, length) for row in self.starts])

    def cached_for_slice(self, name: str, make: Callable[[], Any]) -> Any:
        return make()

    def cached_for_recompute(self, name: str, make: Callable[[], Any]) -> Any:
        return make()

    def carried(self, name: str, initial: Tensor) -> Tensor:
        return initial

    def carry(self, name: str, state: Tensor) -> None:
        pass

    def begins(self, device: torch.device) -> Tensor | None:
        one_each = all(len(row) == 1 for row in self.starts)
        return None if one_each else self.positions(SEQ) == 0

    def all_tokens(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors

    def own_tokens(self, output: Tensor) -> Tensor:
        return output

    def own_heads(self, weight: Tensor) -> Tensor:
        return weight

    def counts(self, layer: Any, num_groups: int, device: torch.device) -> Counts:
        return Counts(layer, num_groups, device)

    def room(self, like: Tensor, window: int | None) -> None:
        return None

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        sinks: Tensor | None = None,
        scale: float,
        dropout: float,
        first_head: int,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        length, repeats = query.shape[1], query.shape[2] // key.shape[2]
        key, value = (each.repeat_interleave(repeats, dim=2) for each in (key, value))
        scores = torch.einsum("bqhd,bkhd->bhqk", query, key) * scale
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        keys = torch.arange(length)
        begins = keys - self.positions(length)
        if window is not None:
            begins = torch.maximum(begins, keys - window + 1)
        seen = (keys <= keys[:, None]) & (keys >= begins[:, :, None])
        scores = scores.masked_fill(~seen[:, None], float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, None, None].expand(*scores.shape[:3], 1)), dim=-1)
        weights = scores.softmax(-1)[..., :length]
        if dropout:
            place = DropoutPlace.at(self.seed, self.layer, 0, self.sequences, 0)
            rows = place.rows(length, query.device)
            weights = weights * attention_keep_mask(rows, 0, query.shape[2], 0, length, dropout) / (1 - dropout)
        return torch.einsum("bhqk,bkhd->bqhd", weights, value)

    def attend_latent(
        self, query: Tensor, latent: Tensor, weight: Tensor, *, keep_latents: bool, **more: Any
    ) -> Tensor:
        rank = weight.shape[-1]
        key_size = query.shape[-1] - latent.shape[-1] + rank
        expanded = torch.einsum("blc,hrc->blhr", latent[..., :rank], weight)
        rotated = latent[:, :, None, rank:].repeat(1, 1, len(weight), 1)
        key = torch.cat((expanded[..., :key_size], rotated), dim=-1)
        return self.attend(query, key, expanded[..., key_size:], **more)

    def dropout(
        self, inputs: Tensor, probability: float, *, site: int, first_token: int, residual: Tensor | None
    ) -> Tensor:
        rows = DropoutPlace.at(self.seed, self.layer, site, self.sequences, 0).rows(inputs.shape[1], inputs.device)
        dropped = inputs * keep_mask(rows, 0, inputs.shape[2], probability) / (1 - probability)
        return dropped if residual is None else residual + dropped


def _positions(starts: tuple[int, ...], length: int) -> Tensor:
    return torch.tensor([at - max(start for start in starts if start <= at) for at in range(length)])


def mean_loss(logits: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
    each = F.cross_entropy(logits[..., :VOCAB].flatten(0, 1), labels.flatten(), reduction="none")
    return (each * counts.flatten()).sum() / counts.sum().clamp(min=1)


def further_predictions(
    model: WholeModel, config: ModelConfig, output: Logits, batch: MicroBatch, past: WholePast
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Of each depth the logits, targets, and whether these count, of the tokens that have a target in the row."""
    hidden, words, ids = output.hidden, model.layers["0"], torch.cat((batch.tokens, batch.labels[:, -1:]), dim=1)
    documents = torch.stack([document_numbers(row) for row in batch.document_starts])
    for depth in range(1, config.mtp_num_layers + 1):
        index = prediction_layers(config.num_layers, config.mtp_num_layers)[depth - 1]
        layer, place = model.layers[str(index)], past.past(index, 0)
        # Beyond the row any token will do.
        read = torch.cat((ids[:, depth : depth + SEQ], ids[:, : depth - 1]), dim=1)
        embedded = words.weight[read] * config.embedding_multiplier
        if config.hidden_dropout:
            embedded = place.dropout(embedded, config.hidden_dropout, site=1, first_token=0, residual=None)
        joined = torch.cat((layer.words_norm(embedded), layer.hidden_norm(hidden)), dim=-1)
        hidden = layer.final_norm(layer.block(joined @ layer.projection.T, place))
        logits = output.of(hidden).compute()[:, : SEQ - depth]
        together = documents[:, depth:] == documents[:, : SEQ - depth]
        yield logits, ids[:, depth + 1 :], batch.loss_mask[:, depth:] * together


def document_numbers(starts: tuple[int, ...]) -> Tensor:
    return torch.tensor([sum(start <= at for start in starts) for at in range(SEQ)])


def expected_gradients(setup: Setup) -> tuple[float, dict[str, np.ndarray]]:
    config = parse_arguments(setup.argv()).model
    model = WholeModel(config).double()
    per_token = "--calculate-per-token-loss" in setup.flags
    losses, counted = [], []
    for rank in range(setup.data_parallel_size):
        for number, part in enumerate(batches(setup, rank)):
            first = (number * setup.data_parallel_size + rank) * len(part.tokens)
            past = WholePast(1234, (first, first + 1), part.document_starts)
            output = model.output(part.tokens, past)
            counted.append(part.loss_mask.sum())
            loss = mean_loss(output.compute(), part.labels, part.loss_mask)
            for prediction in further_predictions(model, config, output, part, past):
                factor = config.mtp_loss_scaling_factor / config.mtp_num_layers
                loss = loss + factor * mean_loss(*prediction)
            losses.append(loss * counted[-1] if per_token else loss)
    loss = torch.stack(losses).sum() / sum(counted) if per_token else torch.stack(losses).mean()
    loss.backward()
    return loss.item(), {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}


def axes(setup: Setup) -> dict[str, object]:
    """The value of a setup on each axis: its flags, the cut of the sequence, and the launch."""
    given: dict[str, str] = {}
    for word in setup.flags.split():
        if word.startswith("--"):
            flag = word
        given[flag] = given.get(flag, "") + word.removeprefix(flag)
    cut = given.pop("--token-slices", "even" if given.pop("--num-token-slices", "1") != "1" else "whole")
    pipeline = int(given.get("--pipeline-model-parallel-size", 1))
    sequence = given.get("--context-parallel-size", "1")
    return {flag: given.get(flag) for flag in FLAGS} | {
        "cut": "uneven" if cut[0].isdigit() else cut,
        "data": setup.data_parallel_size,
        "fewer micro-batches than stages": setup.micro_batches < pipeline,
        "family": setup.family,
        "precision": setup.dtype,
        "sequence-parallel ranks": sequence != "1",
    }


Trained = Callable[[Setup], tuple[Step, ...]]


OTHERWISE_COUNTED = {"--num-token-slices", "--context-parallel-size", "--num-attention-heads"}
FLAGS = sorted(set(re.findall(r"--[a-z-]+", " ".join(setup.flags for setup in SETUPS))) - OTHERWISE_COUNTED)


@pytest.fixture(scope="module")
def trained(setups: list[Setup]) -> Trained:
    """Results of all ranks of a setup."""
    return results_by_setup(gradients, setups)


@pytest.mark.setups(SETUPS, axes)
def test_loss_and_every_gradient_equal_plain_autograd(setup: Setup, trained: Trained) -> None:
    expected_loss, expected = expected_gradients(setup)
    seen = set()
    expected_norm = np.sqrt(sum(np.square(gradient).sum() for gradient in expected.values()))
    for rank, (loss, norm, found) in enumerate(trained(setup)):
        assert loss == pytest.approx(expected_loss, rel=LOSS_TOLERANCE[setup.dtype])
        assert norm == pytest.approx(expected_norm, rel=max(1e-6, LOSS_TOLERANCE[setup.dtype]))
        for (name, share, cut), gradient in found.items():
            seen.add(name)
            wanted = expected[name]
            if cut is not None:
                wanted = np.split(wanted, wanted.shape[cut] // gradient.shape[cut], axis=cut)[share]
            error, size_of_it = (np.linalg.norm(each) for each in (gradient.astype(np.float64) - wanted, wanted))
            # A part of the padded vocabulary may hold padding alone, and then no gradient at all.
            assert error <= TOLERANCE[setup.dtype] * size_of_it, (
                f"{name} on rank {rank}: {error:.1e} of {size_of_it:.1e}"
            )
    assert seen == expected.keys()


def test_the_loss_mask_matters_to_the_reference() -> None:
    """The masks are uneven enough that averaging token slices without weights would be seen at any tolerance."""
    setup = SETUPS[0]
    for batch in batches(setup, 0):
        per_token_slice = batch.loss_mask.reshape(2, 4, 8).sum((0, 2))
        assert per_token_slice.max() > 2 * per_token_slice.min()


def test_micro_batches_of_the_ladder_are_cut_differently_by_their_documents() -> None:
    (setup,) = [each for each in SETUPS if each.flags.startswith(f"{PP2} {BY_DOCUMENTS}")]
    cuts = parse_arguments(setup.argv()).document_cuts()
    assert cuts is not None
    found = {cuts.cut(batch.document_starts).lengths for batch in batches(setup, 0)}
    assert len(found) >= 3


@pytest.mark.parametrize(
    ("setup", "blocks"),
    [(SETUPS[6], [2, 2]), (SETUPS[9], [1, 3]), (SETUPS[15], [1, 1, 1, 1]), (SETUPS[20], [0, 2, 2, 0])],
    ids=["uniform", "given", "four_stages", "ends_alone"],
)
def test_each_stage_holds_the_layers_it_was_dealt(setup: Setup, blocks: list[int], trained: Trained) -> None:
    """Layers 0 and 1 are the embeddings, the blocks follow, then the final norm, and the tied embedding again."""
    ends = [2 + sum(blocks[: stage + 1]) for stage in range(len(blocks))]
    starts = [0, *ends[:-1]]
    for stage, (_, _, found) in enumerate(trained(setup)):
        expected = set(range(starts[stage], ends[stage]))
        expected |= {6, 0} if stage == len(blocks) - 1 else set()
        assert {int(name.split(".")[1]) for name, *_ in found} == expected
