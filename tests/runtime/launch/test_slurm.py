"""Lists of Slurm."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.runtime.launch import first_host, tasks_of_node


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node1", "node1"),
        ("tslice-29807-1-host[1-2]", "tslice-29807-1-host1"),
        ("gpu[003-005,009],login", "gpu003"),
        ("login,gpu[3-5]", "login"),
        ("rack[03-05,9]-gpu[1-2]", "rack03-gpu1"),
        ("a[7].example.org,b", "a7.example.org"),
    ],
)
def test_the_first_host_of_a_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


def test_no_list_of_hosts_is_refused_in_one_line() -> None:
    for hosts in ("", "[", ",a", "[a-b]"):
        with pytest.raises(UserError, match=r"is not a list of hosts as Slurm writes it: set MASTER_ADDR"):
            first_host(hosts)


@given(st.lists(st.tuples(st.integers(1, 99), st.integers(1, 5)), min_size=1, max_size=5), st.data())
def test_every_node_has_the_tasks_that_the_list_says(runs: list[tuple[int, int]], data: st.DataObject) -> None:
    text = ",".join(f"{tasks}(x{nodes})" if nodes > 1 else str(tasks) for tasks, nodes in runs)
    expanded = [tasks for tasks, nodes in runs for _ in range(nodes)]
    node = data.draw(st.integers(0, len(expanded) - 1))
    assert tasks_of_node(text, node) == expanded[node]
    with pytest.raises(UserError, match="does not say how many tasks node"):
        tasks_of_node(text, len(expanded))


def test_a_list_of_very_many_nodes_takes_no_time() -> None:
    assert tasks_of_node("8(x999999999),1", 999_999_999) == 1
    with pytest.raises(UserError):
        tasks_of_node("8(x" + "9" * 5000 + ")", 0)
