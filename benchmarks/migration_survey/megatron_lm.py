"""Configurations of Megatron-LM: its functional tests, and the scripts of its examples."""

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.migration_survey.attempts import Attempt
from benchmarks.migration_survey.shell_scripts import attempts_of_scripts

TESTS = "tests/functional_tests/test_cases"


def attempts(checkout: Path, folder: Path) -> Iterator[Attempt]:
    """Yield the functional tests that pretrain a GPT, those of other models, then the scripts.

    Args:
        folder: an empty folder for copies.
    """
    # Imported here: only a survey reads YAML.
    import yaml

    for path in sorted(checkout.glob(f"{TESTS}/*/*/model_config.yaml")):
        # All values as text, as the tests' own shell script reads them: this loader makes nothing else.
        document = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)  # noqa: S506
        model, name = path.parts[-3:-1]
        if isinstance(document, Mapping) and _pretrains(document):
            kind = "gpt" if model == "gpt" else "other models"
            words = tuple(words_of(document["MODEL_ARGS"]))
            yield Attempt(origin=f"Megatron-LM, tests of {kind}", name=name, words=words, directory=folder)
    yield from attempts_of_scripts("Megatron-LM, scripts", checkout, ("examples",), folder)


def words_of(model_args: Mapping[str, Any]) -> Iterator[str]:
    """Yield the words of a command, by the rules of Megatron's `_run_training.sh`.

    `true` is a flag without a value; a list in brackets is several words; any other value is one word. The number of
    the repetition is that of the first.

    Args:
        model_args: values as text, by flag. Those of a merged mapping (`<<`) are replaced by its own.
    """
    merged = model_args.get("<<", {})
    for flag, value in {**merged, **model_args}.items():
        if flag == "<<":
            continue
        yield flag
        text = f"[{' '.join(value)}]" if isinstance(value, list) else value.strip()
        listed = re.fullmatch(r"\[(.*)\]", text)
        if listed:
            yield from shlex.split(listed[1])
        elif text != "true":
            yield text.replace("${REPEAT}", "1")


def _pretrains(document: Mapping[str, Any]) -> bool:
    """Whether a test trains: others generate, and have the flags of an engine for inference."""
    model_args = document.get("MODEL_ARGS")
    return isinstance(model_args, Mapping) and "--micro-batch-size" in model_args and "--lr" in model_args
