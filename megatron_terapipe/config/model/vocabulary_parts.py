"""Whether the output layer can be dealt to the ranks of a pipeline (`--vocabulary-stages`, ADR 53)."""

from megatron_terapipe.config.model.model import ModelConfig


def why_vocabulary_stays_whole(model: ModelConfig, *, pipeline_ranks: int, tensor_ranks: int) -> str | None:
    """Return why a model's output layer cannot be dealt to ranks, with the remedy; None if it can.

    Args:
        pipeline_ranks: pipeline ranks that get a part each.
        tensor_ranks: tensor-parallel ranks that share each part.
    """
    if not model.untie_embeddings_and_output_weights:
        return (
            "--vocabulary-stages cuts the weight of the output layer, which is that of the embedding here: add "
            "--untie-embeddings-and-output-weights, or drop it"
        )
    parts = pipeline_ranks * tensor_ranks
    flag, rows = model.vocabulary_multiple
    if rows % parts:
        return (
            f"--vocabulary-stages deals the rows of the output layer to {pipeline_ranks} pipeline x {tensor_ranks} "
            f"tensor-parallel ranks, and {flag} {rows} is not a multiple of {parts}: change it"
        )
    return None
