"""megatron-core's layers in token slices, on several ranks, train as its `GPTModel` in one piece on one process."""

import warnings
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepspeed_ext.plan.layout import ParallelLayout
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime import executor
from deepspeed_ext.runtime.attention.documents import Documents
from deepspeed_ext.runtime.gradients.weight_gradients import compute
from deepspeed_ext.runtime.initialize import initialize
from deepspeed_ext.runtime.micro_batch import TokenSliceBatch
from deepspeed_ext.runtime.module import TokenSlicePipelineModule
from deepspeed_ext.runtime.topology import ExpertParallelRanks, SequenceParallelRanks, own_group
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.model.gpt import ModelRanks
from megatron_terapipe.model.tensor_parallel import TensorParallelRanks
from tests.checkpoint.megatron_files import MICRO, MODELS, ROWS, SEQ, Case, on_ranks, parallel, samples
from tests.distributed import results_by_setup

pytest.importorskip("megatron")

UPDATES, WORDS = 5, 120
WHOLE, UNEVEN, EVEN = (SEQ,), (5, 1, 7, 3), (6, 2, 4, 4)


@dataclass(frozen=True)
class Setup:
    """A run of a model in token slices."""

    model: str
    lengths: tuple[int, ...] = UNEVEN
    stages: int = 1
    tensor: int = 1
    sequence_parallel: bool = False
    schedule: str = "1f1b"
    recomputed: int = 0
    updates: int = UPDATES

    @property
    def world_size(self) -> int:
        return self.stages * self.tensor


ON_ONE_RANK = {
    "gpt": (Setup("gpt", WHOLE), Setup("gpt")),
    "llama": (Setup("llama", recomputed=1),),
    "experts": (),
    "latent": (Setup("latent"),),
}
ON_TWO_RANKS = [
    Setup("gpt", stages=2, schedule="zero-bubble"),
    Setup("llama", stages=2, recomputed=2),
    Setup("experts", stages=2),
    Setup("gpt", tensor=2),
    Setup("llama", WHOLE, tensor=2),
    Setup("experts", EVEN, tensor=2, sequence_parallel=True, recomputed=1),
]
MASKED = (
    Setup("masked", WHOLE, stages=2, updates=2),
    Setup("masked", EVEN, tensor=2, sequence_parallel=True, recomputed=1, updates=2),
)
"""Dropout and packed documents, which megatron-core computes in another way."""


def test_they_train_as_in_one_piece() -> None:
    theirs = on_ranks(on_one_rank, {Path(model): Case(MODELS["A"], "torch") for model in ON_ONE_RANK})
    on_two = results_by_setup(in_token_slices, [*ON_TWO_RANKS, *MASKED])
    for model, setups in ON_ONE_RANK.items():
        expected, *found = theirs[Path(model)]
        runs = [
            *zip(setups, found, strict=True),
            *((each, on_two(each)[0]) for each in ON_TWO_RANKS if each.model == model),
        ]
        for setup, (losses, norms) in runs:
            assert losses == pytest.approx(expected[0], rel=1e-6), setup
            assert norms == pytest.approx(expected[1], rel=1e-6), setup
    (plain, *_), (cut, *_) = map(on_two, MASKED)
    assert cut[0] == pytest.approx(plain[0], rel=1e-6)
    assert cut[1] == pytest.approx(plain[1], rel=1e-6)


Found = tuple[list[float], list[float]]
"""Losses and norms of gradients of each update."""


def on_one_rank(model: Path, case: Case) -> list[Found]:
    """Train megatron-core's model in one piece, then the setups of one rank."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import ModuleSpec, multi_latent_attention

    multi_latent_attention.HAVE_TE = False  # As release 0.16 should set it without Transformer Engine.
    arguments, settings = model_of(model.name)
    if model.name == "latent":
        # megatron-core's own core attention has keys as wide as values.
        arguments[1].submodules.self_attention.submodules.core_attention = ModuleSpec(PlainAttention)
    parallel_state.destroy_model_parallel()
    with parallel(case):
        whole = GPTModel(*arguments, **settings)
        fill(whole.named_parameters(), TensorParallelRanks())
        optimizer, losses, norms = adam(whole.parameters()), [], []
        for step in range(UPDATES):
            rows = samples(step)
            positions = torch.arange(SEQ).expand(len(rows), -1)
            loss = whole(rows[:, :-1], positions, None, labels=rows[:, 1:]).mean()
            optimizer.zero_grad()
            loss.backward()
            losses.append(loss.item())
            norms.append(nn.utils.clip_grad_norm_(whole.parameters(), 1.0).item())
            optimizer.step()
    return [(losses, norms), *map(in_token_slices, ON_ONE_RANK[model.name])]


class PlainAttention(nn.Module):
    """Causal attention with keys wider than values."""

    def __init__(self, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, *query_key_value_mask: Tensor, **_: Any) -> Tensor:
        query, key, value = (each.permute(1, 2, 0, 3) for each in query_key_value_mask[:3])
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scale)
        return attended.permute(2, 0, 1, 3).flatten(2)


def model_of(name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of `GPTModel`."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    sizes = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "use_cpu_initialization": True}
    llama = {
        **{"normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": F.silu, "ffn_hidden_size": 48},
        **{"add_bias_linear": False, "num_query_groups": 2, "kv_channels": 16, "qk_layernorm": True},
    }
    rotary = {"position_embedding_type": "rope", "rotary_base": 500}
    if name == "gpt":
        config = TransformerConfig(**sizes, hidden_dropout=0.0, attention_dropout=0.0)
        return (config, get_gpt_layer_local_spec(), WORDS, SEQ), {"share_embeddings_and_output_weights": True}
    if name == "masked":
        config = TransformerConfig(**sizes)
        rotary.update(rotary_percent=0.5, share_embeddings_and_output_weights=True)
        return (config, get_gpt_layer_local_spec(), WORDS, SEQ), rotary
    sizes |= {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    if name == "llama":
        window = {"window_size": (5, 0), "window_attn_skip_freq": 2}
        config = TransformerConfig(**sizes, **llama, **window, attention_output_gate=True)
        return (config, get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm"), WORDS, SEQ), rotary
    if name == "experts":
        config = TransformerConfig(
            **(sizes | llama | {"num_layers": 2}),
            **{"num_moe_experts": 4, "moe_layer_freq": [0, 1], "moe_router_load_balancing_type": "none"},
            **{"moe_ffn_hidden_size": 24, "moe_shared_expert_intermediate_size": 16, "moe_shared_expert_gate": True},
        )
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", pp_rank=0)
        return (config, spec, WORDS, SEQ), rotary
    config = MLATransformerConfig(
        **(sizes | {"num_layers": 2}),
        **{"q_lora_rank": 16, "kv_lora_rank": 12, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 6},
        **{"rope_type": "yarn", "rotary_scaling_factor": 4.0, "mscale_all_dim": 1.0},
        **{"original_max_position_embeddings": 8, "qk_layernorm": True, "apply_rope_fusion": False},
    )
    spec = get_gpt_layer_local_spec(qk_layernorm=True, multi_latent_attention=True, normalization="RMSNorm")
    return (config, spec, WORDS, SEQ), {"position_embedding_type": "rope"}


def in_token_slices(setup: Setup) -> Found:
    """Train by the engine; values of this rank."""
    warnings.simplefilter("ignore")
    # Functions of megatron-core are compiled at their first call, for longer than these tests run.
    torch._dynamo.config.disable = True
    from megatron_terapipe.megatron_core import gpt_model_layers, vocabulary_loss

    layout = ParallelLayout(
        pipeline_parallel_size=setup.stages, tensor_parallel_size=setup.tensor, num_token_slices=len(setup.lengths)
    )
    tensor = TensorParallelRanks()
    if setup.tensor > 1:
        rank, group = torch.distributed.get_rank() % setup.tensor, own_group(layout.groups("tensor"))
        tensor = TensorParallelRanks(rank, setup.tensor, group, setup.sequence_parallel)
    arguments, settings = model_of(setup.model)
    masked = setup.model == "masked"
    module = TokenSlicePipelineModule(
        gpt_model_layers(*arguments, ranks=ModelRanks(tensor, None, SequenceParallelRanks()), **settings),
        layout=layout,
        token_slices=TokenSlices(setup.lengths),
        loss_fn=vocabulary_loss,
        partition="uniform",
        split_batch=split_batch,
        documents=(lambda rows: Documents(((0, 3, 9),) * len(rows))) if masked else None,
        activation_checkpoint_interval=setup.recomputed,
        preserve_rng_state=False,
        tensor_parallel_group=tensor.group,
    )
    for layer in {*dict(module.numbered_layers()).values(), *module.tied_modules.values()}:
        named = ((layer.megatron_name(name), weight) for name, weight in layer.named_parameters())
        fill(named, tensor)
    engine, *_ = initialize(
        module,
        {
            **{"train_micro_batch_size_per_gpu": MICRO, "gradient_accumulation_steps": ROWS // MICRO},
            **{"gradient_clipping": 1.0, "steps_per_print": 10**9},
        },
        schedule=setup.schedule,
        optimizer=adam(module.parameters()),
        check_token_slices=not setup.sequence_parallel,
    )
    losses, norms, deferred = [], [], []

    def counted(products: list[Any]) -> None:
        deferred.append(len(products))
        compute(products)

    with patch.object(executor, "compute", counted):
        for step in range(setup.updates):
            losses.append(engine.train_batch(iter(samples(step).split(MICRO))).item())
            norms.append(float(engine.get_global_grad_norm()))
    # Four products of each of the two layers of a stage.
    assert setup.schedule != "zero-bubble" or max(deferred) >= 8
    return losses, norms


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.1)


def split_batch(rows: Tensor, token_slices: TokenSlices) -> list[TokenSliceBatch]:
    tokens, labels, mask = rows[:, :-1], rows[:, 1:], torch.ones(len(rows), SEQ)
    return [
        TokenSliceBatch(tokens[:, at], (labels[:, at], mask[:, at]), (at.stop - at.start) / SEQ)
        for at in (slice(*bounds) for bounds in token_slices.bounds())
    ]


def fill(named: Iterable[tuple[str, nn.Parameter]], ranks: TensorParallelRanks) -> None:
    """Give each weight values that follow from its name in a checkpoint of Megatron: this rank's part of them."""
    for name, weight in named:
        divided = ranks.size > 1 and getattr(weight, "tensor_model_parallel", False)
        shape = [
            size * ranks.size if divided and axis == weight.partition_dim else size
            for axis, size in enumerate(weight.shape)
        ]
        random = np.random.default_rng(zlib.crc32(name.encode()))
        whole = torch.from_numpy(random.standard_normal(shape, dtype=np.float32)) * 0.1
        if divided:
            parts = whole.chunk(ranks.size * weight.partition_stride, weight.partition_dim)
            whole = torch.cat(parts[ranks.rank :: ranks.size], weight.partition_dim)
        with torch.no_grad():
            weight.copy_(whole + ("norm" in name and name.endswith("weight")))


TWO = TensorParallelRanks(0, 2)


@pytest.mark.parametrize(
    ("model", "settings", "arguments", "line"),
    [
        ("gpt", {"recompute_granularity": "full"}, {}, "recompute_granularity='full', which layers cannot follow in"),
        ("gpt", {"softmax_type": "learnable"}, {}, "or a flag of the trainer sets: leave it at 'vanilla'"),
        ("gpt", {"fp8": "hybrid"}, {}, "fp8='hybrid' needs Transformer Engine, which is not installed: leave it out"),
        ("gpt", {"num_layers": 5}, {}, "the spec has 4 layers of 5"),
        ("gpt", {}, {"position_embedding_type": "mrope"}, "'mrope' is not computed for token slices: use rope"),
        ("gpt", {}, {"ranks": ModelRanks(TWO, ExpertParallelRanks(0, 2), SequenceParallelRanks())}, "names by rank"),
        ("experts", {"moe_z_loss_coeff": 0.1}, {}, "moe_z_loss_coeff=0.1, which layers cannot follow in token slices"),
        ("experts", {"moe_router_load_balancing_type": "sinkhorn"}, {}, "'sinkhorn' balances all tokens"),
        (
            "latent",
            {},
            {"ranks": ModelRanks(TWO, None, SequenceParallelRanks())},
            "do not sum the gradient of the shared",
        ),
    ],
)
def test_what_token_slices_cannot_compute(
    model: str, settings: dict[str, Any], arguments: dict[str, Any], line: str
) -> None:
    from megatron_terapipe.megatron_core import gpt_model_layers

    (config, spec, *sizes), keywords = model_of(model)
    if "num_layers" in settings:
        from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

        spec = TransformerBlockSubmodules(layer_specs=[spec] * 4)
    vars(config).update(settings)
    alone = {"ranks": ModelRanks(TensorParallelRanks(), None, SequenceParallelRanks())}
    with pytest.raises(ConfigError) as error:
        gpt_model_layers(config, spec, *sizes, **(keywords | alone | arguments))
    assert line in str(error.value)


def test_layers_that_cannot_read_earlier_token_slices() -> None:
    from megatron.core.transformer import ModuleSpec, TransformerLayer
    from megatron.core.transformer.enums import AttnMaskType

    from megatron_terapipe.megatron_core import gpt_model_layers

    ranks = ModelRanks(TensorParallelRanks(), None, SequenceParallelRanks())
    (config, spec, *sizes), _ = model_of("gpt")
    spec.submodules.self_attention.params["attn_mask_type"] = AttnMaskType.padding
    for wrong in (spec, ModuleSpec(TransformerLayer)):
        with pytest.raises(ConfigError, match="layer 0 of the spec has no causal core attention"):
            gpt_model_layers(config, wrong, *sizes, ranks=ranks)
