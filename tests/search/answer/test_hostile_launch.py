"""Attacks on a launch: names of hosts, folders and values that would run a command here or on another host."""

import os
import subprocess
from pathlib import Path

import pytest
from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
from deepspeed.launcher.runner import EXPORT_ENVS

from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.answer.output_files import Launch, launch_of
from megatron_terapipe.search.machine.cluster_files import read_cluster
from megatron_terapipe.search.machine.launcher import check_remote_words, variables
from tests.end_to_end.conftest import SECRETS
from tests.search.answer.answers import answer

OPTION = "-oProxyCommand=touch${IFS}hit"
HOSTILE = [
    "$(touch hit)",
    "`touch hit`",
    "a;touch hit",
    "a|touch hit",
    "a&touch hit",
    'a"$(touch hit)',
    "a'$(touch hit)'",
    "a\ntouch hit",
]

DEEPSPEED = """#!/bin/bash
echo "password: ${MLFLOW_TRACKING_PASSWORD-none}"
words=()
for word in "$@"; do
    case "$word" in *\\ *) word="\\"${word//\\"/\\\\\\"}\\"" ;; esac
    words+=("$word")
done
eval "echo sent ${words[*]}"
"""
"""Stands for DeepSpeed's launcher: words with blanks between double quotes, all others as they are, read by a shell."""


def launch() -> Launch:
    """Of sixteen ranks on two hosts."""
    shown = answer()
    return launch_of(shown.entries[0].strategy, shown.workload.config, shown.cluster, "bf16")


def run(script: Path, *words: str, work: Path) -> subprocess.CompletedProcess[str]:
    """Run a launch script where `deepspeed` is one that hands its words to a shell, as the real one does to many."""
    program = work / "bin" / "deepspeed"
    program.parent.mkdir(exist_ok=True)
    program.write_text(DEEPSPEED)
    program.chmod(0o755)
    env = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}", "MLFLOW_TRACKING_PASSWORD": "secret"}
    return subprocess.run(["bash", str(script), *words], capture_output=True, text=True, check=False, env=env, cwd=work)


@pytest.mark.parametrize("ending", ["", ".json"])
def test_a_host_that_is_an_option_of_ssh_is_refused(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"cluster{ending}"
    path.write_text(
        f'{{"nodes": [{{"hosts": ["{OPTION}", "b"], "device": "T4"}}]}}' if ending else f"{OPTION} slots=1\nb slots=1\n"
    )
    with pytest.raises(ConfigError, match="is not a host name: write letters") as caught:
        read_cluster(str(path), device=None if ending else "T4")
    assert "ProxyCommand" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [name for name in HOSTILE if "/" not in name])
def test_an_output_folder_runs_nothing_here_or_on_other_hosts(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    with pytest.raises(ConfigError, match="which the shells of other hosts would read"):
        launch().command(str(folder))  # that people would copy
    launch().write(str(folder))
    done = run(folder / "launch.sh", work=tmp_path)
    assert done.returncode == 2 and "which the shells of other hosts would read" in done.stderr
    assert not list(tmp_path.rglob("hit"))
    # A dry run starts no launcher, and takes any folder.
    (tmp_path / "bin" / "python").write_text('#!/bin/sh\necho "$2" "$3"\n')
    (tmp_path / "bin" / "python").chmod(0o755)
    assert run(folder / "launch.sh", "--dry-run", work=tmp_path).stdout == f"--strategy {folder}/strategy.json\n"
    assert not list(tmp_path.rglob("hit"))


def test_a_plain_folder_is_launched_and_no_password_is_sent(tmp_path: Path) -> None:
    launch().write(str(tmp_path / "a plan"))
    done = run(tmp_path / "a plan" / "launch.sh", "--data-path", "x_1,y", work=tmp_path)
    assert done.stdout.startswith("password: none\nsent --hostfile"), done
    assert "a plan/strategy.json" in done.stdout and "x_1,y" in done.stdout


@pytest.mark.parametrize("word", HOSTILE)
def test_words_and_folders_that_shells_read(tmp_path: Path, word: str) -> None:
    launch().write(str(tmp_path))
    done = run(tmp_path / "launch.sh", "--data-path", word, work=tmp_path)
    assert done.returncode == 2 and not (tmp_path / "hit").exists()
    with pytest.raises(ConfigError, match="which the shells of other hosts would read"):
        check_remote_words(["--data-path", word])
    with pytest.raises(ConfigError, match="which the shells of other hosts would read"):
        check_remote_words([], Path("/tmp", word))


def test_words_that_pass() -> None:
    check_remote_words(["--token-slices", "8,8", "a b", "--x=1", "größe", "/a/b_c-d.e", ""], Path("/home/me/run-1"))


def test_a_trial_hands_no_password_of_mlflow_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "secret")
    assert "secret" not in variables(on_cpu=True).values()


def test_of_a_users_secrets_deepspeed_sends_none_but_those_of_mlflow(tmp_path: Path) -> None:
    """Its launcher over ssh exports variables by the beginnings of their names."""
    names = (*SECRETS, "OPENAI_API_KEY", "GITHUB_TOKEN", "SSH_AUTH_SOCK", "AZURE_CLIENT_SECRET")
    sent = (*EXPORT_ENVS, *CUDA_Accelerator().export_envs())
    assert [name for name in names if name.startswith(sent)] == ["MLFLOW_TRACKING_PASSWORD"]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o755), (0o077, 0o700), (0o027, 0o750)])
def test_the_script_has_the_permissions_that_the_user_gives_to_files(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        launch().write(str(tmp_path))
    finally:
        os.umask(before)
    assert (tmp_path / "launch.sh").stat().st_mode & 0o777 == mode
