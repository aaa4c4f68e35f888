"""Pretrain a GPT with data, tensor, pipeline and token-slice parallelism, on DeepSpeed.

Flags describe the model and the data (`--help all`). For others give functions to `pretrain`:

    layers      the model, from token ids to the outputs that the loss takes
    loss        the mean loss of the labelled tokens of a token slice
    datasets    the data for training, validation and test
    flags       flags of the program, whose values `layers` and `datasets` get as `config.own`

`examples/pretrain_own_model.py` has all four; docs/how-to/own-models.md describes them. The trainer itself is in
`megatron_terapipe/training/pretrain.py`, in this order: parse, prepare, build, train.
"""

import os
import signal
import sys
from collections.abc import Sequence


def _end_before_the_run(*_: object) -> None:
    """Report Ctrl-C while modules are imported, which would end with a traceback."""
    if os.environ.get("LOCAL_RANK", "0") == "0" and "TERAPIPE_SAVE" not in os.environ:
        os.write(2, b"interrupted: the run had not begun: give the same command again\n")
    os._exit(130)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, _end_before_the_run)

from megatron_terapipe.training.pretrain import gpt_layers, pretrain  # noqa: E402


def main(argv: Sequence[str] | None = None) -> int:
    """Train by the flags of a command line; return the exit code: 2 for bad input, reported in one line."""
    return pretrain(gpt_layers, argv=argv)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
