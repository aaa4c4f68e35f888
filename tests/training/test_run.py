"""A prepared run, before any process group exists. Its refusals are in `end_to_end/faults`."""

from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from deepspeed_ext.runtime.launch import LaunchEnvironment
from megatron_terapipe.arguments import parse_arguments
from megatron_terapipe.config.batch import BatchSizes
from megatron_terapipe.data.datasets import UnreadSamples
from megatron_terapipe.data.indexed_dataset import IndexedDatasetWriter
from megatron_terapipe.data.tokenizer import ByteTokenizer
from megatron_terapipe.data.tokenizer_checks import TokenizerRecord
from megatron_terapipe.data.tokenizer_settings import TokenizerSettings
from megatron_terapipe.errors import ConfigError, DataError
from megatron_terapipe.records import Progress
from megatron_terapipe.training.run import Run, prepare, reading_ranks
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


def test_layout_batch_and_samples(data: Path) -> None:
    run = prepared(data, "--split 8,2 --eval-iters 3")
    assert (run.layout.pipeline_parallel_size, run.layout.data_parallel_size) == (2, 2)
    assert run.batch_sizes == BatchSizes.constant(12)
    assert run.deepspeed_settings["gradient_accumulation_steps"] == 3
    assert run.start == Progress()
    assert (run.train_iters, run.batch_sizes) == (10, BatchSizes.constant(12))


@pytest.mark.parametrize(("words", "size"), [("--vocab-size 301", 301), ("--vocab-size 300 --legacy-tokenizer", 301)])
def test_the_highest_id_of_a_null_tokenizer_ends_a_document(data: Path, words: str, size: int) -> None:
    run = prepared(data, f"--tokenizer-type NullTokenizer {words}")
    assert (run.config.model.vocab_size, run.tokenizer.eod) == (size, size - 1)
    # Without it, as in checkpoints of earlier versions.
    assert run.checkpoint_info(run.start).tokenizer["vocab_size"] == size - 1


def test_data_of_another_tokenizer_is_refused_by_the_first_rank(data: Path) -> None:
    first = replace(LAUNCH, rank=0, local_rank=0)
    record = TokenizerRecord.of(data, ByteTokenizer(), "", ends=True)
    record.write(data)
    prepared(data, "--eod-mask-loss", first).prepare_data()
    replace(record, first_text="of another").write(data)
    prepared(data).prepare_data()
    with pytest.raises(DataError, match=r"--tokenizer-type byte"):
        prepared(data, launch=first).prepare_data()
    with pytest.raises(DataError, match=r"--tokenizer-type byte"):
        prepared(data, "--dry-run", first)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("", r"^--vocab-size 99 has no room for the 257 tokens of byte: raise it, or drop it$"),
        ("--load model", r"^the model of --load model has 99 ids, no room for the 257 of byte: give the tokenizer of"),
    ],
)
def test_a_vocabulary_that_is_too_small_has_a_remedy_that_works(data: Path, words: str, line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        prepared(data, f"--vocab-size 99 {words}")


SAMPLES = "--split 8,1,1 --eval-iters 3 --train-samples 100 --rampup-batch-size 4 4 20"


def counted_in_samples(data: Path, words: str = SAMPLES) -> Run:
    flags = f"{WORDS} {words}".replace("--train-iters 10", "").split()
    return prepare(parse_arguments([*flags, "--data-path", str(data)]), LAUNCH)


def test_a_run_counted_in_samples_reads_as_many_and_no_more_than_a_batch(data: Path) -> None:
    run = counted_in_samples(data)
    # 4, 4 and 4 samples, then 8 and 8, then 12 at a time; the last 4 make no batch.
    assert [run.batch_sizes.at(consumed) for consumed in (0, 8, 12, 20, 28)] == [4, 4, 8, 12, 12]
    assert run.train_iters == run.batch_sizes.iterations_within(100)
    assert len(run.datasets.train) == run.batch_sizes.consumed_after(run.train_iters)
    assert 100 - 12 < len(run.datasets.train) <= 100
    # Evaluation takes full batches from the start.
    assert (len(run.datasets.valid), len(run.datasets.test)) == (3 * 12, 3 * 12)


def test_a_run_ends_with_the_iteration_that_reaches_its_tokens_and_its_data_does_not_change(data: Path) -> None:
    plain = counted_in_samples(data)
    seq_length = plain.config.model.seq_length
    # 12 samples are consumed after 3 iterations, 20 after 4, 28 after 5.
    for tokens, iterations in ((12 * seq_length, 3), (12 * seq_length + 1, 4), (1000 * seq_length, plain.train_iters)):
        run = counted_in_samples(data, f"{SAMPLES} --train-tokens {tokens}")
        assert run.train_iters == iterations
        assert len(run.datasets.train) == len(plain.datasets.train)


@pytest.mark.parametrize("words", ["--train-samples 11", "--train-tokens {tokens}"])
def test_a_run_shorter_than_a_batch_is_refused(data: Path, words: str) -> None:
    tokens = 11 * prepared(data).config.model.seq_length
    with pytest.raises(ConfigError, match=r"^--train-samples 11 is less than one batch of 12 samples .*: give 12"):
        counted_in_samples(data, words.format(tokens=tokens))


@pytest.mark.parametrize(
    ("words", "consumed", "last"),
    [("", 60, 5 + 3), ("", 5 * 4, 5 + 6), ("", 99, 5), ("--train-tokens {tokens}", 30, 5 + 2)],
)
def test_a_batch_that_changed_before_the_start_leaves_the_end_at_the_same_samples(
    data: Path, words: str, consumed: int, last: int
) -> None:
    run = counted_in_samples(data, "--train-samples 100")
    words = words.format(tokens=50 * run.config.model.seq_length)
    run = counted_in_samples(data, f"--train-samples 100 {words}")
    resumed = replace(run, checkpoint=(data, replace(checkpoint_info(iteration=5), consumed_samples=consumed)))
    assert resumed.train_iters == last
    assert len(resumed.datasets.train) == consumed + (100 - consumed) // 12 * 12


def test_a_resumed_run_has_the_samples_up_to_its_end(data: Path) -> None:
    half_way = replace(checkpoint_info(iteration=6), consumed_samples=600)
    assert len(replace(prepared(data), checkpoint=(data, half_way)).datasets.train) == 600 + 4 * 12


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        ("--split 8,2 --eval-iters 3", (10 * 12, 3 * 12, None)),
        ("--split 8,1,1 --eval-iters 2 --skip-train", (None, 24, 24)),
        ("--split 8,2 --eval-iters 0", (120, None, None)),
        ("--split 1", (120, None, None)),
        ("--eval-iters 2", (120, 24, None)),  # A thousandth of 40 documents is none for testing.
    ],
)
def test_samples_are_drawn_for_parts_that_are_read(data: Path, words: str, sizes: tuple[int | None, ...]) -> None:
    drawn = prepared(data, words).datasets
    assert tuple(each and len(each) for each in (drawn.train, drawn.valid, drawn.test)) == sizes


def test_a_test_that_little_data_cannot_give_is_an_error_where_a_split_asks_for_it(data: Path) -> None:
    with pytest.raises(DataError, match=r"leaves no document .* for testing"):
        prepared(data, "--split 90,9,0.001")


@pytest.mark.parametrize(("package", "words"), [("tensorboard", "--tensorboard-dir"), ("wandb", "--wandb-project")])
def test_a_package_that_is_not_installed(data: Path, monkeypatch, package: str, words: str) -> None:
    monkeypatch.setattr("megatron_terapipe.training.run.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=rf"^{words} mine needs the package {package}, .*: pip install {package} \(extra: logging\)$"
    ):
        prepared(data, f"--split 1 {words} mine")


def test_the_vocabulary_is_the_tokenizers_unless_given(data: Path) -> None:
    words = WORDS.replace("--vocab-size 257", "")
    config = parse_arguments([*words.split(), "--data-path", str(data), "--split", "1"])
    assert config.model.vocab_size is None
    assert prepare(config, LAUNCH).config.model.vocab_size == 257
    assert prepared(data, "--split 1 --vocab-size 300").config.model.vocab_size == 300


def test_a_resumed_run_counts_with_its_own_batch_size(data: Path, tmp_path: Path) -> None:
    run = prepared(data)
    resumed = replace(run, checkpoint=(tmp_path, replace(checkpoint_info(iteration=5), consumed_samples=40)))
    assert resumed.start == Progress(iteration=5, consumed_samples=40)
    info = resumed.checkpoint_info(resumed.start.after(12).after(12))
    assert (info.iteration, info.consumed_samples, info.partitioned) == (7, 64, False)
    assert info.layout == run.layout
    assert info.model == checkpoint_info(run.config.model).model
    assert info.tokenizer == asdict(TokenizerSettings())


def test_a_finetuned_run_counts_from_the_start(data: Path, tmp_path: Path) -> None:
    run = prepared(data)
    checkpoint = replace(run.config.checkpoint, load="anywhere", finetune=True)
    finetuned = replace(
        run, config=replace(run.config, checkpoint=checkpoint), checkpoint=(tmp_path, checkpoint_info(MODEL))
    )
    assert finetuned.start == Progress()


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
        ("--ledger-directory", "corpus.bin", "it is a file"),
    ],
)
def test_outputs_that_cannot_be_written(data: Path, tmp_path: Path, flag: str, name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{flag} .* cannot be written, because .*{reason}: "):
        prepared(data, f"--split 1 {flag} {tmp_path / name}")


def test_a_schedule_that_locks_with_the_hardware_queues_of_the_run_is_refused(
    data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--split 8,2 --num-token-slices 4 --num-layers-per-virtual-pipeline-stage 1"
    assert prepared(data, words).config.parallel.num_model_chunks == 2
    cuda = SimpleNamespace(device_name=lambda: "cuda")
    monkeypatch.setattr("megatron_terapipe.training.run.get_accelerator", lambda: cuda)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with pytest.raises(ConfigError, match=r"share 1 hardware queue: set CUDA_DEVICE_MAX_CONNECTIONS=32$"):
        prepared(data, words)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    prepared(data, words, replace(LAUNCH, rank=0))
    line = "warning: --pipeline-schedule interleaved is proven to end only if no two streams of a rank share a hardware"
    assert capsys.readouterr().out.startswith(line)


def test_fp16_is_refused_where_the_device_has_none(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Whether the CPU of a test has it depends on its make.
    without = SimpleNamespace(device_name=lambda: "cpu", is_fp16_supported=lambda: False)
    monkeypatch.setattr("megatron_terapipe.training.run.get_accelerator", lambda: without)
    with pytest.raises(
        ConfigError, match=r"^--fp16 is not supported by DeepSpeed on this cpu: use --bf16, or drop it$"
    ):
        prepared(data, "--split 8,2 --fp16")


@pytest.mark.parametrize(
    ("words", "reading"),
    [
        ("--pipeline-model-parallel-size 4", {0, 3}),
        ("--pipeline-model-parallel-size 4 --reset-attention-mask", {0, 1, 2, 3}),
        ("--pipeline-model-parallel-size 2 --num-model-chunks 2", {0, 1}),
    ],
)
def test_only_ranks_that_read_order_their_samples(data: Path, words: str, reading: set[int]) -> None:
    """`build_engine` compares them with those of the engine's module."""
    flags = f"{FLAGS} --num-layers 4 {words}".replace("--data-path unread", "--global-batch-size 12 --split 8,2")
    found = set()
    for rank in range(4):
        launch = LaunchEnvironment(rank=rank, world_size=4, local_rank=rank, local_size=4)
        run = prepare(parse_arguments([*flags.split(), "--data-path", str(data)]), launch)
        assert len(run.datasets.train) == 10 * 12
        if not isinstance(run.datasets.train, UnreadSamples):
            found.add(run.layout.coordinate(rank).pipe)
    assert found == reading == reading_ranks(run.config)
