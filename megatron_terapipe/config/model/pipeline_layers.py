"""Numbers of a GPT's pipeline layers: embeddings, transformer layers, final norm, output layer."""

LAYERS_BEFORE_BLOCKS = 2
"""The word and the position embedding."""
LAYERS_AFTER_BLOCKS = 2
"""The final norm and the output layer."""


def output_layer(num_layers: int) -> int:
    """Return the index of the output layer behind so many transformer layers; of its first part, if it has several."""
    return LAYERS_BEFORE_BLOCKS + num_layers + LAYERS_AFTER_BLOCKS - 1
