"""Parts of a stage that are computed again in the backward, and the random numbers that they draw again."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor


@dataclass(frozen=True)
class Recomputation:
    """Parts of a stage that are computed again in the backward."""

    stages: bool = False
    """Whole stages. A stage then keeps the input of a token slice, and keys and values for later ones."""
    interval: int = 0
    """Layers, this many at a time; 0 for none."""
    choose: Callable[[range], Collection[int]] | None = None
    """Chooses, of the numbers of a stage's layers, the layers that are computed again instead, one by one."""
    keeps_random_state: bool = True
    """Whether the second computation draws the same random numbers, from the generators of torch."""

    def runs_of_layers(self, layers: range) -> Iterator[tuple[slice, bool]]:
        """Runs of a stage's layers, counted from its first, and whether each is computed again by itself."""
        if self.choose is None:
            step = self.interval or len(layers) or 1
            yield from ((slice(start, start + step), bool(self.interval)) for start in range(0, len(layers), step))
            return
        chosen = {number - layers.start for number in self.choose(layers)}
        ends = sorted({0, len(layers), *chosen, *(number + 1 for number in chosen)})
        yield from ((slice(start, end), start in chosen) for start, end in pairwise(ends))


@dataclass(frozen=True)
class RandomState:
    """State of torch's generators of random numbers, on the host and on the device of the layers."""

    device: torch.device
    of_host: Tensor
    of_device: Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> "RandomState":
        """The state before the layers of a device draw."""
        of_device = None if device.type == "cpu" else get_accelerator().get_rng_state(device.index)
        return cls(device, torch.get_rng_state(), of_device)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Draw the same numbers again inside; afterwards the generators continue from their earlier states."""
        on_host = self.of_device is None
        forked = {"devices": []} if on_host else {"devices": [self.device], "device_type": self.device.type}
        with torch.random.fork_rng(**forked):
            torch.set_rng_state(self.of_host)
            if self.of_device is not None:
                get_accelerator().set_rng_state(self.of_device, self.device.index)
            yield


def bearing_gradients(outputs: Sequence[Tensor], inputs: Sequence[Tensor], parameters: Iterable[Tensor]) -> list[bool]:
    """Whether a stage that is computed again needs the gradient of each of its outputs [...].

    Without a graph it is unknown which outputs depend on weights. So all floating-point outputs count, if any tensor of
    the stage needs gradients, and the backward leaves out the other outputs.
    """
    needed = any(tensor.requires_grad for tensor in inputs) or any(weight.requires_grad for weight in parameters)
    return [needed and (output.is_floating_point() or output.is_complex()) for output in outputs]
