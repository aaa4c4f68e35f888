"""GPT with all its layers on one process: to generate with, and to hold pipelines against."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from deepspeed.pipe import TiedLayerSpec
from torch import Tensor, nn

from deepspeed_ext.plan.text.progress_line import Progress, unseen
from deepspeed_ext.runtime.sequence.sequence_state import SequenceState
from deepspeed_ext.runtime.stages import takes_past
from megatron_terapipe.checkpoint.info import CheckpointInfo
from megatron_terapipe.checkpoint.saved_weights import SavedWeights
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.model.gpt import Logits, gpt_layers


class WholeModel(nn.Module):
    """The layers of `gpt_layers`, one after the other.

    Args:
        model: the model section, with its vocabulary size known.
        base_seed: layer i starts from seed `base_seed + i`, as on the ranks of a pipeline.
    """

    def __init__(self, model: ModelConfig, base_seed: int = 1234) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        """By index in the pipeline; a tied layer stands where it is built first."""
        functions: list[Callable[..., Any]] = []
        tied: dict[str, nn.Module] = {}
        for index, spec in enumerate(gpt_layers(model)):
            if isinstance(spec, TiedLayerSpec) and spec.key in tied:
                functions.append(partial(spec.forward_fn, tied[spec.key]))
                continue
            torch.manual_seed(base_seed + index)
            layer = self.layers[str(index)] = spec.build()
            functions.append(layer)
            if isinstance(spec, TiedLayerSpec):
                tied[spec.key] = layer
        self._functions = [(function, takes_past(function)) for function in functions]

    def forward(self, tokens: Tensor, state: SequenceState, token_slice: int = 0) -> Tensor:
        """Return the logits of the tokens of a token slice: [B, N, vocabulary].

        Args:
            tokens: [B, N].
            token_slice: number of the token slice.
        """
        return self.output(tokens, state, token_slice).compute()

    def output(self, tokens: Tensor, state: SequenceState, token_slice: int = 0) -> Logits:
        """Return the output of the last layer, from which logits [B, N, vocabulary] or a loss are computed.

        Args:
            tokens: [B, N].
            token_slice: number of the token slice.
        """
        hidden: Any = tokens
        for index, (function, wants_past) in enumerate(self._functions):
            if wants_past:
                hidden = function(hidden, past=state.past(index, token_slice))
            else:
                hidden = function(hidden)
        return hidden

    def load(self, directory: Path, info: CheckpointInfo | None = None, progress: Progress = unseen) -> "WholeModel":
        """Load the weights of a checkpoint, whatever ranks it was saved by.

        Args:
            directory: directory of one checkpoint, such as `CHECKPOINTS/global_step100`.
            info: facts of the run that saved it; None to read them there.
            progress: is told how much of the model is loaded.

        Raises:
            CheckpointError: if a layer's file is missing or broken.
        """
        return self.take(SavedWeights(directory, info or CheckpointInfo.read(directory)).whole, progress)

    def take(
        self, weights: Callable[[int, nn.Module], Mapping[str, Tensor]], progress: Progress = unseen
    ) -> "WholeModel":
        """Take the weights of all layers.

        Args:
            weights: gives those [...] of a layer by name, whole, from its number and the layer itself.
            progress: is told how much of the model is loaded.
        """
        for number, (index, layer) in enumerate(self.layers.items()):
            progress(number / len(self.layers))
            on_meta = any(weight.is_meta for weight in layer.parameters())
            layer.load_state_dict(weights(int(index), layer), assign=on_meta)
        return self
