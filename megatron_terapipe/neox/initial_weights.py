"""Settings of the initial weights."""

from math import sqrt

from megatron_terapipe.arguments.megatron_flags.unsupported_flags import TRAINING
from megatron_terapipe.neox.conversion import Conversion

NOT_NORMAL = ("orthogonal", "scaled_orthogonal", "xavier_uniform", "xavier_normal")
"""Methods of NeoX whose numbers are not drawn from one normal distribution."""


def convert_initial_weights(conversion: Conversion) -> None:
    """Convert how weights start: the standard deviation of most of them, and that of writers to the residual stream."""
    std = conversion.number("init_method_std", 0.02)
    methods = {
        "--init-method-std": ("init_method", conversion.take("init_method", "normal")),
        "--output-layer-init-std": (
            "output_layer_init_method",
            conversion.take("output_layer_init_method", "scaled_normal"),
        ),
    }
    hidden_size, layers = conversion.count("hidden_size"), conversion.count("num_layers")
    if not hidden_size or not layers:
        return
    for flag, (key, method) in methods.items():
        start = standard_deviation(method, std, hidden_size=hidden_size, num_layers=layers)
        if start is None:
            reason = "weights start from a normal distribution" if method in NOT_NORMAL else "no method of NeoX"
            conversion.refuse(f"{key} {method}", reason, TRAINING)
        else:
            conversion.flag(flag, repr(start))


def standard_deviation(method: str, std: float, *, hidden_size: int, num_layers: int) -> float | None:
    """Return the standard deviation of a method of NeoX; None if it is not one number for every matrix."""
    known = {
        "normal": std,
        "scaled_normal": std / sqrt(2 * num_layers),
        # One residual a layer instead of two.
        "single_residual_scaled_normal": std / sqrt(num_layers),
        # Nguyen and Salazar, arXiv 1910.05895, section 2.2: Xavier's for a matrix of d x 4d.
        "small_init": sqrt(2 / (5 * hidden_size)),
        # GPT-J's, by its author Ben Wang.
        "wang_init": 2 / (num_layers * sqrt(hidden_size)),
    }
    return known.get(method)
