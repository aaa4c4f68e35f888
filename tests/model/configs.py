"""Small models of every shape that the model section can describe."""

from typing import Any

from megatron_terapipe.config import ModelConfig

SEQ = 32


def model_config(**given: Any) -> ModelConfig:
    defaults = {"num_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "seq_length": SEQ, "vocab_size": 257}
    return ModelConfig(**(defaults | given))


MODELS = {
    "plain": model_config(),
    "grouped": model_config(num_key_value_heads=2),
    "multi_query_untied": model_config(num_key_value_heads=1, untie_embeddings_and_output_weights=True),
    "narrow_mlp": model_config(ffn_hidden_size=40),
    "wide_heads": model_config(kv_channels=24, num_key_value_heads=2),
    "unpadded": model_config(make_vocab_size_divisible_by=1, max_position_embeddings=48),
}
