"""Pretrain a GPT with data, tensor, pipeline and token-slice parallelism, on DeepSpeed.

    model    `layers` below, by the flags of `--help model`
    loss     `loss` below
    data     by the flags of `--help data`: token ids that `terapipe preprocess` wrote, or `--mock-data`
    flags    fields of the sections in `megatron_terapipe/config`

All else is in `megatron_terapipe/training/pretrain.py`, in this order: parse, prepare, build, train.
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from deepspeed_ext.runtime.health.processes import ProcessEnd
from megatron_terapipe.config import Config
from megatron_terapipe.training.pretrain import pretrain

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_terapipe.model.gpt import ModelRanks

# torch takes seconds to import: the functions import it when they are called, after the flags have been checked.


def layers(config: Config, ranks: "ModelRanks") -> list[Any]:
    """Return the model as layers for the stages: embeddings, transformer layers, final norm, output layer."""
    from megatron_terapipe.model.gpt import gpt_of_run

    return gpt_of_run(config, ranks)


def loss(outputs: Any, labels: "tuple[Tensor, Tensor]") -> "Tensor":
    """Return the mean cross-entropy of a token slice.

    Args:
        outputs: of the last layer.
        labels: the next token ids [B, N], and a mask [B, N] that is 1 where they count.
    """
    from megatron_terapipe.model.gpt import gpt_loss

    return gpt_loss(outputs, labels)


def main(argv: Sequence[str] | None = None) -> int:
    """Train by the flags of a command line; return the exit code: 2 for bad input, reported in one line."""
    return pretrain(layers, loss, argv)


if __name__ == "__main__":
    end = ProcessEnd()
    end.code = main()
    sys.exit(end.code)
