"""The optional packages that reporters need."""

from importlib.util import find_spec

from megatron_terapipe.config import LoggingConfig
from megatron_terapipe.errors import ConfigError


def check_packages(logging: LoggingConfig) -> None:
    """See that each package is installed that a flag needs.

    Raises:
        ConfigError: if one is not.
    """
    needed = {
        "tensorboard": ("--tensorboard-dir", logging.tensorboard_dir),
        "wandb": ("--wandb-project", logging.wandb_project),
    }
    for package, (flag, value) in needed.items():
        if value is not None and find_spec(package) is None:
            raise ConfigError(
                f"{flag} {value} needs the package {package}, which is not installed: pip install {package}"
            )
