"""A GPT of the trainer's configuration as a workload. Parameters are those that `config.model.flops` counts."""

from megatron_terapipe.config.model import flops
from megatron_terapipe.config.model.block_shape import BlockShape
from megatron_terapipe.config.model.model import ModelConfig
from megatron_terapipe.search.inputs.layer import Attention, Layer, Product
from megatron_terapipe.search.inputs.workload import Workload

WORD_EMBEDDING = "word embedding"
"""The weight that a tied embedding and head share."""


def gpt_workload(model: ModelConfig, name: str = "") -> Workload:
    """Return the layers of a GPT: embedding, transformer layers, last norm, head.

    Args:
        model: its shape; the vocabulary size must be known.
        name: for tables; empty = by its sizes.

    Raises:
        ConfigError: if the vocabulary size is not known.
    """
    words = model.padded_vocab_size() * model.hidden_size
    positions = flops.embedding_parameters(model) - words
    tied = None if model.untie_embeddings_and_output_weights else WORD_EMBEDDING
    # Rows of one kind of block are the same object, so that costs computed for one serve all.
    blocks = {shape: _block(model, shape) for shape in set(model.blocks)}

    def end(kind: str, parameters: int, **more: object) -> Layer:
        values = {"tokens": model.seq_length, "hidden_size": model.hidden_size, "parameters": parameters, **more}
        return Layer(name=kind, kind=kind, **values)  # type: ignore[arg-type]

    shared = {"shared_weight": tied, "shared_parameters": words if tied else 0}
    logits = Product(model.hidden_size, model.padded_vocab_size(), "column")
    layers = (
        end("embedding", words + positions, unshared_parameters=positions, **shared),
        *(blocks[shape] for shape in model.blocks),
        end(
            "norm",
            flops.norm_parameters(model),
            unshared_parameters=flops.norm_parameters(model),
            num_norms=1,
            normalization=model.normalization,
        ),
        end("head", words, products=(logits,), **shared),
    )
    return Workload(
        name=name or model.model_preset or f"{model.num_layers}x{model.hidden_size}",
        layers=layers,
        seq_length=model.seq_length,
        first_dealt=1,
        end_dealt=1 + model.num_layers,
        config=model,
    )


def _block(model: ModelConfig, shape: BlockShape) -> Layer:
    hidden, heads, head_size = model.hidden_size, model.num_attention_heads, model.kv_channels
    products: list[Product] = []
    attention = None
    if shape.num_key_value_heads:
        attention = Attention(
            heads,
            shape.num_key_value_heads,
            head_size,
            # A window as long as the sequence hides nothing, and the trainer treats it as none.
            sliding_window=shape.window if (shape.window or model.seq_length) < model.seq_length else None,
            normed=model.qk_norm != "none",
            written_out=model.attention_softcap is not None or model.attention_dropout > 0,
        )
        products.append(Product(hidden, (heads + 2 * shape.num_key_value_heads) * head_size, "column"))
        products.append(Product(heads * head_size, hidden, "row"))
    if shape.ffn_hidden_size:
        products.append(Product(hidden, (1 + model.gated) * shape.ffn_hidden_size, "column"))
        products.append(Product(shape.ffn_hidden_size, hidden, "row"))
    rotated = model.position_embedding_type == "rope" and shape.rotated
    kept_states, normed_states = flops.block_hidden_states(model, shape)
    return Layer(
        name="block",
        kind="block",
        tokens=model.seq_length,
        hidden_size=hidden,
        parameters=flops.block_parameters(model, shape),
        unshared_parameters=flops.block_unshared_parameters(model, shape),
        products=tuple(products),
        attention=attention,
        num_norms=flops.block_norms(model, shape),
        kept_states=kept_states,
        normed_states=normed_states,
        sums_at_once=model.parallel_residual and model.hidden_dropout == 0,
        activation_width=shape.ffn_hidden_size,
        gated=model.gated,
        normalization=model.normalization,
        num_biases=bool(attention) * (model.has_qkv_bias + model.has_projection_bias)
        + 2 * bool(shape.ffn_hidden_size) * model.has_mlp_bias,
        biased_channels=_biased_channels(model, shape),
        rotary_channels=(heads + shape.num_key_value_heads) * model.rotary_channels if rotated else 0,
    )


def _biased_channels(model: ModelConfig, shape: BlockShape) -> int:
    """Outputs of the products of a block that have a bias."""
    channels = 0
    if shape.num_key_value_heads:
        heads = model.num_attention_heads + 2 * shape.num_key_value_heads
        channels += model.has_qkv_bias * heads * model.kv_channels + model.has_projection_bias * model.hidden_size
    if shape.ffn_hidden_size:
        channels += model.has_mlp_bias * ((1 + model.gated) * shape.ffn_hidden_size + model.hidden_size)
    return channels
