"""The small transformer without pipeline, token slices or replicas: plain autograd, on the same weights and data."""

from functools import partial

import numpy as np
from deepspeed.pipe import TiedLayerSpec
from deepspeed.runtime.utils import set_random_seed
from torch import Tensor, nn
from torch.nn import functional as F

from tests.runtime import models
from tests.runtime.training import Setup, as_numpy, batches_of

BASE_SEED = 1234


class WholePast:
    """Replaces `Past` on a whole sequence, by torch's own causal attention."""

    prefix_len = 0

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        heads_first = (tensor.transpose(1, 2) for tensor in (query, key, value))
        return F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True).transpose(1, 2)

    def carried(self, name: str, initial: Tensor) -> Tensor:
        return initial

    def carry(self, name: str, state: Tensor) -> None:
        pass

    def all_tokens(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors

    def own_tokens(self, output: Tensor) -> Tensor:
        return output

    def own_heads(self, weight: Tensor) -> Tensor:
        return weight


class Reference(nn.Module):
    """All layers on one process, initialised as the pipeline does: layer i with seed `BASE_SEED + i`."""

    def __init__(self, num_blocks: int, *, tied: bool, stateful: bool = False) -> None:
        super().__init__()
        self.tied_modules = nn.ModuleDict()
        self._functions = []
        for index, spec in enumerate(models.layers(num_blocks, tied=tied, stateful=stateful)):
            set_random_seed(BASE_SEED + index)
            if isinstance(spec, TiedLayerSpec) and spec.key in self.tied_modules:
                self._functions.append(partial(spec.forward_fn, self.tied_modules[spec.key]))
                continue
            layer = spec.build()
            if isinstance(spec, TiedLayerSpec):
                self.tied_modules[spec.key] = layer
            else:
                self.add_module(str(index), layer)
            self._functions.append(layer)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = tokens
        for function in self._functions:
            takes_past = isinstance(function, (models.Embedding, models.Block))
            hidden = function(hidden, past=WholePast()) if takes_past else function(hidden)
        return hidden


def reference_gradients(setup: Setup) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and gradients in fp64, averaged over micro-batches and replicas."""
    model = Reference(setup.num_blocks, tied=setup.tied, stateful=setup.stateful).double()
    batches = [batch for rank in range(setup.dp) for batch in batches_of(setup, rank)]
    loss = sum(models.loss_fn(model(tokens), labels) for tokens, labels in batches) / len(batches)
    loss.backward()
    return loss.item(), {name: as_numpy(parameter.grad) for name, parameter in model.named_parameters()}


def relative_error(value: np.ndarray, expected: np.ndarray) -> float:
    """Norm of the difference over norm of the expected values."""
    return float(np.linalg.norm(value.astype(np.float64) - expected) / np.linalg.norm(expected))
