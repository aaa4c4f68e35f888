"""Profiles made of known terms, as if a machine had been measured that has no noise."""

from megatron_terapipe.config import ModelConfig
from megatron_terapipe.search.price.profile import (
    FORMAT,
    LayerShape,
    OpPoint,
    Profile,
    ProfiledEngine,
    ProfiledLayer,
    ProfiledLink,
)
from megatron_terapipe.search.price.workload import Workload, gpt_workload

MODEL = ModelConfig(num_layers=4, hidden_size=64, num_attention_heads=4, seq_length=64, vocab_size=256)
SIZES, LENGTHS = (1, 2, 4), (8, 16, 32, 64)


def workload() -> Workload:
    return gpt_workload(MODEL)


def seconds(size: int, start: int, end: int, tensor: int = 1, window: int | None = None) -> float:
    """A forward: fixed, linear and quadratic."""
    rows = size * (end - start)
    positions = size * sum(min(token + 1, window or end) for token in range(start, end))
    return 1e-4 + (2e-6 * rows + 1e-8 * positions) / tensor


def op_point(
    size: int, start: int, end: int, tensor: int = 1, recomputed: float = 0.0, window: int | None = None
) -> OpPoint:
    forward = seconds(size, start, end, tensor, window)
    return OpPoint(size, start, end, forward, 1.5 * forward + recomputed * size * (end - start), 0.8 * forward)


def profile(
    tensor_parallel_sizes: tuple[int, ...] = (1, 2), *, selective: bool = True, model: ModelConfig = MODEL
) -> Profile:
    layers_of_model = gpt_workload(model).layers
    cuts = [(size, start, start + length) for size in SIZES for length in LENGTHS for start in range(0, 64, length)]
    layers = []
    for layer in {LayerShape.of(each): each for each in layers_of_model}.values():
        places = cuts if layer.attention else [(size, 0, length) for size in SIZES for length in LENGTHS]
        window = layer.attention.sliding_window if layer.attention else None
        for tensor in tensor_parallel_sizes:
            points = tuple(op_point(*place, tensor, window=window) for place in places)
            layers.append(
                ProfiledLayer(shape=LayerShape.of(layer), tensor_parallel_size=tensor, recompute="none", points=points)
            )
            if layer.attention and selective:
                cheap = [(size, 0, length, tensor, 5e-7, window) for size in (1, 4) for length in (8, 64)]
                points = tuple(op_point(*each) for each in cheap)
                layers.append(
                    ProfiledLayer(
                        shape=LayerShape.of(layer), tensor_parallel_size=tensor, recompute="selective", points=points
                    )
                )
    messages = tuple((size, 2e-4 + size / 1e9) for size in (2**10, 2**14, 2**18, 2**22))
    return Profile(
        format=FORMAT,
        device="a processor",
        accelerator="cpu",
        num_devices=2,
        precision="fp32",
        software={"torch": "2"},
        layers=tuple(layers),
        links=(
            ProfiledLink(where="inside", what="all_reduce", num_ranks=2, points=messages),
            ProfiledLink(where="inside", what="transfer", num_ranks=2, points=messages),
        ),
        engine=ProfiledEngine(op_s=2e-4, optimizer_s_per_parameter=1e-9, iteration_s=1e-3),
    )
