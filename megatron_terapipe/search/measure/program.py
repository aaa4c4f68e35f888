"""Reads the model of a program that calls `pretrain(layers)`, without its training."""

import runpy
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_terapipe.arguments import read_arguments
from megatron_terapipe.config import Config
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.training import pretrain as door
from megatron_terapipe.training.auto_plan import with_vocabulary
from megatron_terapipe.training.trained_model import Layers, TrainedModel


def model_of_program(words: Sequence[str]) -> tuple[TrainedModel, Config]:
    """Return the model of a program, and the configuration of its flags; it runs up to its call of `pretrain`.

    Args:
        words: the file of the program, and its flags.
    """
    program, calls = words[0], list[tuple[TrainedModel, dict[str, Any]]]()

    def called(layers: Layers, *, loss: Any = None, datasets: Any = None, flags: Any = None, argv: Any = None) -> int:
        own = {"own_flags": flags, "argv": sys.argv[1:] if argv is None else argv}
        calls.append((TrainedModel(layers, loss, datasets, Path(program).name), own))
        raise SystemExit

    pretrain, argv = door.pretrain, sys.argv
    sys.path.insert(0, str(Path(program).absolute().parent))
    door.pretrain, sys.argv = called, [*words]
    try:
        with suppress(SystemExit):
            runpy.run_path(program, run_name="__main__")
    except OSError as error:
        raise ConfigError(f"--program {program} cannot be read ({error.strerror}): give a Python file") from None
    finally:
        door.pretrain, sys.argv = pretrain, argv
    if not calls or calls[0][0].is_gpt:
        raise ConfigError(f"--program {program} does not call pretrain with layers of its own: give one that does")
    trained, own = calls[0]
    config = read_arguments(**own, program=trained.program, has_own_data=trained.datasets is not None).config
    trained.check(config)
    return trained, with_vocabulary(config)
