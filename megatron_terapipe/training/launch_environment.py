"""Rank and size of this process, as its launcher gives them: deepspeed, torchrun, mpirun or srun."""

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from importlib.util import find_spec

from megatron_terapipe.errors import ConfigError

_VARIABLES = {
    "RANK": ("OMPI_COMM_WORLD_RANK", "SLURM_PROCID"),
    "WORLD_SIZE": ("OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS"),
    "LOCAL_RANK": ("OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"),
    "LOCAL_SIZE": ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE"),
}
"""Our names for each number, which torch and deepspeed read too, and what other launchers call it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchEnvironment:
    """Place of this process among all that were launched.

    Attributes:
        rank: among all processes.
        world_size: number of processes.
        local_rank: among those of this host.
        local_size: number of processes on this host.
    """

    rank: int
    world_size: int
    local_rank: int
    local_size: int

    @classmethod
    def read(
        cls,
        environment: Mapping[str, str] = os.environ,
        *,
        local_rank: int | None = None,
    ) -> "LaunchEnvironment":
        """Read the variables of whichever launcher set them; without a launcher, this process is alone.

        Args:
            environment: variables.
            local_rank: value of `--local_rank`, for launchers that pass it as a flag.

        Raises:
            ConfigError: if only some are set, or one is no number, or the rank is not one of them.
        """
        found = {name: _find(environment, name, others) for name, others in _VARIABLES.items()}
        rank, world_size = found["RANK"], found["WORLD_SIZE"]
        if rank is None and world_size is None:
            return cls.first_of(1)
        if rank is None or world_size is None:
            missing = "RANK" if rank is None else "WORLD_SIZE"
            raise ConfigError(f"{missing} is not set, but its counterpart is: start with deepspeed or torchrun")
        if not 0 <= rank < world_size:
            raise ConfigError(f"RANK {rank} is not below WORLD_SIZE {world_size}: start with deepspeed or torchrun")
        on_this_host = found["LOCAL_RANK"] if found["LOCAL_RANK"] is not None else local_rank
        return cls(
            rank=rank,
            world_size=world_size,
            local_rank=on_this_host or 0,
            # Where the launcher does not say: the most there can be, so that no two ranks share a core.
            local_size=found["LOCAL_SIZE"] or world_size,
        )

    @classmethod
    def of_dry_run(
        cls, environment: Mapping[str, str] = os.environ, *, stated: int | None, least: int
    ) -> "LaunchEnvironment":
        """Return the place of a dry run: as its launcher says, or the first of ranks that nobody launched.

        Args:
            environment: variables. Without a rank, they are not a launcher's, but may say how many ranks there will be.
            stated: number of ranks that the flags state; None if they do not.
            least: the least number of ranks that the run needs.

        Raises:
            ConfigError: as `read`.
        """
        rank, world_size = (_find(environment, name, _VARIABLES[name]) for name in ("RANK", "WORLD_SIZE"))
        if rank is not None:
            return cls.read(environment)
        return cls.first_of(stated or world_size or least)

    @classmethod
    def first_of(cls, world_size: int) -> "LaunchEnvironment":
        """Return the place of the first process, all of them on one host."""
        return cls(rank=0, world_size=world_size, local_rank=0, local_size=world_size)

    def export(self, environment: MutableMapping[str, str] = os.environ) -> None:
        """Set the variables that torch and deepspeed read; alone, also a place to meet, on a port that is free.

        Raises:
            ConfigError: if nobody said where the ranks meet.
        """
        environment["RANK"], environment["WORLD_SIZE"] = str(self.rank), str(self.world_size)
        environment["LOCAL_RANK"], environment["LOCAL_SIZE"] = str(self.local_rank), str(self.local_size)
        if self.world_size == 1:
            environment.setdefault("MASTER_ADDR", "127.0.0.1")
            # torch's store then takes any free port; nobody else needs to know it.
            environment.setdefault("MASTER_PORT", "0")
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]
        if missing and find_spec("mpi4py") is None:  # With it, DeepSpeed asks MPI.
            raise ConfigError(
                f"{' and '.join(missing)} not set, so the {self.world_size} ranks cannot meet: set them to the first "
                "host and a free port there, or start with deepspeed or torchrun"
            )


def _find(environment: Mapping[str, str], name: str, others: tuple[str, ...]) -> int | None:
    for variable in (name, *others):
        if variable in environment:
            try:
                return int(environment[variable])
            except ValueError:
                raise ConfigError(f"{variable}={environment[variable]!r} is not a number: set it as a rank") from None
    return None
