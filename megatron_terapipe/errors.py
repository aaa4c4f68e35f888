"""The faults of a user's configuration, data or checkpoint, as the command lines report them."""

from collections.abc import Iterator
from contextlib import contextmanager

from deepspeed_ext.plan.errors import UserError


class ConfigError(UserError):
    """An option or a combination of options that cannot be trained."""


class DataError(UserError):
    """A corpus, a tokenizer file or an indexed dataset that cannot be used as it is."""


class CheckpointError(UserError):
    """A checkpoint that is missing, incomplete, or of another model."""


class NumbersError(UserError):
    """Numbers of a run that are wrong: NaN, infinite, or copies that differ.

    Every rank raises it alike, and the first rank reports it.
    """


class AgreedCheckpointError(CheckpointError):
    """One that every rank raises at the same time, so that one of them reports it."""


class AgreedDataError(DataError):
    """One that every rank raises at the same time, so that one of them reports it."""


class LayersError(ConfigError):
    """Layers of a program that cannot be trained. Every rank raises it, so that one of them reports it."""


class SearchError(ConfigError):
    """One that the first rank found, and that every rank raises, so that the first reports it."""


class SaveError(AgreedCheckpointError):
    """A checkpoint that could not be saved. Those before are whole."""


@contextmanager
def errors_in(place: str) -> Iterator[None]:
    """Raise an error of a user as a `ConfigError`, after the flag or the file that it is in, if that is not empty."""
    try:
        yield
    except UserError as error:
        raise ConfigError(f"{place}: {error}" if place else str(error)) from None


MODEL_CANNOT_BE_TRAINED = "this model cannot be trained here"
"""End of a line about a part of a model that this trainer does not have: without it, another would be trained."""

TRAINING_CANNOT_BE_RUN = "this training cannot be run here"
"""End of a line about data, loss or numbers that this trainer does not have."""

EXTRA_OF = {
    "safetensors": "huggingface",
    "sentencepiece": "data",
    "tensorboard": "logging",
    "tiktoken": "data",
    "wandb": "logging",
    "zstandard": "data",
}
"""The extra of setup.py that brings a package which only some flags need."""


def not_installed(package: str) -> str:
    """Return the end of a line about a missing package.

    It names the package itself, which can be installed everywhere, also in a checkout that was never installed.
    """
    return f"the package {package}, which is not installed: pip install {package} (extra: {EXTRA_OF[package]})"


def first_line(error: Exception) -> str:
    """Return the first line of an error, or its type if it has no text."""
    return (str(error).splitlines() or [type(error).__name__])[0]
