"""Lists as Slurm writes them: hosts with ranges of numbers, and how many tasks each node has."""

import re

from deepspeed_ext.plan.errors import UserError

_FIRST_HOST = re.compile(r"(?:[^,\[\]]|\[\d[\d,-]*\])+")
_FIRST_NUMBER = re.compile(r"\[(\d+)[^\]]*\]")
_SAME_NODES = re.compile(r"(\d{1,9})(?:\(x(\d{1,9})\))?")


def first_host(hosts: str) -> str:
    """Return the first host of a list such as `rack[03-05,9]-gpu[1-2],login`, here `rack03-gpu1`.

    Raises:
        UserError: if it is no such list.
    """
    first = _FIRST_HOST.match(hosts)
    if first is None:
        raise UserError(f"{hosts[:80]!r} is not a list of hosts as Slurm writes it: set MASTER_ADDR to the first host")
    return _FIRST_NUMBER.sub(r"\1", first[0])


def tasks_of_node(counts: str, node: int) -> int:
    """Return the number of tasks of a node.

    Args:
        counts: of all nodes, such as `4(x2),1` for three nodes of 4, 4 and 1 tasks.
        node: its number, from 0.

    Raises:
        UserError: if the list does not say it.
    """
    passed = 0
    for part in counts.split(","):
        same = _SAME_NODES.fullmatch(part)
        if same is None:
            break
        passed += int(same[2] or 1)
        if node < passed:
            return int(same[1])
    raise UserError(
        f"{counts[:80]!r} does not say how many tasks node {node} has, as 4(x2),1 does: set RANK, WORLD_SIZE, "
        "LOCAL_RANK and LOCAL_SIZE"
    )
