"""TeraPipe's settings, and the measurements of its authors (arXiv 2102.07988, section 4).

Published times are seconds of an iteration, without and with token slices, the mean of five iterations. Settings that
have none here are predicted all the same.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Published:
    """Times that the authors measured."""

    without_s: float
    """Seconds with whole sequences."""
    with_s: float
    """Seconds with the token slices that their program found."""
    token_slices: tuple[int, ...] | None = None
    """Lengths of these token slices; None = not published."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A model, and how it is spread over the devices; every node has eight."""

    name: int | str
    """Number of the setting, or of the sweep model and length."""
    model: str
    num_layers: int
    """Transformer layers, which are all there is."""
    hidden_size: int
    """Width of the activations; the MLP is four times as wide."""
    num_heads: int
    seq_length: int = 2048
    """Tokens of a sequence."""
    global_batch_size: int
    """Sequences of an iteration."""
    data_parallel_size: int
    pipeline_parallel_size: int
    tensor_parallel_size: int
    published: Published | None = None
    """Measurements of the authors; None = not available here."""


_GPT3_1B = ("GPT3-1B", 24, 2048, 16)
_GPT3_13B = ("GPT3-13B", 40, 5120, 40)
_GPT3_44B = ("GPT3-44B", 96, 6144, 48)
_GPT3_175B = ("GPT3-175B", 96, 12288, 96)

_TOKEN_SLICES_175B = (*[120] * 4, *[112] * 6, *[104] * 8, 64)


def _setting(
    name: int | str,
    model: tuple[str, int, int, int],
    batch: int,
    sizes: tuple[int, int, int],
    published: Published | None = None,
    seq_length: int = 2048,
) -> Setting:
    data, pipeline, tensor = sizes
    return Setting(
        name=name,
        model=model[0],
        num_layers=model[1],
        hidden_size=model[2],
        num_heads=model[3],
        seq_length=seq_length,
        global_batch_size=batch,
        data_parallel_size=data,
        pipeline_parallel_size=pipeline,
        tensor_parallel_size=tensor,
        published=published,
    )


SETTINGS = (
    _setting(1, _GPT3_1B, 128, (8, 24, 1), Published(1.517, 1.254)),
    _setting(2, _GPT3_1B, 72, (2, 12, 8)),
    _setting(3, _GPT3_1B, 72, (1, 24, 8)),
    _setting(4, _GPT3_13B, 32, (2, 20, 8)),
    _setting(5, _GPT3_13B, 32, (1, 40, 8), Published(1.863, 1.328, (704, 688, 656))),
    _setting(6, _GPT3_44B, 8, (4, 96, 1)),
    _setting(7, _GPT3_44B, 8, (2, 24, 8)),
    _setting(8, _GPT3_44B, 8, (1, 48, 8), Published(2.662, 1.111, (384, 384, 368, 320, 296, 296))),
    _setting(9, _GPT3_175B, 2, (1, 96, 4), Published(9.990, 1.481, _TOKEN_SLICES_175B)),
    _setting(10, _GPT3_175B, 2, (1, 48, 8)),
)

SWEEP = tuple(
    _setting(f"gpt3-13b-{seq_length}", _GPT3_13B, batch, (1, 40, 8), seq_length=seq_length)
    for seq_length, batch in ((2048, 32), (4096, 8), (6144, 4), (8192, 2))
)
"""The 13B model with longer sequences, in the layout of setting 5."""

EQUAL_TOKEN_SLICES = {
    8: {1: 2.662, 4: 1.241, 8: 1.255, 16: 1.241},
    9: {1: 9.990, 4: 2.902, 8: 1.892, 16: 1.547, 32: 1.593, 64: 2.227, 128: 3.252},
}
"""Seconds by setting and number of token slices of equal length."""
