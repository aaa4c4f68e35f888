"""GPT as a list of pipeline layers, and its loss.

Layers that predict further tokens may follow (multi-token prediction: DeepSeek-AI, DeepSeek-V3 Technical Report, arXiv
2412.19437 section 2.2, equations 21 to 25). Depth 0 is the model; depth k reads of a token t the output of depth k - 1
after its last norm, and the k-th token after t, which is a label:

    output of depth k - 1 --norm--.
                                   >-- product 2h -> h -- transformer layer -- norm --> output --> logits of t + k + 1
    embedding of t + k     --norm--'

Word embedding and output layer are the model's. All of it is on the stage of the output layer, whose `Logits` each
depth takes over with another hidden state; the embedding is a tied layer. So a token slice needs nothing of later ones.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn
from torch.nn import functional as F

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.layout import StagePartition
from deepspeed_ext.runtime.state.sequence_state import Past
from deepspeed_ext.runtime.topology import ExpertParallelRanks, SequenceParallelRanks
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.config.layers import LAYERS_BEFORE_BLOCKS, BlockShape, output_layer, prediction_layers
from megatron_terapipe.config.rotation import rotation_of
from megatron_terapipe.model.block import DropoutSite, TransformerBlock, residual_dropout
from megatron_terapipe.model.embedding import (
    FirstVocabularyPart,
    OutputLayer,
    PositionEmbedding,
    VocabularyPart,
    VocabularySums,
    WordEmbedding,
    tied_logits,
)
from megatron_terapipe.model.initialization import normal
from megatron_terapipe.model.logits import Logits
from megatron_terapipe.model.norm import NORMS
from megatron_terapipe.model.rotary import RotaryTable
from megatron_terapipe.model.tensor_parallel import TensorParallelRanks, linear


class ModelRanks(NamedTuple):
    """Ranks that share the layers of a model."""

    tensor: TensorParallelRanks
    """Ranks with parts of its matrices."""
    expert: ExpertParallelRanks
    """Ranks with some of its experts each."""
    sequence: SequenceParallelRanks
    """Ranks with parts of the tokens of every token slice."""


class Predictions(NamedTuple):
    """Output of the layers that predict further tokens, for one token slice."""

    logits: tuple[Logits, ...]
    """Of each depth so far."""
    words: tuple[Tensor, ...]
    """[B, n, hidden], the embeddings of the tokens that later depths read."""

    def compute(self) -> Tensor:
        """This rank's logits of the next token, [B, N, V / size]."""
        return self.logits[0].compute()


def further_words(embedding: WordEmbedding, logits: Logits, labels: Tensor) -> Predictions:
    """Embed the tokens that each depth reads.

    Args:
        labels: [B, N, 1 + D], for each depth the token that it predicts, which the next depth reads.
    """
    return Predictions((logits,), tuple(embedding(read) for read in labels.unbind(-1)[:-1]))


class PredictionLayer(nn.Module):
    """One depth. Tensor-parallel ranks have its norms and the product before its transformer layer whole.

    Args:
        more: arguments of the transformer layer.
    """

    def __init__(self, model: ModelConfig, block: BlockShape, ranks: TensorParallelRanks, **more: Any) -> None:
        super().__init__()
        norm, hidden = NORMS[model.normalization], model.hidden_size
        self.ranks, self.dropout = ranks, model.hidden_dropout
        self.words_norm, self.hidden_norm = norm(model, ranks), norm(model, ranks)
        self.projection = ranks.whole(hidden, 2 * hidden, initialize=normal(model.init_method_std))
        """[h, 2h]: the columns of the embedded word first."""
        self.block = TransformerBlock(model, block, ranks, **more)
        self.final_norm = norm(model, ranks)

    def forward(self, before: Predictions, past: Past) -> Predictions:
        """Add the logits of this depth."""
        last, (words, *later) = before.logits[-1], before.words
        dropout = self.dropout if self.training else 0.0
        words = residual_dropout(words, dropout, DropoutSite.EMBEDDING, past, self.ranks)
        joined = torch.cat((self.words_norm(words), self.hidden_norm(last.hidden)), dim=-1)
        hidden = self.final_norm(self.block(linear(joined, self.projection), past))
        return Predictions((*before.logits, last.of(hidden)), tuple(later))


def gpt_layers(
    model: ModelConfig,
    ranks: TensorParallelRanks | None = None,
    *,
    recompute_cheap: bool = False,
    latents_kept: bool = False,
    vocabulary_parts: int = 1,
    expert_ranks: ExpertParallelRanks | None = None,
) -> list[LayerSpec]:
    """Return the layers of the model, first to last: embeddings, transformer layers, final norm, output layer.

    Those that predict further tokens follow, after a layer that embeds these.

    Args:
        ranks: ranks that share the matrices of each layer; None for a single rank.
        recompute_cheap: compute the outputs of norms and activations again in the backward instead of keeping them.
        latents_kept: keep latents for later token slices, and not keys and values, where attention has latents.
        vocabulary_parts: layers that share the rows of the output layer; more than 1 only where its weight is untied.
        expert_ranks: ranks that share the experts of each layer; None for a single rank.
    """
    ranks = ranks or TensorParallelRanks()
    rotations = {block: rotation_of(model, block) for block in model.blocks}
    # Layers that turn alike share one table.
    tables = {each: RotaryTable(each, model.seq_length) for each in rotations.values() if each is not None}
    tied = partial(TiedLayerSpec, "embedding", WordEmbedding, model, ranks)
    embedding = tied() if model.embedding_is_tied else LayerSpec(WordEmbedding, model, ranks)
    output = LayerSpec(OutputLayer, model, ranks)
    if not model.untie_embeddings_and_output_weights:
        output = tied(forward_fn=tied_logits)

    def layer(kind: type[TransformerBlock | PredictionLayer], block: BlockShape) -> LayerSpec:
        return LayerSpec(
            kind,
            model,
            block,
            ranks,
            recompute_cheap=recompute_cheap,
            latents_kept=latents_kept,
            rotary=tables.get(rotations[block]),
            expert_ranks=expert_ranks,
        )

    blocks = [layer(TransformerBlock, block) for block in model.blocks]
    final_norm = LayerSpec(NORMS[model.normalization], model, ranks)
    outputs = [output]
    if vocabulary_parts > 1:
        assert model.untie_embeddings_and_output_weights, "the configuration cuts a weight of its own only"
        kinds = (FirstVocabularyPart, *[VocabularyPart] * (vocabulary_parts - 1))
        outputs = [LayerSpec(kind, model, ranks, number, vocabulary_parts) for number, kind in enumerate(kinds)]
    further = [tied(forward_fn=further_words)] if model.mtp_num_layers else []
    further += [layer(PredictionLayer, model.blocks[-1]) for _ in range(model.mtp_num_layers)]
    return [embedding, LayerSpec(PositionEmbedding, model, ranks), *blocks, final_norm, *outputs, *further]


def layers_with_weights(model: ModelConfig) -> list[int]:
    """Indices of the pipeline layers that own weights: all but those with the weight of the word embedding.

    An output layer that several pipeline layers share counts as one, as a model on one rank has it.
    """
    tied = not model.untie_embeddings_and_output_weights
    own = range(output_layer(model.num_layers) + 1 - tied)
    return [*own, *prediction_layers(model.num_layers, model.mtp_num_layers)]


def vocabulary_parts(layers: Sequence[Any]) -> range:
    """Return the indices of the layers that share the output layer's vocabulary; none where one layer has it."""
    indices = [
        index
        for index, layer in enumerate(layers)
        if isinstance(layer, LayerSpec) and issubclass(layer.typename, FirstVocabularyPart | VocabularyPart)
    ]
    return range(indices[0], indices[-1] + 1) if indices else range(0)


def pipeline_partition(blocks: StagePartition, vocabulary_parts: int = 1, mtp_num_layers: int = 0) -> StagePartition:
    """Return the partition of all pipeline layers, from the partition of the transformer layers.

    The embeddings go with the first transformer layer, the final norm with the last, and all after it, too, unless the
    parts of the output layer are stages of their own.
    """
    inner = (bound + LAYERS_BEFORE_BLOCKS for bound in blocks.bounds[1:-1])
    output = output_layer(blocks.num_layers)
    ends = range(output, output + vocabulary_parts) if vocabulary_parts > 1 else ()
    further = prediction_layers(blocks.num_layers, mtp_num_layers)
    return StagePartition((0, *inner, *ends, further.stop if further else output + vocabulary_parts))


def gpt_loss(logits: Logits | VocabularySums | Tensor, labels: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross-entropy of the tokens whose loss mask is 1; 0 without any.

    Args:
        logits: of the GPT's output layer; or a tensor [B, N, vocabulary], of layers of one's own.
        labels: token ids [B, N] and the loss mask [B, N].

    Raises:
        UserError: if a tensor of layers of one's own has another shape.
    """
    targets, loss_mask = labels
    if not isinstance(logits, Tensor):
        losses = logits.cross_entropy(targets)
    elif logits.dim() != 3 or logits.shape[:2] != targets.shape:
        raise UserError(
            f"the last layer returns {tuple(logits.shape)} for labels {tuple(targets.shape)}, and cross-entropy takes "
            "logits [B, N, vocabulary]: return these, or give pretrain a loss of your own"
        )
    else:
        # In fp32 at least, as the sums of exponentials would lose their digits.
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        losses = F.cross_entropy(wide.flatten(0, 1), targets.flatten(), reduction="none").view_as(loss_mask)
    mask = loss_mask.to(losses.dtype)
    return (losses * mask).sum() / mask.sum().clamp(min=1)


def prediction_losses(predictions: Predictions, labels: tuple[Tensor, Tensor]) -> Tensor:
    """Return the weighed sum of the cross-entropies of each depth, [1 + D].

    Args:
        labels: the token that each depth predicts, and the weight of its loss, each [B, N, 1 + D].
    """
    each = zip(predictions.logits, *(part.unbind(-1) for part in labels), strict=True)
    losses = ((logits.cross_entropy(targets), weights) for logits, targets, weights in each)
    return torch.stack([(loss * weights.to(loss.dtype)).sum() for loss, weights in losses])
