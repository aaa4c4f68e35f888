"""The number of ranks that flags state, for a dry run, which no launcher starts."""

from deepspeed_ext.plan.text.text_files import read_text
from megatron_terapipe.config.config import Config
from megatron_terapipe.errors import ConfigError


def stated_ranks(config: Config) -> int | None:
    """Return the slots of the hostfile, or the ranks that `--data-parallel-size` makes; None if neither is given.

    Raises:
        UserError: if the hostfile cannot be read.
    """
    path = config.training.hostfile
    if path is None:
        return None if config.parallel.data_parallel_size is None else config.parallel.least_world_size
    return sum(slots_of_hosts(path, "--hostfile"))


def slots_of_hosts(path: str, flag: str) -> list[int]:
    """Return the slots of each host of a hostfile.

    Raises:
        UserError: if it cannot be read.
    """
    # Imported where a hostfile is named: the search is not needed otherwise.
    from megatron_terapipe.search.inputs.hostfile import parse_hostfile

    try:
        return [host.slots for host in parse_hostfile(read_text(path, flag), path)]
    except ConfigError as error:
        raise ConfigError(f"{flag}: {error}") from None
