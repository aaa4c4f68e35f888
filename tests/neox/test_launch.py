"""How NeoX's settings say that processes are started."""

import shlex

import pytest

from megatron_terapipe.errors import ConfigError
from tests.neox.test_conversion import converted


def test_the_launcher_gets_its_own() -> None:
    conversion = converted(
        hostfile="/job/hostfile", num_nodes=2, num_gpus=8, master_port=29500, deepspeed_slurm=True, comment="a b"
    )
    launch = shlex.split(conversion.command().splitlines()[0].rstrip("\\"))
    assert launch == [
        *("deepspeed", "--hostfile", "/job/hostfile", "--num_nodes", "2", "--num_gpus", "8"),
        *("--launcher_args", "'--comment=a b'", "--launcher", "slurm", "pretrain_gpt.py"),
    ]


def test_a_comment_is_one_word_of_srun() -> None:
    """DeepSpeed splits these words as a shell does; `--task-prolog` names a program that srun runs."""
    conversion = converted(deepspeed_slurm=True, comment="a --task-prolog=/tmp/mine")
    (words,) = [value for name, value in conversion.launcher if name == "--launcher_args"]
    assert shlex.split(words) == ["--comment=a --task-prolog=/tmp/mine"]


def test_the_first_host_is_one() -> None:
    """DeepSpeed writes it into a command that the shells of all hosts read."""
    with pytest.raises(ConfigError, match=r'master_addr: "a;touch x" is not a host name'):
        converted(master_addr="a;touch x")
