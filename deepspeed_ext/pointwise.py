"""Pointwise functions that `torch.compile` makes one kernel of, where that pays.

On an accelerator every operation is a launch, and a chain of pointwise operations reads and writes its tensors once
per link. Compiled, a chain is one kernel or two. On CPUs a launch costs little, and compiling costs seconds of every
start, so functions run there as they are written. Both ways compute the same formula: it is written once.

Functions take no numbers that change from call to call, or torch would compile them for every token slice.

    TERAPIPE_COMPILE_POINTWISE     where functions are compiled
    auto (default)                 on accelerators that have triton
    always                         on CPUs, too
    never                          nowhere
"""

import os
import stat
from collections.abc import Callable, Mapping
from functools import cache, cached_property
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

import torch

from deepspeed_ext.plan.errors import UserError

VARIABLE = "TERAPIPE_COMPILE_POINTWISE"
"""Variable of the environment for where functions are compiled."""

CHOICES = ("auto", "always", "never")
"""Its values, the default first."""

CACHE_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
"""Variable of the environment that names the folder of compiled code."""

KINDS = 64
"""Kinds of arguments that a function is compiled for at most."""


class Pointwise:
    """A function of tensors, compiled on the devices where that pays. Its first argument is on the device of all.

    The function must not depend on the values of its tensors, and autograd does not see into it: it is called inside
    the forward and the backward of an `autograd.Function`. Sizes may change from call to call: it is compiled for the
    first, and at the second for any.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__doc__ = function.__doc__

    def __call__(self, *arguments: Any) -> Any:
        """Call the function."""
        if not self.is_compiled_on(arguments[0].device):
            return self.function(*arguments)
        try:
            # Whether a tensor requires gradients changes nothing here, and would be compiled for.
            return self._compiled(*(each.detach() if isinstance(each, torch.Tensor) else each for each in arguments))
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(
                f"torch cannot compile {self.function.__name__} here ({reason}): set {VARIABLE}=never, or train with "
                "--compile-pointwise never"
            ) from error

    def is_compiled_on(self, device: torch.device) -> bool:
        """Whether a call with tensors of a device is compiled."""
        return is_compiled(device.type, os.environ.get(VARIABLE, CHOICES[0]))

    @cached_property
    def _compiled(self) -> Callable[..., Any]:
        check_cache_folder()
        # Each type, one token and many, other strides are compiled for. Beyond the limit a function runs as it is
        # written; releases of torch that take no limit have one of 8.
        settings: dict[str, Any] = {}
        if "recompile_limit" in signature(torch.compile).parameters:
            settings["recompile_limit"] = KINDS
        from torch._inductor import config

        # Inductor's own launcher holds the lock of Python's interpreter in a launch that waits for a full queue, and
        # while it loads a kernel, so that no thread could report a hang. Triton's releases it.
        if hasattr(config, "use_static_cuda_launcher"):
            settings["options"] = {"use_static_cuda_launcher": False}
        return torch.compile(self.function, **settings)


def check_cache_folder(environment: Mapping[str, str] = os.environ) -> None:
    """Refuse compiled code of other users: it is under /tmp, in a folder with a predictable name."""
    if CACHE_FOLDER in environment:
        return
    # Makes the folder where there is none.
    from torch._inductor.codecache import cache_dir

    folder = Path(cache_dir())
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & stat.S_IWOTH:
        raise UserError(
            f"{folder}, where torch keeps code that it compiled, is another user's or lets others write: set "
            f"{CACHE_FOLDER} to a folder of your own"
        )


@cache
def is_compiled(device_type: str, choice: str) -> bool:
    """Whether functions are compiled on a device."""
    if choice not in CHOICES:
        raise UserError(f"{VARIABLE}={choice} is not known: set it to {', '.join(CHOICES[:-1])} or {CHOICES[-1]}")
    if choice != "auto" or device_type in ("cpu", "meta"):
        return choice == "always" and device_type != "meta"
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    return (
        device_type == accelerator.device_name()
        and accelerator.is_triton_supported()
        and find_spec("triton") is not None
    )
