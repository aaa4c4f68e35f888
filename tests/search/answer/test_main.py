from argparse import ArgumentParser, Namespace

import pytest

from megatron_terapipe.search import __main__ as search_program
from megatron_terapipe.search.__main__ import main
from megatron_terapipe.search.answer import flags
from megatron_terapipe.search.machine.cluster_files import parse_cluster
from tests.architecture.sources import ROOT


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text and command.summary in text for name, command in search_program.COMMANDS.items())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "error: no command is named: choose among rank, predict"),
        (["rnk"], "error: command 'rnk' is not known: did you mean rank?"),
        (["--json"], "error: unrecognized arguments: --json: see python -m megatron_terapipe.search --help"),
    ],
)
def test_errors_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(message)
    assert shown.err.count("\n") == 1
    assert not shown.out


def test_a_question_from_flags(capsys: pytest.CaptureFixture[str]) -> None:
    parser = ArgumentParser()
    flags.add_question_flags(parser)
    cluster = str(ROOT / "examples" / "clusters" / "p3.16xlarge-48.yaml")
    by_flags = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32".split()
    for words, found in (
        (["gpt3-13b", cluster, "--seq-length", "1024"], ("gpt3-13b", 1024, 384, "fp16")),
        (["-", cluster, *by_flags], ("2x64", 32, 384, "fp16")),
    ):
        problem, notes = flags.problem_of(parser.parse_args(words), 8)
        asked = problem.workload.name, problem.workload.seq_length, problem.cluster.num_devices, problem.precision
        assert asked == found and not notes
    batch = ["--global-batch-size", "8"]
    assert main(["rank", "-", cluster, *by_flags[2:], *batch]) == 2
    assert capsys.readouterr().err == "error: MODEL -: num_layers must be given: add it\n"
    for wrong in (["--precision", "fp8"], ["--seq-len", "8"]):
        assert main(["rank", "gpt3-13b", cluster, *wrong, *batch]) == 2
        assert wrong[0] in (printed := capsys.readouterr().err) and printed.count("\n") == 1


@pytest.mark.parametrize(("device", "precision"), [("T4", "fp16"), ("A100", "bf16"), ("cpu-core", "fp32")])
def test_precision_follows_the_devices(device: str, precision: str) -> None:
    cluster, _ = parse_cluster({"nodes": [{"device": device}]}, "c.json")
    assert flags.precision_of(Namespace(precision=None), cluster) == precision
    assert flags.precision_of(Namespace(precision="fp32"), cluster) == "fp32"
