"""Functions for ranks of tests: a prepared run of a small GPT, and the gradients of one step of its engine."""

import re
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator

from megatron_terapipe.arguments import parse_arguments
from megatron_terapipe.data.loader import MicroBatch
from megatron_terapipe.model.gpt import vocabulary_parts
from megatron_terapipe.planning import with_dispatcher, with_found_token_slices
from megatron_terapipe.training import build_engine as trainer_engine
from megatron_terapipe.training.run import Run
from tests.training.prepared import prepared_run

SEQ, VOCAB, NUM_LAYERS = 32, 257, 4
# Weights large enough that attention is not uniform; larger ones, and fp32 itself rounds a gradient's 6th digit away.
FLAGS = (
    f"--num-layers {NUM_LAYERS} --hidden-size 32 --num-attention-heads 4 --seq-length {SEQ} --vocab-size {VOCAB}"
    " --init-method-std 0.05 --zero-stage 0 --micro-batch-size 2 --train-iters 10 --lr 1e-2 --clip-grad 0"
    " --data-path unread"
)
LLAMA = (
    "--use-rotary-position-embeddings --normalization RMSNorm --swiglu --ffn-hidden-size 40 --disable-bias-linear"
    " --untie-embeddings-and-output-weights --num-key-value-heads 2"
)
WINDOWS = "--sliding-window 9 --window-attn-skip-freq 2"
FAMILIES = {
    "": "",
    "neox": "--position-embedding-type rope --rotary-percent 0.5 --parallel-residual --output-layer-init-std 0.08",
    "gptj": (
        "--position-embedding-type rope --rotary-percent 0.75 --rotary-interleaved --parallel-residual"
        " --shared-block-norm --disable-bias-linear --add-mlp-bias --apply-layernorm-1p --qk-layernorm"
    ),
    "qwen": (
        f"{LLAMA} --qk-layernorm --add-qkv-bias --use-rope-scaling --rotary-scaling-factor 4 --rotary-original-length 8"
        " --no-rope-freq 2 --attention-output-gate"
    ),
    "gemma": (
        f"{LLAMA.replace('swiglu', 'activation geglu')} {WINDOWS} --rotary-base-local 100 --norm-placement both"
        " --apply-layernorm-1p --softmax-scale 0.5 --attention-softcap 1.5 --logit-softcap 0.5"
        " --embedding-multiplier 5.5"
    ),
    "mistral": f"{LLAMA} --sliding-window 6",
    "olmo": (
        f"{LLAMA} --norm-placement post --qk-norm all-heads --rotary-scaling yarn --rotary-scaling-factor 4"
        " --rotary-original-length 8 --rotary-beta-fast 1.5 --rotary-beta-slow 0.3"
    ),
    "granite": (
        f"{LLAMA.replace('swiglu', 'activation geglu-exact')} --add-attention-bias --residual-multiplier 0.3"
        " --embedding-multiplier 12 --logit-multiplier 0.25 --rotary-scaling-factor 2 --embedding-init-method-std 0.02"
    ),
    "mixtral": f"{LLAMA} --num-experts 4 --moe-token-dispatcher-type alltoall",
    # Every token goes to all experts, so that no rounding changes a choice.
    "experts": (
        "--num-experts 4 --moe-router-topk 4 --moe-router-score-function sigmoid --moe-ffn-hidden-size 24"
        " --moe-shared-expert-intermediate-size 16 --moe-layer-freq 2 --moe-shared-expert-gate"
    ),
    "deepseek": (
        f"{LLAMA.replace(' --num-key-value-heads 2', '')} --multi-latent-attention --qk-layernorm --q-lora-rank 10"
        " --kv-lora-rank 6 --qk-head-dim 5 --qk-pos-emb-head-dim 4 --v-head-dim 7 --rotary-scaling-factor 4"
        " --rotary-original-length 8 --mscale 0.7 --mscale-all-dim 1 --rotary-interleaved"
        " --num-experts 4 --moe-router-topk 4 --moe-layer-freq 2"
    ),
    "gpt_oss": (
        f"{LLAMA.replace('swiglu', 'quick-geglu').replace(' --disable-bias-linear', '')} --softmax-type learnable"
        " --glu-linear-offset 1 --sliding-window 6 --window-attn-skip-freq 2"
        " --rotary-scaling yarn --rotary-scaling-factor 4 --rotary-original-length 8 --rotary-beta-fast 1.5"
        " --rotary-beta-slow 0.3 --rotary-unrounded-ramp --num-experts 4 --moe-router-topk 4"
        " --moe-layer-freq 2"
    ),
    # One part a layer, and one of each kind.
    "hybrid": (
        "--hybrid-layer-pattern MG*- --mamba-num-heads 8 --mamba-head-dim 4 --mamba-state-dim 6 --mamba-num-groups 4"
        " --linear-num-key-heads 4 --linear-num-value-heads 8 --linear-key-head-dim 6 --linear-value-head-dim 5"
        " --linear-conv-kernel-dim 3 --attention-output-gate"
    ),
}
"""Flags of well-known families of models, by name."""
RANKS_OF_A_REPLICA = r"--(?:tensor-model|pipeline-model|context)-parallel-size (\d+)"
"""Factors of the number of ranks that one replica takes, in flags."""
LONG_STEP = 2.0**20
"""A learning rate beside which a weight is nothing: (before - after) / LONG_STEP is the gradient to the last digits."""


Key = tuple[str, int, int | None]
"""Name of a parameter in `WholeModel`; number of this rank's part of it; the dimension that is cut, if any."""

Step = tuple[float, float, dict[Key, np.ndarray]]
"""Loss, norm of the gradient over the whole model, and gradients."""


@dataclass(frozen=True)
class Setup:
    """One way to train the small GPT: flags of the trainer, and a family. Its text form is the id of its tests."""

    world_size: int = 1
    flags: str = ""
    micro_batches: int = 2
    fp64: bool = False
    family: str = ""

    def __str__(self) -> str:
        flags = self.flags.replace("--", "").replace("-model-parallel-size", "")
        words = [Path(word).stem if word.startswith("/") else word for word in flags.split()]
        ends = [word for word in (self.family, "fp64" * self.fp64) if word]
        return "_".join([f"ranks{self.world_size}", f"m{self.micro_batches}", *words, *ends])

    @property
    def dtype(self) -> str:
        return "fp64" if self.fp64 else "bf16" if "--bf16" in self.flags else "fp32"

    @property
    def data_parallel_size(self) -> int:
        return self.world_size // prod(int(size) for size in re.findall(RANKS_OF_A_REPLICA, self.flags))

    def argv(self) -> list[str]:
        return f"{FLAGS} {self.flags} {FAMILIES[self.family]}".split()


class RecordingSGD(torch.optim.SGD):
    """Keeps the gradients that a step is about to use."""

    def step(self, closure: Any = None) -> None:
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self.seen = {each: each.grad.clone() for each in parameters if each.grad is not None}
        super().step(closure)


def run_of(setup: Setup) -> Run:
    """The setup, prepared but for its data: tests feed micro-batches of their own."""
    global_batch_size = 2 * setup.micro_batches * setup.data_parallel_size
    config = parse_arguments([*setup.argv(), "--global-batch-size", str(global_batch_size)])
    config = with_found_token_slices(config, setup.data_parallel_size)
    return prepared_run(with_dispatcher(config, setup.data_parallel_size))


def batches(setup: Setup, data_rank: int) -> list[MicroBatch]:
    """Micro-batches of a data-parallel rank; the number of tokens in the loss mask differs between token slices."""
    generator = torch.Generator().manual_seed(data_rank)
    made = []
    for number in range(setup.micro_batches):
        samples = torch.randint(0, VOCAB, (2, SEQ + 1), generator=generator)
        likelihood = torch.linspace(0.1, 1.0, SEQ)
        mask = (torch.rand(2, SEQ, generator=generator) < likelihood).to(torch.float64 if setup.fp64 else torch.float32)
        if number == 0:
            mask[:, :9] = 0  # whole token slices without loss
        starts = documents_of(setup, number)
        made.append(MicroBatch(tokens=samples[:, :-1], labels=samples[:, 1:], loss_mask=mask, document_starts=starts))
    return made


def documents_of(setup: Setup, micro_batch: int) -> tuple[tuple[int, ...], ...]:
    """Starts of the documents in both rows; long ones first, last or nowhere, where the cut depends on them."""
    if "--reset" not in setup.flags:
        return ((0,), (0,))
    if "by-documents" not in setup.flags:
        return ((0, 5, 6, 17), (0, 20 + micro_batch))
    long_last, long_first, short = (0, 2, 3, 6, 8), (0, 22, 25, 27, 30), (0, 3, 7, 9, 14, 17, 20, 24, 29)
    return ((long_last,) * 2, (long_first,) * 2, (short,) * 2, (long_first, long_last))[micro_batch % 4]


def gradients(setup: Setup) -> Step:
    """Train one step: its loss, the norm of the gradient, and that of each parameter, under its name in `WholeModel`.

    Of a parameter that ranks share, the key has the part and its dimension: `(name, rank, dimension)`.
    """
    kept_in_pieces = "--zero-stage 1" in setup.flags or setup.dtype == "bf16"

    def optimizer(_: object, parameters: Any) -> RecordingSGD:
        return RecordingSGD([parameter for _, parameter in parameters], lr=LONG_STEP if kept_in_pieces else 1.0)

    run = run_of(setup)
    with patch.object(trainer_engine, "build_optimizer", optimizer):
        engine = trainer_engine.build_engine(run)
    if setup.fp64:
        # DeepSpeed refuses fp64 weights when it makes an engine, and to reduce them, but nothing in it minds them.
        get_accelerator().supported_dtypes = lambda: [torch.float64, torch.float32, torch.bfloat16, torch.float16]
        engine.communication_data_type = torch.float64
        engine.module.double()
    before = _weights(engine)
    data_rank = run.layout.coordinate(run.launch.rank).data
    loss = engine.train_batch(iter(batches(setup, data_rank))).sum().item()
    norm = float(engine.get_global_grad_norm())
    if kept_in_pieces:
        after = _weights(engine)
        return loss, norm, {name: (before[name] - after[name]) / LONG_STEP for name in before}
    seen = engine.optimizer.seen
    return (
        loss,
        norm,
        {_key(engine, name, each): seen[each].cpu().numpy() for name, each in engine.module.named_parameters()},
    )


def _weights(engine: Any) -> dict[Key, np.ndarray]:
    named = engine.module.named_parameters()
    return {_key(engine, name, parameter): parameter.detach().double().cpu().numpy() for name, parameter in named}


def _key(engine: Any, name: str, parameter: torch.nn.Parameter) -> Key:
    number, _, rest = name.replace("tied_modules.embedding", "0").partition(".")
    cut = getattr(parameter, "partition_dim", None)
    rank, size = engine.grid.get_slice_parallel_rank(), engine.grid.get_slice_parallel_world_size()
    if getattr(parameter, "expert_parallel", False):
        rank = engine.module.expert_ranks.rank
    layer, parts = int(number), vocabulary_parts(engine.module._layer_specs)
    layer = parts[0] if layer in parts else layer
    return f"layers.{layer}.{rest}", (int(number) - layer) * size + rank, cut
