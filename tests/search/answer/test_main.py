from argparse import ArgumentParser, Namespace
from types import SimpleNamespace

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


def command_that_adds(monkeypatch: pytest.MonkeyPatch, add_flags: object, run: object) -> None:
    found = SimpleNamespace(NAME="rank", HELP="ranks", EXAMPLES="", add_flags=add_flags, run=run)
    monkeypatch.setattr(search_program, "import_module", lambda name: found if name.endswith(".rank_command") else None)


def test_a_command_reads_its_flags(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def add_flags(parser: ArgumentParser) -> None:
        flags.add_model_flags(parser)
        flags.add_cluster_flags(parser)
        flags.add_cost_flags(parser)

    def run(options: Namespace) -> int:
        workload = flags.model_of(options)
        cluster, notes = flags.cluster_of(options)
        print(workload.name, workload.seq_length, cluster.num_devices, flags.precision_of(options, cluster), len(notes))
        return 0

    command_that_adds(monkeypatch, add_flags, run)
    cluster = str(ROOT / "examples" / "clusters" / "p3.16xlarge-48.yaml")
    assert main(["rank", "gpt3-13b", cluster, "--seq-length", "1024"]) == 0
    assert capsys.readouterr().out == "gpt3-13b 1024 384 fp16 0\n"
    by_flags = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32".split()
    assert main(["rank", "-", cluster, *by_flags]) == 0
    assert capsys.readouterr().out == "2x64 32 384 fp16 0\n"
    assert main(["rank", "-", cluster, *by_flags[2:]]) == 2
    assert capsys.readouterr().err == "error: MODEL -: num_layers must be given: add it\n"
    assert main(["rank", "gpt3-13b", cluster, "--precision", "fp8"]) == 2
    assert "--precision" in capsys.readouterr().err
    assert main(["rank", "gpt3-13b", cluster, "--seq-len", "8"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(("device", "precision"), [("T4", "fp16"), ("A100", "bf16"), ("cpu-core", "fp32")])
def test_precision_follows_the_devices(device: str, precision: str) -> None:
    cluster, _ = parse_cluster({"nodes": [{"device": device}]}, "c.json")
    assert flags.precision_of(Namespace(precision=None), cluster) == precision
    assert flags.precision_of(Namespace(precision="fp32"), cluster) == "fp32"
