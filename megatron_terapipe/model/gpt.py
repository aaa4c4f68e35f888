"""GPT as a list of pipeline layers, and its loss."""

from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn
from torch.nn import functional as F

from deepspeed_ext.plan.partition import StagePartition
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.model.block import TransformerBlock
from megatron_terapipe.model.embedding import OutputLayer, PositionEmbedding, WordEmbedding, tied_logits

LAYERS_BEFORE_BLOCKS = 2
"""The word and the position embedding."""
LAYERS_AFTER_BLOCKS = 2
"""The final norm and the output layer."""


def gpt_layers(model: ModelConfig) -> list[LayerSpec]:
    """The model, first layer to last: embeddings, transformer layers, final norm, output layer.

    Args:
        model: the model section, with its vocabulary size known.
    """
    if model.untie_embeddings_and_output_weights:
        embedding, output = LayerSpec(WordEmbedding, model), LayerSpec(OutputLayer, model)
    else:
        embedding = TiedLayerSpec("embedding", WordEmbedding, model)
        output = TiedLayerSpec("embedding", WordEmbedding, model, forward_fn=tied_logits)
    blocks = [LayerSpec(TransformerBlock, model) for _ in range(model.num_layers)]
    final_norm = LayerSpec(nn.LayerNorm, model.hidden_size, eps=model.layernorm_epsilon)
    return [embedding, LayerSpec(PositionEmbedding, model), *blocks, final_norm, output]


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


def gpt_loss(logits: Tensor, labels: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross-entropy of the tokens that bear loss; 0 if none does.

    Args:
        logits: [B, N, vocabulary].
        labels: token ids [B, N] and the loss mask [B, N].
    """
    targets, loss_mask = labels
    at_least_fp32 = logits if logits.element_size() >= 4 else logits.float()
    losses = F.cross_entropy(at_least_fp32.flatten(0, 1), targets.flatten(), reduction="none")
    mask = loss_mask.flatten().to(losses.dtype)
    return (losses * mask).sum() / mask.sum().clamp(min=1)
