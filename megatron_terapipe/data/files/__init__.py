"""Files of token ids: Megatron's indexed datasets, and arrays kept on disk beside them."""
