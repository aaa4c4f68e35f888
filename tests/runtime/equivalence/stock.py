"""DeepSpeed's own pipeline engine, on layers that need no token slices, for comparison."""

from typing import Any

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor, nn
from torch.nn import functional as F

ROWS, TOKENS, WIDTH = 2, 6, 8


class Square(nn.Module):
    """A weight that is used at both ends of a pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.5)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden @ self.weight


class Lookup(nn.Module):
    """An embedding: its input needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.linear(hidden).tanh()


def transposed(square: Square, hidden: Tensor) -> Tensor:
    return hidden @ square.weight.t()


def squared_error(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.mse_loss(outputs.float(), labels.float())


def dense_layers(*, tied: bool = False) -> list[LayerSpec]:
    dense = [LayerSpec(Dense) for _ in range(4)]
    if not tied:
        return dense
    return [TiedLayerSpec("square", Square), *dense, TiedLayerSpec("square", Square, forward_fn=transposed)]


def pairs(count: int, *, rows: int = ROWS, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Any]:
    """Micro-batches of random inputs and labels."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (inputs.to(dtype), labels) for inputs, labels in torch.randn(count, 2, rows, TOKENS, WIDTH, generator=generator)
    ]


def stock_engine(
    layers: list[Any], config: dict[str, Any], *, stages: int, lr: float = 1.0, **module_keywords: Any
) -> PipelineEngine:
    """DeepSpeed's engine of a `PipelineModule`; its gradients accumulate over two micro-batches."""
    module_keywords.setdefault("loss_fn", squared_error)
    torch.manual_seed(0)
    model = PipelineModule(layers, num_stages=stages, seed_layers=True, partition_method="uniform", **module_keywords)
    settings = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": 2,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "gradient_clipping": 0.0,
    }
    engine, *_ = deepspeed.initialize(
        model=model, config=settings | config, optimizer=torch.optim.SGD(list(model.parameters()), lr=lr)
    )
    return engine
