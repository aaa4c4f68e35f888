"""GPT as a list of pipeline layers, and its loss."""

from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor

from deepspeed_ext.plan.partition import StagePartition
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.config.rotation import rotation_of
from megatron_terapipe.model.block import TransformerBlock
from megatron_terapipe.model.embedding import OutputLayer, PositionEmbedding, WordEmbedding, tied_logits
from megatron_terapipe.model.norm import NORMS
from megatron_terapipe.model.rotary import RotaryTable
from megatron_terapipe.tensor_parallel.logits import Logits
from megatron_terapipe.tensor_parallel.ranks import TensorParallelRanks

LAYERS_BEFORE_BLOCKS = 2
"""The word and the position embedding."""
LAYERS_AFTER_BLOCKS = 2
"""The final norm and the output layer."""


def gpt_layers(
    model: ModelConfig, ranks: TensorParallelRanks | None = None, *, recompute_cheap: bool = False
) -> list[LayerSpec]:
    """Return the layers of the model, first to last: embeddings, transformer layers, final norm, output layer.

    Args:
        model: the model section, with its vocabulary size known.
        ranks: ranks that share the matrices of each layer; None for one rank alone.
        recompute_cheap: compute the outputs of norms and activations again in the backward instead of keeping them.
    """
    ranks = ranks or TensorParallelRanks()
    rotations = {block: rotation_of(model, block) for block in model.blocks}
    # Layers that turn alike share one table.
    tables = {each: RotaryTable(each, model.seq_length) for each in rotations.values() if each is not None}
    if model.untie_embeddings_and_output_weights:
        embedding, output = LayerSpec(WordEmbedding, model, ranks), LayerSpec(OutputLayer, model, ranks)
    else:
        embedding = TiedLayerSpec("embedding", WordEmbedding, model, ranks)
        output = TiedLayerSpec("embedding", WordEmbedding, model, ranks, forward_fn=tied_logits)
    blocks = [
        LayerSpec(
            TransformerBlock,
            model,
            block,
            ranks,
            recompute_cheap=recompute_cheap,
            rotary=tables.get(rotations[block]),
        )
        for block in model.blocks
    ]
    final_norm = LayerSpec(NORMS[model.normalization], model, ranks)
    return [embedding, LayerSpec(PositionEmbedding, model, ranks), *blocks, final_norm, output]


def layers_with_weights(model: ModelConfig) -> range:
    """Indices of the pipeline layers that own weights: all but an output layer that is tied to the word embedding."""
    tied = not model.untie_embeddings_and_output_weights
    return range(LAYERS_BEFORE_BLOCKS + model.num_layers + LAYERS_AFTER_BLOCKS - tied)


def pipeline_partition(blocks: StagePartition) -> StagePartition:
    """The partition of all pipeline layers, from one of the transformer layers alone.

    The embeddings go with the first transformer layer, the final norm and the output layer with the last.
    """
    inner = (bound + LAYERS_BEFORE_BLOCKS for bound in blocks.bounds[1:-1])
    return StagePartition((0, *inner, blocks.num_layers + LAYERS_BEFORE_BLOCKS + LAYERS_AFTER_BLOCKS))


def gpt_loss(logits: Logits, labels: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross-entropy of the tokens that bear loss; 0 if none does.

    Args:
        logits: output of the last layer.
        labels: token ids [B, N] and the loss mask [B, N].
    """
    targets, loss_mask = labels
    losses = logits.cross_entropy(targets)
    mask = loss_mask.to(losses.dtype)
    return (losses * mask).sum() / mask.sum().clamp(min=1)
