"""A dry run where the files of the run are not: on a laptop, or before anything was copied."""

from collections.abc import Iterator
from dataclasses import replace

from megatron_terapipe.config import CheckpointConfig, Config
from megatron_terapipe.config.files.data import TOKENIZER_FILES

ASSUMED_VOCABULARY = 50257
"""Tokens of a vocabulary whose file is not here: those of GPT-2."""


def without_files(config: Config) -> Config:
    """Return the same run on random tokens, which reads no file of the run and writes none.

    A vocabulary whose file is not here has the size that the model section says, or that of GPT-2.
    """
    data, vocab_size = config.data, config.model.vocab_size
    if _tokenizer_files(config):
        data = replace(data, tokenizer_type="byte", vocab_file=None, merge_file=None, tokenizer_model=None)
        vocab_size = vocab_size or ASSUMED_VOCABULARY
    data = replace(
        data,
        mock_data=True,
        data_path=None,
        train_data_path=None,
        valid_data_path=None,
        test_data_path=None,
        data_args_path=None,
        per_split_data_args_path=None,
    )
    logging = replace(
        config.logging,
        metrics_file=None,
        report=None,
        tensorboard_dir=None,
        wandb_project=None,
        wandb_exp_name=None,
        wandb_save_dir=None,
        timeline=None,
        timeline_iterations=None,
        ledger_directory=None,
        # The traces of torch's profiler are outputs, too.
        use_pytorch_profiler=False,
    )
    model = replace(config.model, vocab_size=vocab_size)
    return replace(config, model=model, data=data, logging=logging, checkpoint=CheckpointConfig())


def absent_files(config: Config) -> Iterator[str]:
    """Yield what `without_files` leaves unchecked, in words."""
    files = _tokenizer_files(config)
    if files:
        assumed = "" if config.model.vocab_size else f" (taken to have {ASSUMED_VOCABULARY} tokens)"
        yield f"tokenizer {' '.join(files)}{assumed}"
    if config.data.prefixes:
        yield f"data {' '.join(config.data.prefixes)}"
    checkpoint, logging = config.checkpoint, config.logging
    if checkpoint.load is not None:
        yield f"checkpoints {checkpoint.load}"
    outputs = (
        *(checkpoint.save, logging.metrics_file, logging.report, logging.tensorboard_dir),
        *(logging.wandb_save_dir, logging.timeline),
    )
    written = [name for name in outputs if name is not None]
    if written:
        yield f"outputs {' '.join(written)}"


def _tokenizer_files(config: Config) -> list[str]:
    """Return the files of the tokenizer; some need none."""
    return [getattr(config.data, field) for field in TOKENIZER_FILES[config.data.tokenizer_type]]
