"""What an engine is to the benchmark: weights, an optimizer, and a step."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron_terapipe.config import ModelConfig


@dataclass(frozen=True)
class Job:
    """What all engines do in a step."""

    model: ModelConfig
    num_micro_batches: int
    """Micro-batches of a step, each with data of its own."""
    micro_batch_size: int
    cores: frozenset[int]
    """Those of this machine that the ranks share."""

    def samples(self) -> Tensor:
        """Token ids of the step, the same in each step and on each rank: [sequences, N + 1]."""
        rows = self.num_micro_batches * self.micro_batch_size
        generator = torch.Generator().manual_seed(0)
        return torch.randint(0, self.model.vocab_size or 0, (rows, self.model.seq_length + 1), generator=generator)

    def inputs_and_labels(self) -> tuple[Tensor, Tensor]:
        """Token ids and the ones after them: each [sequences, N]."""
        samples = self.samples()
        return samples[:, :-1].contiguous(), samples[:, 1:].contiguous()

    def micro_batches(self) -> list[tuple[Tensor, Tensor]]:
        """Inputs and labels of each micro-batch: each [B, N]."""
        inputs, labels = (each.split(self.micro_batch_size) for each in self.inputs_and_labels())
        return list(zip(inputs, labels, strict=True))


@dataclass(frozen=True)
class Engine:
    """An engine on this rank."""

    weights: Mapping[str, nn.Parameter]
    """Those of this rank, by the number of their layer and their name in it."""
    optimizer: torch.optim.Optimizer
    """Steps once in each step of the engine, and then has gradients that are means over the micro-batches."""
    step: Callable[[], float | None]
    """Trains on the job's micro-batches, and returns their mean loss; None on a rank that knows none."""
    holder: Any = None
    """Whatever must live as long."""


def sgd(weights: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer of all engines, which costs next to nothing."""
    return torch.optim.SGD(list(weights.values()), lr=1e-3)
