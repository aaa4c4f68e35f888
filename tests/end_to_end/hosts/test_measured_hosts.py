"""Two hosts are measured through DeepSpeed's launcher, and the profile prices four of them."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_terapipe.search.price.profile import read_profile
from tests.end_to_end.hosts.network import Network, missing, network
from tests.end_to_end.launching import DEEPSPEED

pytestmark = [pytest.mark.hosts, pytest.mark.thorough]

RATE_MBIT = 500
MODEL = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 32, "vocab_size": 128}
SLOW = {"bandwidth": "100 Gbit/s", "latency": "1 us"}


@pytest.fixture(scope="module")
def slow_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """Two hosts whose cards send at `RATE_MBIT`."""
    if reason := missing():
        pytest.skip(reason)
    with network(2, tmp_path_factory.mktemp("hosts")) as made:
        made.limit_rate(RATE_MBIT)
        yield made


def test_a_profile_of_two_hosts_prices_more_of_them(slow_hosts: Network, tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text(slow_hosts.hostfile())
    (tmp_path / ".deepspeed_env").write_text("DS_ACCELERATOR=cpu\nOMP_NUM_THREADS=1\n")
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    node = {"count": 4, "device": "cpu-core", "devices": 1, "network": SLOW}
    (tmp_path / "cluster.json").write_text(json.dumps({"nodes": [node]}))

    def search(*words: str) -> str:
        path = f"{DEEPSPEED.parent}:/usr/bin:/bin:/usr/sbin:/sbin"
        command = [sys.executable, "-m", "megatron_terapipe.search", *words]
        done = slow_hosts.hosts[0].run(command, tmp_path, PATH=path)
        assert done.returncode == 0, done.stdout
        return done.stdout

    sizes = ("--micro-batch-size", "1", "--num-token-slices", "1", "--budget-s", "1")
    printed = search("measure", "model.json", "--hostfile", "hostfile", *sizes)
    assert "measuring on 2 ranks on 2 hosts, fp32" in printed
    assert "messages between nodes" in printed
    assert "links between hosts, which stay" not in printed
    profile = read_profile(str(tmp_path / "profile.json"))
    assert (profile.num_nodes, profile.num_devices) == (2, 1)
    assert [(link.where, link.what, link.num_ranks) for link in profile.links] == [
        ("network", "all_reduce", 2),
        ("network", "transfer", 2),
    ]
    # No message is faster than the card, whatever else the machine does; the cluster file promises 200 times that.
    for link in profile.links:
        num_bytes, seconds = link.points[-1]
        assert seconds > 8 * num_bytes / (1.5 * RATE_MBIT * 1e6), link

    def iteration_s(*words: str) -> float:
        answer = tmp_path / "answer.json"
        fixed = "--global-batch-size 4 --data-parallel-size 4 --micro-batch-size 1 --num-token-slices 1".split()
        search("rank", "model.json", "cluster.json", *fixed, "--top", "1", "--json", str(answer), *words)
        found = json.loads(answer.read_text())
        return float(found["entries"][0]["predicted"]["iteration_time_s"])

    measured_s, no_network = (
        iteration_s("--profile", "profile.json"),
        json.loads((tmp_path / "profile.json").read_text()),
    )
    no_network["links"] = []
    (tmp_path / "no-network.json").write_text(json.dumps(no_network))
    assert measured_s > iteration_s("--profile", "no-network.json")
