"""How long a run is, in iterations or in samples, and what must be counted in the same; what evaluates and reports."""

import pytest

from megatron_terapipe.arguments import parse_arguments
from megatron_terapipe.config import Config
from megatron_terapipe.errors import ConfigError

MODEL = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --micro-batch-size 2 --lr 1e-3"


def parse(words: str) -> Config:
    return parse_arguments(f"{MODEL} --data-path corpus {words}".split())


def test_the_unit() -> None:
    assert (parse("--train-iters 7").training.unit, parse("--train-iters 7").training.length) == ("iters", 7)
    assert (parse("--train-samples 9").training.unit, parse("--train-samples 9").training.length) == ("samples", 9)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("", "neither --train-iters nor --train-samples is given: add one"),
        (
            "--train-iters 7 --train-samples 9",
            "--train-iters 7 and --train-samples 9 both say how long the training is: drop one of them",
        ),
        ("--train-tokens 9", "--train-tokens 9 is not a multiple of --seq-length 8: give 16"),
        ("--train-tokens 0 --train-iters 9", "--train-tokens 0 is not positive: give 1 or more"),
        (
            "--train-samples 90 --lr-decay-samples 5 --lr-decay-tokens 80",
            "--lr-decay-samples 5 and --lr-decay-tokens 80 both say how long the decay is: drop one of them",
        ),
        (
            "--train-samples 90 --lr-warmup-tokens 80 --lr-warmup-fraction 0.0",
            "--lr-warmup-tokens 80 and --lr-warmup-fraction 0.0 both say how long the warmup is: drop one of them",
        ),
        (
            "--train-samples 90 --lr-warmup-tokens 720",
            "--lr-warmup-tokens 720 leaves nothing of the 90 samples until the learning rate has decayed: "
            "give 712 or less",
        ),
        (
            "--train-samples 90 --lr-warmup-samples 6 --lr-decay-tokens 41",
            "--lr-warmup-samples 6 leaves nothing of the 5.125 samples until the learning rate has decayed: "
            "give 5 or less",
        ),
        (
            "--train-iters 90 --lr-decay-tokens 80",
            "--lr-decay-tokens 80 with --train-iters needs a batch that is known and stays the same: add "
            "--global-batch-size, or use --train-samples",
        ),
        ("--train-samples 0", "--train-samples 0 is not positive: give 1 or more"),
        (
            "--train-samples 90 --lr-decay-iters 5",
            "--lr-decay-iters 5 does not go with --train-samples: use --lr-decay-samples",
        ),
        (
            "--train-iters 90 --lr-warmup-samples 5",
            "--lr-warmup-samples 5 does not go with --train-iters: use --lr-warmup-iters",
        ),
        (
            "--train-samples 90 --lr-warmup-samples 90",
            "--lr-warmup-samples 90 leaves nothing of the 90 samples until the learning rate has decayed: "
            "give 89 or less",
        ),
        (
            "--train-iters 90 --lr-decay-style WSD",
            "--lr-decay-style WSD needs the length of its decay: add --lr-wsd-decay-iters",
        ),
        (
            "--train-samples 90 --lr-decay-style WSD --lr-wsd-decay-samples 91",
            "--lr-decay-style WSD decays in the last --lr-wsd-decay-samples 91 of 90 samples: give 1 to 90",
        ),
        ("--train-iters 9 --lr-warmup-init 2", "--lr-warmup-init 2.0 is above --lr 0.001: give 0.001 or less"),
        (
            "--train-iters 9 --weight-decay-incr-style linear --start-weight-decay 0.1",
            "--weight-decay-incr-style linear needs --end-weight-decay: add it, or use --weight-decay alone",
        ),
        (
            "--train-iters 9 --weight-decay-incr-style cosine --start-weight-decay 0.1 --end-weight-decay 0",
            "--weight-decay-incr-style cosine would fall from --start-weight-decay 0.1 to --end-weight-decay 0.0: "
            "give the second no less than the first",
        ),
        (
            "--train-iters 9 --end-weight-decay 0.1",
            "--end-weight-decay 0.1 has no effect on a constant weight decay: add --weight-decay-incr-style, or use "
            "--weight-decay",
        ),
        (
            "--train-iters 9 --exit-duration-in-mins 0",
            "--exit-duration-in-mins 0.0 is not positive: give a number above 0",
        ),
        ("--train-iters 9 --wandb-exp-name mine", "--wandb-exp-name mine reports to no project: add --wandb-project"),
        ("--train-iters 9 --tensorboard-queue-size 0", "--tensorboard-queue-size 0 is not positive: give 1 or more"),
    ],
)
def test_what_does_not_fit(words: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(words)
    assert str(caught.value) == line


def test_megatrons_ramp_parses() -> None:
    config = parse("--train-samples 5000 --global-batch-size 64 --rampup-batch-size 16 8 2000 --lr-decay-samples 4000")
    assert config.batch.rampup_batch_size == (16, 8, 2000)
    assert config.optimizer.lr_decay_samples == 4000
    assert (config.global_batch_size(4), config.num_micro_batches(4)) == (64, 8)


def test_tokens_alone_are_samples() -> None:
    training = parse("--train-tokens 72").training
    assert (training.unit, training.length, training.train_tokens) == ("samples", 9, None)


def test_tokens_beside_samples_leave_the_length_as_it_is() -> None:
    config = parse("--train-tokens 70 --train-samples 90 --lr-decay-tokens 70 --lr-warmup-tokens 15")
    assert (config.training.unit, config.training.length, config.training.train_tokens) == ("samples", 90, 70)


def test_megatrons_spelling_of_a_flag() -> None:
    config = parse("--train-iters 9 --no-log-learnig-rate-to-tensorboard --tensorboard-dir board")
    assert config.logging.no_log_learning_rate_to_tensorboard
    assert config.logging.tensorboard_dir == "board"
