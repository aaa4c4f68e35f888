"""A run, prepared: what it knows before any process group exists. What it refuses is in `end_to_end/test_faults`."""

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_terapipe.arguments import parse_arguments
from megatron_terapipe.data.indexed_dataset import IndexedDatasetWriter
from megatron_terapipe.errors import CheckpointError, ConfigError, DataError
from megatron_terapipe.training.launch_environment import LaunchEnvironment
from megatron_terapipe.training.run import Run, prepare
from tests.inference.checkpoints import MODEL, checkpoint_info
from tests.training.gpt_runs import FLAGS

LAUNCH = LaunchEnvironment(rank=1, world_size=4, local_rank=1, local_size=4)
WORDS = FLAGS.replace("--data-path unread", "--pipeline-model-parallel-size 2 --global-batch-size 12")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    prefix = tmp_path / "corpus"
    with IndexedDatasetWriter(prefix, vocab_size=257) as writer:
        for number in range(40):
            writer.add_document([number] * 50)
    return prefix


def prepared(data: Path, words: str = "--split 8,2", launch: LaunchEnvironment = LAUNCH) -> Run:
    return prepare(parse_arguments([*f"{WORDS} {words}".split(), "--data-path", str(data)]), launch)


def test_a_run_knows_its_place_its_batch_and_its_samples(data: Path) -> None:
    run = prepared(data, "--split 8,2 --eval-iters 3")
    assert (run.layout.pipeline_parallel_size, run.layout.data_parallel_size) == (2, 2)
    assert run.global_batch_size == 12
    assert run.deepspeed_settings["gradient_accumulation_steps"] == 3
    assert (len(run.datasets.train), len(run.datasets.valid), run.datasets.test) == (10 * 12, 3 * 12, None)
    assert run.start_iteration == 0
    assert run.consumed_samples(4) == 48


def test_the_vocabulary_is_the_tokenizers_unless_given(data: Path) -> None:
    words = WORDS.replace("--vocab-size 257", "")
    config = parse_arguments([*words.split(), "--data-path", str(data), "--split", "1"])
    assert config.model.vocab_size is None
    assert prepare(config, LAUNCH).config.model.vocab_size == 257
    assert prepared(data, "--split 1 --vocab-size 300").config.model.vocab_size == 300


@pytest.mark.parametrize("words", ["--split 1", "--split 8,2 --eval-iters 0"])
def test_without_validation_no_sample_is_drawn_for_it(data: Path, words: str) -> None:
    assert prepared(data, words).datasets.valid is None


def test_a_resumed_run_counts_on_with_its_own_batch_size(data: Path, tmp_path: Path) -> None:
    run = prepared(data)
    resumed = replace(run, checkpoint=(tmp_path, replace(checkpoint_info(iteration=5), consumed_samples=40)))
    assert resumed.start_iteration == 5
    assert resumed.consumed_samples(5) == 40
    assert resumed.consumed_samples(7) == 40 + 2 * 12
    info = resumed.checkpoint_info(7)
    assert (info.iteration, info.consumed_samples, info.zero_stage) == (7, 64, 0)
    assert info.layout["pipeline_parallel_size"] == 2
    assert info.model == checkpoint_info(run.config.model).model
    assert info.tokenizer == {"tokenizer_type": "byte", "vocab_file": None, "merge_file": None}


def test_a_finetuned_run_counts_from_the_start(data: Path, tmp_path: Path) -> None:
    run = prepared(data)
    checkpoint = replace(run.config.checkpoint, load="anywhere", finetune=True)
    finetuned = replace(
        run, config=replace(run.config, checkpoint=checkpoint), checkpoint=(tmp_path, checkpoint_info(MODEL))
    )
    assert finetuned.start_iteration == 0
    assert finetuned.consumed_samples(1) == 12


def test_whose_fault_it_is(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="world size 3"):
        prepared(data, launch=replace(LAUNCH, world_size=3))
    with pytest.raises(ConfigError, match="--global-batch-size 12 is not a multiple of"):
        prepared(data, launch=replace(LAUNCH, world_size=16))
    with pytest.raises(DataError, match="no indexed dataset at"):
        prepared(tmp_path / "absent")
    with pytest.raises(DataError, match=r"--split 1,0.001 leaves no document of the 40 in .* for validation"):
        prepared(data, "--split 1,0.001")
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        prepared(data, f"--load {tmp_path} --exit-on-missing-checkpoint")


def test_outputs_may_be_there_already(data: Path, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    prepared(
        data, f"--split 1 --save {tmp_path} --timeline {tmp_path / 'new'} --metrics-file {tmp_path / 'metrics.jsonl'}"
    )


@pytest.mark.parametrize(
    ("flag", "name", "reason"),
    [
        ("--metrics-file", "", "it is a directory"),
        ("--save", "corpus.bin", "it is a file"),
        ("--timeline", "corpus.bin/below", "corpus.bin is not a directory"),
    ],
)
def test_outputs_that_cannot_be_written(data: Path, tmp_path: Path, flag: str, name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{flag} .* cannot be written, because .*{reason}: name another$"):
        prepared(data, f"--split 1 {flag} {tmp_path / name}")
