"""Reads the model of a program that calls `pretrain(layers)`, without its training."""

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_terapipe.arguments import read_arguments
from megatron_terapipe.config import Config
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.training import pretrain as door
from megatron_terapipe.training.auto_plan import with_vocabulary
from megatron_terapipe.training.trained_model import Layers, TrainedModel


class _Called(BaseException):
    """Ends a program where it calls `pretrain`."""

    def __init__(self, layers: Layers, more: dict[str, Any]) -> None:
        self.layers, self.more = layers, more


def model_of_program(words: Sequence[str]) -> tuple[TrainedModel, Config]:
    """Return the model of a program, and the configuration of its flags; it runs up to its call of `pretrain`.

    Args:
        words: the file of the program, and its flags.
    """
    program = words[0]

    def called(layers: Layers, **more: Any) -> int:
        raise _Called(layers, {**more, "argv": sys.argv[1:] if more.get("argv") is None else more["argv"]})

    pretrain, argv = door.pretrain, sys.argv
    sys.path.insert(0, str(Path(program).absolute().parent))
    door.pretrain, sys.argv = called, [*words]
    try:
        runpy.run_path(program, run_name="__main__")
    except _Called as call:
        layers, more = call.layers, call.more
    except OSError as error:
        raise ConfigError(f"--program {program} cannot be read ({error.strerror}): give a Python file") from None
    else:
        raise ConfigError(f"--program {program} does not call pretrain(layers): give the file that trains the model")
    finally:
        door.pretrain, sys.argv = pretrain, argv
    model = TrainedModel(layers, more.get("loss"), more.get("datasets"), Path(program).name)
    if model.is_gpt:
        raise ConfigError(f"--program {program} trains the GPT: give MODEL instead")
    arguments = read_arguments(
        more["argv"],
        program=model.program,
        own_flags=more.get("flags"),
        has_own_data=model.datasets is not None,
    )
    model.check(arguments.config)
    return model, with_vocabulary(arguments.config)
