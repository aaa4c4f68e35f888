"""Host names: what launchers hand to ssh, pdsh and mpirun as the name of a host, and never as anything else."""

import pytest

from megatron_terapipe.config.parsing import check_host_name, is_host_name
from megatron_terapipe.errors import ConfigError


@pytest.mark.parametrize(
    "name",
    [
        *("a", "worker-0", "node_7", "gpu01.cluster.example.com", "example.com.", "10.0.0.1", "7"),
        *("::1", "fe80::1%eth0", "2001:db8::7", "user@host", "first.last@10.0.0.1", "a" * 63),
    ],
)
def test_names_and_addresses(name: str) -> None:
    assert check_host_name(name, "hostfile") == name


@pytest.mark.parametrize(
    "name",
    [
        # Options of ssh and pdsh; two of them run a command.
        *("-oProxyCommand=touch${IFS}x", "-R", "-", "user@-oProxyCommand=x", "-l@host"),
        # What pdsh reads as another module, as a file of hosts, as a list, as a pattern, or as a host to leave out.
        *("exec:a", "^hosts", "a[0-3]", "/a/", "a,b", "a%n"),
        # What a shell reads.
        *(
            "a;id",
            "a|id",
            "a&id",
            "$(id)",
            "`id`",
            "a\nid",
            "a b",
            "a'b",
            'a"b',
            "a\\b",
            "~a",
            "a>b",
            "*",
            "a#b",
            "{a,b}",
        ),
        *("fe80::1%;id", "[::1]", "a..b", ".a", "", "@", "user@", "@host", "a@b@c", "a-", "é"),
        *("a" * 64, "a." * 130),
    ],
)
def test_what_is_no_host_name(name: str) -> None:
    assert not is_host_name(name)
    with pytest.raises(ConfigError, match="is not a host name") as caught:
        check_host_name(name, "hosts: line 1")
    assert "\n" not in str(caught.value)
