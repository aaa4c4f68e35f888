"""Trains megatron-core's own layers with the whole trainer, in token slices. It needs `pip install megatron-core`.

    deepspeed --num_accelerators 2 examples/pretrain_megatron_core.py --pipeline-model-parallel-size 2 \
        --num-token-slices 4 --num-layers 4 --hidden-size 64 --num-attention-heads 4 --num-query-groups 2 \
        --group-query-attention --swiglu --normalization RMSNorm --disable-bias-linear \
        --use-rotary-position-embeddings --untie-embeddings-and-output-weights --seq-length 64 \
        --max-position-embeddings 64 --mock-data --micro-batch-size 8 --global-batch-size 16 --train-iters 30 \
        --lr 3e-3

In your `pretrain_gpt.py` of Megatron-LM this takes the place of the model provider: put your `TransformerConfig` and
your spec into `layers`. Flags of the trainer that are not read there have no effect on megatron-core's layers.
"""

import sys
from functools import partial

from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig
from torch.nn import functional as F

from megatron_terapipe.megatron_core import gpt_model_layers, vocabulary_loss
from megatron_terapipe.training.pretrain import pretrain

ACTIVATIONS = {"swiglu": F.silu, "geglu": partial(F.gelu, approximate="tanh"), "gelu-exact": F.gelu}
ACTIVATIONS["gelu"] = ACTIVATIONS["geglu"]


def flags(parser):
    """Add a flag for kernels of Transformer Engine."""
    parser.add_argument("--fp8-format", choices=("e4m3", "hybrid"), help="Format of FP8, with Transformer Engine.")


def layers(config, ranks):
    """Return the layers, first to last."""
    model = config.model
    normalization = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}[model.normalization]
    same = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "softmax_scale")
    same += ("hidden_dropout", "attention_dropout", "layernorm_epsilon", "init_method_std", "attention_output_gate")
    same += ("moe_router_topk", "moe_ffn_hidden_size", "moe_router_load_balancing_type", "moe_aux_loss_coeff")
    transformer = TransformerConfig(
        **{name: getattr(model, name) for name in same},
        **{
            "rotary_interleaved": model.rotary_interleaved,
            "num_query_groups": model.num_key_value_heads,
            "num_moe_experts": model.num_experts,
        },
        **{"normalization": normalization, "qk_layernorm": model.qk_norm == "head"},
        **{"gated_linear_unit": model.gated, "activation_func": ACTIVATIONS[model.activation]},
        **{"add_bias_linear": not model.disable_bias_linear, "add_qkv_bias": model.has_qkv_bias},
        **{"fp8": config.own.fp8_format, "fp8_recipe": "tensorwise"},
    )
    spec = get_gpt_decoder_block_spec(transformer, HAVE_TE, normalization=normalization, pp_rank=0)
    return gpt_model_layers(
        transformer,
        spec,
        model.padded_vocab_size(ranks.tensor.size),
        model.max_position_embeddings,
        ranks=ranks,
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        position_embedding_type=model.position_embedding_type,
        rotary_percent=model.rotary_percent,
        rotary_base=model.rotary_base,
    )


if __name__ == "__main__":
    sys.exit(pretrain(layers, loss=vocabulary_loss, flags=flags))
