"""Runs a trained model on one process.

`WholeModel` is GPT with all its layers: for generation, and for comparison with pipelines. `generate` continues a text,
one token after the other, on the keys and values that training keeps for token slices.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from deepspeed.pipe import TiedLayerSpec
from torch import Tensor, nn

from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.plan.terminal import Progress, no_progress
from deepspeed_ext.runtime.module import takes_past
from deepspeed_ext.runtime.state.sequence_state import SequenceState
from megatron_terapipe.checkpoint.info import CheckpointInfo
from megatron_terapipe.checkpoint.saved_weights import SavedWeights
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.config.layers import output_layer
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.model.gpt import gpt_layers
from megatron_terapipe.model.logits import Logits


class WholeModel(nn.Module):
    """The layers of `gpt_layers`, one after the other. Those that predict further tokens are held, and not run.

    Args:
        base_seed: layer i starts from seed `base_seed + i`, as on the ranks of a pipeline.
    """

    def __init__(self, model: ModelConfig, base_seed: int = 1234) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        """By index in the pipeline; a tied layer is at its first index."""
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
        self._num_used = output_layer(model.num_layers) + 1

    def forward(self, tokens: Tensor, state: SequenceState, token_slice: int = 0) -> Tensor:
        """Return the logits [B, N, vocabulary] of the tokens [B, N] of a token slice."""
        return self.output(tokens, state, token_slice).compute()

    def output(self, tokens: Tensor, state: SequenceState, token_slice: int = 0) -> Logits:
        """Return the output of the last layer for tokens [B, N], from which logits or a loss are computed."""
        hidden: Any = tokens
        for index, (function, wants_past) in enumerate(self._functions[: self._num_used]):
            if wants_past:
                hidden = function(hidden, past=state.past(index, token_slice))
            else:
                hidden = function(hidden)
        return hidden

    def load(
        self, directory: Path, info: CheckpointInfo | None = None, progress: Progress = no_progress
    ) -> "WholeModel":
        """Load the weights of one checkpoint's directory, whatever ranks it was saved by."""
        return self.take(SavedWeights(directory, info or CheckpointInfo.read(directory)).whole, progress)

    def take(
        self, weights: Callable[[int, nn.Module], Mapping[str, Tensor]], progress: Progress = no_progress
    ) -> "WholeModel":
        """Take the whole weights [...] of each layer by name from a function of its number and the layer itself."""
        for number, (index, layer) in enumerate(self.layers.items()):
            progress(number / len(self.layers))
            on_meta = any(weight.is_meta for weight in layer.parameters())
            layer.load_state_dict(weights(int(index), layer), assign=on_meta)
        return self


def generate(
    model: WholeModel,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    max_positions: int,
    vocab_size: int,
    eod: int | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
) -> Iterator[int]:
    """Check the arguments, then yield new tokens until `eod`, or `max_new_tokens`.

    A growing text is a cut of its own: the prompt is the first token slice, each new token one more.

    Args:
        vocab_size: tokens of the tokenizer; the padding of the vocabulary is never drawn.
        eod: id that ends the text; None = no id ends it.
        temperature: divides the logits; 0 takes the likeliest token always.
        top_k: draw from the k likeliest tokens; 0 from all.
        top_p: draw from the likeliest tokens whose chances, at this temperature, add up to this.
    """
    if not prompt:
        raise ConfigError("the prompt is empty: give at least one character")
    if len(prompt) + max_new_tokens > max_positions:
        room = max_positions - len(prompt)
        raise ConfigError(
            f"{len(prompt)} tokens of prompt and {max_new_tokens} new are more than the {max_positions} positions "
            f"of the model: shorten the prompt{f', or ask for {room} new tokens or fewer' if room > 0 else ''}"
        )

    @torch.no_grad()
    def new_tokens() -> Iterator[int]:
        state = SequenceState(TokenSlices((len(prompt),) + (1,) * max_new_tokens), forward_only=True)
        tokens, draws = torch.tensor([list(prompt)]), torch.Generator().manual_seed(seed)
        for token_slice in range(max_new_tokens):
            logits = model(tokens, state, token_slice)[0, -1, :vocab_size].float()
            token = _draw(logits, temperature, top_k, top_p, draws)
            if token == eod:
                return
            yield token
            tokens = torch.tensor([[token]])

    return new_tokens()


def _draw(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, draws: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    if 0 < top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], float("-inf"))
    chances = (logits / temperature).softmax(-1)
    if top_p < 1:  # Without the tail (Holtzman et al., arXiv 1904.09751): a token stays if those before it fall short.
        descending, order = chances.sort(descending=True)
        chances = chances.index_fill(0, order[descending.cumsum(-1) - descending >= top_p], 0.0)
    return int(torch.multinomial(chances, 1, generator=draws))
