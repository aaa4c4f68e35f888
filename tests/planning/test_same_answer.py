"""One run has one answer: the trainer, `slices` and `rank` find the same token slices and predict the same time."""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from deepspeed_ext.plan.errors import UserError
from megatron_terapipe.arguments import parse_arguments
from megatron_terapipe.config import Config
from megatron_terapipe.planning import cost_model_of, pipeline_schedule, with_found_token_slices
from megatron_terapipe.search.__main__ import main
from megatron_terapipe.search.answer import slices_command
from megatron_terapipe.search.answer.question import question_of
from megatron_terapipe.search.price.profile import write_profile
from megatron_terapipe.strategy import Strategy
from tests.search.price.profiles import profile

LARGE = "--num-layers 8 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --vocab-size 32000"
MEASURED = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 256"
DATA_PARALLEL_SIZE = 2


@dataclass(frozen=True)
class Case:
    """A run, with its flags for the trainer and for the search.

    Attributes:
        model: flags of the model.
        sizes: fields of the strategy.
        trainer: more flags of the trainer.
        search: the cluster, and more flags of the search.
    """

    model: str
    sizes: dict[str, int]
    trainer: tuple[str, ...]
    search: tuple[str, ...]

    def strategy(self, **more: object) -> Strategy:
        return Strategy(pipeline_parallel_size=4, data_parallel_size=DATA_PARALLEL_SIZE, **self.sizes, **more)

    def config(self, *words: str) -> Config:
        fixed = "--train-iters 1 --lr 1e-3 --mock-data --pipeline-model-parallel-size 4"
        sizes = [word for name, size in self.sizes.items() for word in (f"--{name.replace('_', '-')}", str(size))]
        return parse_arguments([*self.model.split(), *fixed.split(), *sizes, *self.trainer, *words])

    def found(self, *words: str) -> Config:
        return with_found_token_slices(self.config("--token-slices", "auto", *words), DATA_PARALLEL_SIZE)

    def answer_of_command(self, folder: Path, strategy: Strategy, *words: str) -> dict:
        files = [folder / name for name in ("strategy.json", "answer.json")]
        files[0].write_text(json.dumps(strategy.to_json()))
        given = ["-", *self.search, *self.model.split(), "--strategy", str(files[0]), "--json", str(files[1]), *words]
        assert main(["slices", *given]) == 0
        return json.loads(files[1].read_text())


@pytest.fixture(params=["data sheets", "profile"])
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    """The first has no cluster, so that the default counts; the second has one, and of a profile."""
    cluster, measured = tmp_path / "cluster.json", tmp_path / "profile.json"
    sizes = {"micro_batch_size": 1, "global_batch_size": 4}
    if request.param == "data sheets":
        cluster.write_text('{"nodes": [{"machine": "dgx-a100"}]}')
        return Case(LARGE, sizes, ("--bf16",), (str(cluster), "--precision", "bf16"))
    cluster.write_text('{"nodes": [{"machine": "p3.8xlarge", "count": 2}]}')
    write_profile(profile(), str(measured))
    sizes = {"micro_batch_size": 4, "global_batch_size": 16}
    mine = ("--cluster", str(cluster), "--op-profile", str(measured))
    return Case(MEASURED, sizes, mine, (str(cluster), "--precision", "fp32", "--profile", str(measured)))


def test_auto_and_the_commands_agree(case: Case, tmp_path: Path) -> None:
    found = case.found()
    answer = case.answer_of_command(tmp_path, case.strategy())
    assert found.token_slices().lengths == tuple(answer["best"]["token_slices"])
    assert len(answer["best"]["token_slices"]) > 1
    predicted = cost_model_of(found, 8).predict_time(Strategy.of_config(found, DATA_PARALLEL_SIZE))
    assert predicted.iteration_time_s == pytest.approx(answer["best"]["iteration_time_s"], rel=1e-12)

    pins = "--pipeline-parallel-size 4 --data-parallel-size 2 --num-token-slices 3 --schedule 1f1b --zero-stage 1 "
    pins += "--num-model-chunks 1 --recompute none --stage-partition uniform --sequence-parallel off --all-variants"
    batch = ["--global-batch-size", str(case.sizes["global_batch_size"])]
    batch += ["--micro-batch-size", str(case.sizes["micro_batch_size"])]
    ranking = tmp_path / "ranking.json"
    assert main(["rank", "-", *case.search, *case.model.split(), *batch, *pins.split(), "--json", str(ranking)]) == 0
    three = case.found("--num-token-slices", "3")
    # Equal token slices, and those that were solved for, which are better.
    solved, _ = json.loads(ranking.read_text())["entries"]
    assert three.token_slices().lengths == tuple(solved["strategy"]["token_slices"])
    predicted = cost_model_of(three, 8).predict_time(Strategy.of_config(three, DATA_PARALLEL_SIZE))
    assert predicted.iteration_time_s == pytest.approx(solved["predicted"]["iteration_time_s"], rel=1e-12)


def test_an_optimised_order_is_found_for_the_same_costs(case: Case, tmp_path: Path) -> None:
    found = case.found("--pipeline-schedule", "optimised", "--num-token-slices", "2")
    answer = case.answer_of_command(tmp_path, case.strategy(schedule="optimised"), "--count", "2")
    assert list(found.token_slices().lengths) == answer["curve"][-1]["token_slices"]
    assert answer["flags"].partition(" --cluster ")[2].split()[::2] == [
        case.search[0],
        *([case.search[-1]] if "--profile" in case.search else []),
    ]

    parser = argparse.ArgumentParser()
    slices_command.add_flags(parser)
    options = parser.parse_args(["-", *case.search, *case.model.split(), "--strategy", ""])
    asked, _ = question_of(options, 1)
    model = asked.pricing.cost_model
    theirs = model.pipeline_costs(
        case.strategy(schedule="optimised", num_token_slices=2, token_slices=tuple(answer["curve"][-1]["token_slices"]))
    )
    assert pipeline_schedule(found, DATA_PARALLEL_SIZE).costs(found.parallel.pipeline(2)) == theirs


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--cluster nowhere.json", "--cluster nowhere.json cannot be read"),
        (
            "--cluster {small}",
            "--cluster .*small.json has 2 devices, fewer than the 8 ranks of this run: name a cluster",
        ),
        ("--op-profile {small}", "--op-profile: .*small.json.*format"),
        (
            "--op-profile {measured}",
            "the profile .*measured.json has no embedding of hidden size 4096.*: measure this model",
        ),
    ],
)
def test_files_of_other_runs_are_refused(flags: str, line: str, tmp_path: Path) -> None:
    files = {name: tmp_path / f"{name}.json" for name in ("small", "measured")}
    files["small"].write_text('{"nodes": [{"machine": "dgx-a100", "devices": 2}]}')
    write_profile(profile(), str(files["measured"]))
    words = tuple(flags.format(**files).split())
    run = Case(LARGE, {"micro_batch_size": 1, "global_batch_size": 4}, words, ())
    with pytest.raises(UserError, match=line) as caught:
        run.found("--num-token-slices", "2")
    assert "\n" not in str(caught.value)
    # They matter to nothing else.
    run.config("--num-token-slices", "2")


def test_a_hostfile_has_the_devices_of_the_default(tmp_path: Path) -> None:
    hosts = tmp_path / "hostfile"
    hosts.write_text("a slots=8\n")
    one, other = (
        cost_model_of(Case(LARGE, {"micro_batch_size": 1}, words, ()).config(), 8)
        for words in ((), ("--cluster", str(hosts)))
    )
    assert [node.device for node in one.cluster.nodes] == [node.device for node in other.cluster.nodes]
    strategy = Strategy(pipeline_parallel_size=4, data_parallel_size=2)
    assert one.pipeline_costs(strategy) == other.pipeline_costs(strategy)
