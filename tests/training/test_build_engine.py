"""The index of a rank's device among the visible ones."""

import pytest

from megatron_terapipe.errors import ConfigError
from megatron_terapipe.training.build_engine import own_device


def test_each_rank_has_its_own_device() -> None:
    assert [own_device(rank, 4) for rank in range(4)] == [0, 1, 2, 3]
    # As with one GPU for a task of srun: the other devices are not visible.
    assert [own_device(rank, 1) for rank in range(4)] == [0, 0, 0, 0]
    with pytest.raises(ConfigError, match=r"^local rank 4 has no device, because 4 are visible: "):
        own_device(4, 4)
