"""Which of the devices that a process sees is its own."""

import pytest

from megatron_terapipe.errors import ConfigError
from megatron_terapipe.training.build_engine import own_device


def test_of_all_devices_of_a_host_each_rank_takes_its_own() -> None:
    assert [own_device(rank, 4) for rank in range(4)] == [0, 1, 2, 3]


def test_where_each_rank_sees_one_device_it_is_the_first() -> None:
    """As srun with one GPU for a task does; the index of the others does not exist."""
    assert [own_device(rank, 1) for rank in range(4)] == [0, 0, 0, 0]


def test_more_ranks_than_devices_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        own_device(4, 4)
    assert str(caught.value) == (
        "local rank 4 has no device, because it sees 4: start 4 ranks on a host, or let each rank see one device "
        "of its own"
    )
