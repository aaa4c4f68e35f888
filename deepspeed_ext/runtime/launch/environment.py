"""Rank and size of this process, as its launcher gives them: deepspeed, torchrun, mpirun or srun."""

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from importlib.util import find_spec

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.runtime.launch.launchers import TORCH, Meeting, launcher_of, number

__all__ = ["LaunchEnvironment"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchEnvironment:
    """Place of this process among all that were launched."""

    rank: int
    world_size: int
    local_rank: int
    """Among those of this host."""
    local_size: int
    """Number of processes on this host."""
    meeting: Meeting = field(default_factory=Meeting)
    """Where they meet, as far as the launcher knows it."""

    @classmethod
    def read(
        cls,
        environment: Mapping[str, str] = os.environ,
        *,
        local_rank: int | None = None,
    ) -> "LaunchEnvironment":
        """Read the variables of whichever launcher set them; without a launcher, this process is alone.

        Args:
            local_rank: value of `--local_rank`, for launchers that pass it as a flag.

        Raises:
            UserError: if only some are set, or they contradict each other, or one is no number.
        """
        launcher = launcher_of(environment)
        if launcher is None:
            if TORCH.size in environment:
                raise UserError("RANK is not set, but WORLD_SIZE is: start with deepspeed, torchrun, mpirun or srun")
            return cls.first_of(1)
        rank, world_size = number(environment, launcher.rank), number(environment, launcher.size)
        if rank is None or world_size is None:
            raise UserError(
                f"{launcher.size} is not set, but {launcher.rank} is: start with deepspeed, torchrun, mpirun or srun"
            )
        on_this_host = number(environment, launcher.local_rank)
        place = cls(
            rank=rank,
            world_size=world_size,
            local_rank=(local_rank or 0) if on_this_host is None else on_this_host,
            # Where the launcher does not say: the most there can be, so that no two ranks share a core.
            local_size=launcher.local_size(environment) or world_size,
            meeting=launcher.meeting(environment),
        )
        for mine, name, all_of_them, size in (
            (place.rank, launcher.rank, place.world_size, launcher.size),
            (place.local_rank, launcher.local_rank, place.local_size, "the number of ranks of this host"),
        ):
            if not 0 <= mine < all_of_them:
                raise UserError(
                    f"{name} {mine} is not below {size} {all_of_them}: start with deepspeed, torchrun, mpirun or srun"
                )
        return place

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
            UserError: as `read`.
        """
        sizes = [number(environment, name) for name in (TORCH.size, "SLURM_NTASKS")]
        unlaunched = {name: value for name, value in environment.items() if name not in (TORCH.size, "SLURM_NTASKS")}
        if launcher_of(unlaunched) is not None:
            return cls.read(environment)
        return cls.first_of(stated or sizes[0] or sizes[1] or least)

    @classmethod
    def first_of(cls, world_size: int) -> "LaunchEnvironment":
        """Return the place of the first process, all of them on one host."""
        return cls(rank=0, world_size=world_size, local_rank=0, local_size=world_size)

    def export(self, environment: MutableMapping[str, str] = os.environ) -> None:
        """Set the variables that torch and deepspeed read, the place to meet only where nobody has.

        Raises:
            UserError: if nobody said where the ranks meet.
        """
        environment["RANK"], environment["WORLD_SIZE"] = str(self.rank), str(self.world_size)
        environment["LOCAL_RANK"], environment["LOCAL_SIZE"] = str(self.local_rank), str(self.local_size)
        # Alone, torch's store takes any free port; nobody else needs to know it.
        meeting = Meeting(address="127.0.0.1", port=0) if self.world_size == 1 else self.meeting
        for name, value in (("MASTER_ADDR", meeting.address), ("MASTER_PORT", meeting.port)):
            if value is not None:
                environment.setdefault(name, str(value))
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]
        if missing and find_spec("mpi4py") is None:  # With it, DeepSpeed asks MPI.
            raise UserError(
                f"{' and '.join(missing)} not set, so the {self.world_size} ranks cannot meet: set them to the first "
                "host and a free port there, or start with deepspeed or torchrun"
            )
