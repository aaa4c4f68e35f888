"""The path from text to micro-batches: tokenizers, Megatron's indexed datasets, samples, and the loader."""
