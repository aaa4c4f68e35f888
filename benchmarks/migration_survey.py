"""Try every configuration of checkouts of Megatron-LM, Megatron-DeepSpeed and GPT-NeoX, and print those that run.

python -m benchmarks.migration_survey [--megatron-lm DIR] [--megatron-deepspeed DIR] [--gpt-neox DIR] [--lines] [--json]

Each configuration is parsed and checked as `--dry-run` checks it, without its tokenizer, data, checkpoints and devices.
The shell scripts of the checkouts are run, in a copy and with every program replaced. They can write in the copy only
(`benchmarks/confined.py`), but can read any file, so give checkouts that you trust.

A script composes its command from variables, arrays, conditions and templates of files, which only a shell expands. So
bash runs it, in a copy of the checkout that holds its small text files, and with a PATH of its own: launchers write
down their words, a few programs that read text are real, and every other program does nothing. Scripts that name the
program and start no such command are listed with the reason.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from io import StringIO
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.confined import run_confined
from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.runtime.launch import LaunchEnvironment
from megatron_terapipe.arguments import read_arguments
from megatron_terapipe.neox.convert import convert, read_settings

HERE = ("--dry-run", "--dry-run-without-files")
"""Flags that leave out missing devices, tokenizers, data and checkpoints."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """A configuration of another project, as a command for `pretrain_gpt.py`."""

    origin: str
    """Set that it belongs to: a row of the table."""
    name: str
    words: tuple[str, ...] = ()
    ranks: int | None = None
    """Number of ranks that the launcher would start; None: the fewest that the words allow."""
    directory: Path = Path()
    """Directory that names of files are relative to."""
    refusal: str = ""
    """Line with which a converter refused it, so that there are no words; empty if it did not."""
    not_run: str = ""
    """Why a script started no command, so that there are no words; empty if it did."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Result of an attempt."""

    attempt: Attempt
    line: str = ""
    """Line that refuses it; empty if it passed."""
    is_defect: bool = False
    """Whether it ended in anything but a line of ours."""

    @property
    def passed(self) -> bool:
        """Whether it would be trained."""
        return not self.line

    @property
    def is_counted(self) -> bool:
        """Whether there was a command to try."""
        return not self.attempt.not_run

    def features(self) -> Iterator[str]:
        """Yield the features that stop it: the flags, or the setting, with which each reason of the line begins."""
        if self.is_defect:
            yield "defect"
            return
        for reason in self.line.split("; ") if self.line else ():
            beginning = re.sub(r'.* sets (\S+) to "?([^",]*)"?, and .*', r"\1 \2", reason.split(": ", 1)[0])
            flags = [part.split()[0] for part in beginning.split(", ") if part.startswith("--")]
            yield from flags or [beginning]


def outcome_of(attempt: Attempt) -> Outcome:
    """Return the result of an attempt in this process; nothing is started."""
    if attempt.not_run:
        return Outcome(attempt=attempt)
    if attempt.refusal:
        return Outcome(attempt=attempt, line=attempt.refusal)
    # Without it DeepSpeed looks for a device, and says that it found none.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # Imported here: torch and DeepSpeed take seconds.
    from megatron_terapipe.training.run_summary import dry_run

    try:
        with chdir(attempt.directory), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            config = read_arguments([*attempt.words, *HERE]).config
            least = config.parallel.least_world_size
            # Users change the number of hosts of a script, which may be too few for its layout.
            stated = attempt.ranks if (attempt.ranks or 1) % least == 0 else None
            dry_run(config, LaunchEnvironment.of_dry_run({}, stated=stated, least=least))
    except UserError as error:
        line = str(error)
        return Outcome(attempt=attempt, line=line, is_defect="\n" in line)
    except (Exception, SystemExit) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        line = f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})"
        return Outcome(attempt=attempt, line=line, is_defect=True)
    return Outcome(attempt=attempt)


REAL = "cat sed awk grep egrep cut tr head tail wc date basename dirname realpath readlink expr seq sort uniq paste tac"
"""Programs that are real: they read text and write text."""

SHELLS = "bash sh env tee"
"""Programs that are real, too: they run others of these, and write files where they may."""

LAUNCHERS = "deepspeed torchrun python python3 srun mpirun mpiexec accelerate aprun jsrun uv"
"""Programs that write down their words."""

KEPT = ("*.sh", "*.json", "*.yaml", "*.yml", "*.txt", "*.cfg", "hostfile", "pretrain_gpt.py")
"""Files of a checkout that scripts read."""

REDIRECTION = re.compile(
    r"""(?<![&<>\d])(?:2>&1[ \t]*)?[&12]?>>?[ \t]*(?P<to>\\"[^"\n]*\\"|"[^"\n]*"|'[^'\n]*'|[^\s"'|;&<>\\]+)"""
)
"""Redirection of the output of a command; its target is quoted as a whole or not at all."""

PLACEHOLDER = re.compile(r"(?<![<&\d])<(?=[A-Za-z])[^<>\n$|;&]*[^<>\s$|;&]>(?![>&])")
"""Words such as <Specify path>, which users replace; bash takes them for redirections."""

ARGUMENT = re.compile(r"""^\s*(?:export\s+)?(\w+)=["']?\$(?:([1-9])|\{(\d+)\})""", re.MULTILINE)
"""Variable that is an argument of the script, one without a default."""

A_PLACE = re.compile("path|file|dir|data|logs?$|logs?_|model$|checkpoint|ckpt|corpus|prefix", re.IGNORECASE)
"""Names of arguments for which any word will do."""

PROGRAM = "pretrain_gpt.py"
GPUS = 8
SECONDS = 60
"""Time after which a script is given up."""


@dataclass(frozen=True, slots=True)
class _Command:
    """A command that a script would start."""

    words: tuple[str, ...]
    """Words after the program."""
    ranks: int | None
    """Number of ranks by the flags of the launcher; None without such flags."""


@dataclass(frozen=True, slots=True)
class _Run:
    """A script, run in one folder."""

    directory: Path
    commands: tuple[_Command, ...] = ()
    reason: str = ""
    """Why there are none."""


def attempts_of_scripts(origin: str, folders: Sequence[str], checkout: Path, copy: Path) -> Iterator[Attempt]:
    """Yield an attempt for each command that pretrains a GPT, and one for each script that names the program in vain.

    Args:
        copy: an empty folder for the copy of the checkout.
    """
    programs, tree = copy / "programs", copy / "checkout"
    _make_programs(programs)
    _copy_texts(checkout, tree)
    for script in sorted(script for folder in folders for script in (tree / folder).rglob("*.sh")):
        name, run = str(script.relative_to(tree)), _run_where_it_works(script, tree, programs)
        for number, command in enumerate(run.commands, start=1):
            numbered = f"{name} #{number}" if len(run.commands) > 1 else name
            yield Attempt(
                origin=origin, name=numbered, words=command.words, ranks=command.ranks, directory=run.directory
            )
        if not run.commands and PROGRAM in script.read_text(encoding="utf-8"):
            yield Attempt(origin=origin, name=name, directory=run.directory, not_run=run.reason)


def _run_where_it_works(script: Path, tree: Path, programs: Path) -> _Run:
    """Run a script in its own folder and in the checkout's; it assumes one or the other.

    It is where the file that `--deepspeed_config` names has been written.
    """
    runs = [_run(script, directory, tree, programs) for directory in (script.parent, tree)]
    found = [run for run in runs if run.commands]
    with_files = [run for run in found if all((run.directory / name).is_file() for name in _deepspeed_files(run))]
    return next(iter([*with_files, *found, *runs]))


def _deepspeed_files(run: _Run) -> Iterator[str]:
    for command in run.commands:
        for word, following in pairwise([*command.words, ""]):
            flag, _, value = word.partition("=")
            if flag.replace("_", "-") == "--deepspeed-config":
                yield value or following


def _run(script: Path, directory: Path, tree: Path, programs: Path) -> _Run:
    text = script.read_text(encoding="utf-8")
    # Other scripts count their arguments, and read options out of them.
    takes = {} if "$#" in text else {int(short or long): name for name, short, long in ARGUMENT.findall(text)}
    strange = [f"${number} ({name})" for number, name in sorted(takes.items()) if not A_PLACE.search(name)]
    if strange:
        return _Run(directory, reason=f"its arguments are not only places: {', '.join(strange)}")
    record, temporary = programs.parent / "record", programs.parent / "temporary"
    record.unlink(missing_ok=True)
    temporary.mkdir(exist_ok=True)
    environment = {
        "PATH": str(programs),
        "BASH_ENV": str(programs / "environment"),
        "HOME": str(directory),
        "TMPDIR": str(temporary),
        "HOSTNAME": "worker-0",
        "RECORD": str(record),
    }
    arguments = [f"argument{number}" for number in range(1, max(takes, default=0) + 1)]
    command = [str(programs / "bash"), str(script), *arguments]
    try:
        said = run_confined(command, programs.parent, directory=directory, environment=environment, seconds=SECONDS)
        if _make_folders(said, directory, tree):
            record.unlink(missing_ok=True)
            said = run_confined(command, programs.parent, directory=directory, environment=environment, seconds=SECONDS)
    except subprocess.TimeoutExpired:
        return _Run(directory, reason=f"it takes more than {SECONDS} s")
    except UserError as error:
        return _Run(directory, reason=str(error))
    lines = record.read_text(encoding="utf-8").split("\1\n") if record.exists() else []
    found = [each for line in lines if (each := _command_of(line.split("\0")[:-1])) is not None]
    if any(each.words for each in found):
        return _Run(directory, tuple(dict.fromkeys(each for each in found if each.words)))
    if found:
        return _Run(directory, reason=f"{PROGRAM} gets no flags: another script sets them")
    last = next((line for line in reversed(said.splitlines()) if line.strip()), "no line")
    return _Run(directory, reason=f"it does not start {PROGRAM}, and ends with: {last.replace(f'{tree}/', '')}")


def _make_folders(said: str, directory: Path, tree: Path) -> bool:
    """Make the folders that a script writes to without making them. Returns whether there are any in the copy."""
    missing = re.findall(r": line \d+: (.+): No such file or directory$", said, re.MULTILINE)
    folders = [(directory / name).resolve().parent for name in missing]
    inside = [folder for folder in folders if folder.is_relative_to(tree) and not folder.exists()]
    for folder in inside:
        folder.mkdir(parents=True, exist_ok=True)
    return bool(inside)


def _command_of(words: Sequence[str]) -> _Command | None:
    """Return the command for the program, None without it; a launcher may have been given it as one word."""
    for number, word in enumerate(words):
        if word.endswith(PROGRAM):
            return _Command(tuple(words[number + 1 :]), _ranks_of(words[:number]))
        if PROGRAM in word:
            return _command_of(shlex.split(word))
    return None


def _ranks_of(launch: Sequence[str]) -> int | None:
    """Return the number of ranks by the words of a launcher on hosts with `GPUS` devices."""
    stated = {}
    for word, following in pairwise([*launch, ""]):
        flag, _, value = word.replace("_", "-").partition("=")
        if (value or following).isdigit():
            stated[flag] = int(value or following)
    nodes, devices = (next((stated[flag] for flag in flags if flag in stated), None) for flags in _SIZES)
    return None if nodes is devices is None else (nodes or 1) * (devices or GPUS)


_SIZES = (("--num-nodes", "--nnodes"), ("--num-gpus", "--nproc-per-node"))


def _as_run(text: str) -> str:
    """Return a script without its placeholders, and without redirections to logs.

    The folder of a log is not here, and then the command would not be run.
    """
    text = PLACEHOLDER.sub("PLACEHOLDER", text)
    return REDIRECTION.sub(lambda found: "" if "log" in found["to"].lower() else found[0], text)


def _copy_texts(checkout: Path, tree: Path) -> None:
    """Copy the folders of a checkout, and the small files that scripts read, but no links: they may lead out of it."""
    for folder, names, files in os.walk(checkout):
        names[:] = [name for name in names if not name.startswith(".")]
        target = tree / Path(folder).relative_to(checkout)
        target.mkdir(parents=True)
        for name in files:
            path = Path(folder, name)
            if (
                any(Path(name).match(pattern) for pattern in KEPT)
                and not path.is_symlink()
                and path.stat().st_size < 2**18
            ):
                text = path.read_text(encoding="utf-8", errors="replace")
                (target / name).write_text(_as_run(text) if name.endswith(".sh") else text, encoding="utf-8")


def _make_programs(folder: Path) -> None:
    folder.mkdir()
    for name in f"{REAL} {SHELLS}".split():
        real = shutil.which(name)
        if real is not None:
            (folder / name).symlink_to(real)
    # A command is its words with a NUL after each, then \1 and the end of the line.
    record = '#!/bin/bash\nprintf "%s\\0" "$0" "$@" >> "$RECORD"\nprintf "\\1\\n" >> "$RECORD"\n'
    for name in LAUNCHERS.split():
        _write_program(folder / name, record)
    devices = "\\n".join(["GPU"] * GPUS)
    _write_program(folder / "nvidia-smi", f'#!/bin/bash\nprintf "{devices}\\n"\n')
    # Two lines of its own stand before those of the command that it runs on every host.
    _write_program(folder / "ds_ssh", f'#!/bin/bash\nprintf "hosts\\nfirst\\n{devices}\\n"\n')
    # Folders outside of the copy cannot be made; a script goes on without them.
    _write_program(folder / "mkdir", f'#!/bin/bash\n{shutil.which("mkdir")} "$@"\nexit 0\n')
    _write_program(
        folder / "sbatch", '#!/bin/bash\nfor each in "$@"; do [[ -f "$each" ]] && exec bash "$each"; done; exec bash\n'
    )
    for name, does in {"whoami": "echo user", "hostname": "echo worker-0", "ssh": "exit 1"}.items():
        _write_program(folder / name, f"#!/bin/bash\n{does}\n")
    (folder / "environment").write_text("command_not_found_handle() { return 0; }\n")


def _write_program(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


TESTS = "tests/functional_tests/test_cases"


def attempts_of_megatron_lm(checkout: Path, folder: Path) -> Iterator[Attempt]:
    """Yield the functional tests that pretrain a GPT, tests of other models, then the scripts.

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
    yield from attempts_of_scripts("Megatron-LM, scripts", ("examples",), checkout, folder)


def words_of(model_args: Mapping[str, Any]) -> Iterator[str]:
    """Yield the words of a command, by the rules of Megatron's `_run_training.sh`.

    `true` is a flag without a value; a list in brackets is several words; any other value is one word. The number of
    the repetition is the first's.
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
    """Whether a test trains on data: others generate, or learn by reinforcement."""
    model_args = document.get("MODEL_ARGS")
    is_training = document.get("MODE") not in ("inference", "rl")
    return is_training and isinstance(model_args, Mapping) and "--micro-batch-size" in model_args


TRAINING = "llama/train_config.yml"
"""File with the optimizer, the batch and the length of the training, for models whose files have none."""

PLACES = "local_setup.yml"
"""File with the places of data, tokenizer and checkpoints."""

DATA = frozenset({"data_path", "train_data_paths"})
"""Settings of which a run has one."""


def attempts_of_gpt_neox(checkout: Path, folder: Path) -> Iterator[Attempt]:
    """Yield every model, with the settings that its file leaves open from NeoX's own files for these.

    As many processes as one replica of the model has.
    """
    configs = checkout / "configs"
    training, places = (_settings_of(configs / name) for name in (TRAINING, PLACES))
    for path in sorted(configs.rglob("*.yml")):
        name = str(path.relative_to(configs))
        try:
            model = read_settings([str(path)])
            if "num_layers" not in model:
                continue
            # A model that names data has no use for that of another file.
            named = {name: value for name, value in places.items() if not model.keys() & DATA or name not in DATA}
            settings = {**named, **({} if "train_iters" in model else training), **model}
            words = tuple(convert(settings, _ranks(settings)).words())
        except UserError as error:
            yield Attempt(origin="GPT-NeoX, models", name=name, directory=folder, refusal=str(error))
        else:
            yield Attempt(origin="GPT-NeoX, models", name=name, directory=folder, words=words)


def _settings_of(path: Path) -> dict[str, Any]:
    return read_settings([str(path)]) if path.exists() else {}


def _ranks(settings: Mapping[str, Any]) -> int:
    """Return the ranks of one replica; NeoX takes 0 for 1."""
    return max(1, settings.get("pipe_parallel_size") or 1) * max(1, settings.get("model_parallel_size") or 1)


def table(outcomes: Sequence[Outcome], *, shows_lines: bool) -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| set | passed | refused | defects | of | not run |"
    yield "|---|---|---|---|---|---|"
    for origin, all_of_set in _by_origin(outcomes).items():
        of_set = [each for each in all_of_set if each.is_counted]
        passed, defects = sum(each.passed for each in of_set), sum(each.is_defect for each in of_set)
        refused, not_run = len(of_set) - passed - defects, len(all_of_set) - len(of_set)
        yield f"| {origin} | {passed} | {refused} | {defects} | {len(of_set)} | {not_run} |"
    if any(not each.is_counted for each in outcomes):
        yield from ["", "not run:"]
    for each in outcomes:
        if not each.is_counted:
            yield f"{each.attempt.origin}: {each.attempt.name}: {each.attempt.not_run}"
    for origin, of_set in _by_origin(outcomes).items():
        counts = _features(of_set)
        if not counts:
            continue
        yield from [
            "",
            f"{origin}: features that stop them",
            "",
            "| feature | stops | only this one |",
            "|---|---|---|",
        ]
        alone = Counter(next(iter(set(each.features()))) for each in of_set if len(set(each.features())) == 1)
        for feature, number in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
            yield f"| {feature} | {number} | {alone[feature]} |"
    if shows_lines:
        for each in outcomes:
            if each.is_counted and not each.passed:
                yield f"{each.attempt.origin}: {each.attempt.name}: {each.line}"


def as_json(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the same as numbers and words."""
    return {
        origin: {
            "attempts": sum(each.is_counted for each in of_set),
            "passed": sum(each.is_counted and each.passed for each in of_set),
            "defects": sum(each.is_defect for each in of_set),
            "features": dict(_features(of_set).most_common()),
            "lines": {each.attempt.name: each.line for each in of_set if not each.passed},
            "not_run": {each.attempt.name: each.attempt.not_run for each in of_set if not each.is_counted},
        }
        for origin, of_set in _by_origin(outcomes).items()
    }


def _by_origin(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    origins = dict.fromkeys(each.attempt.origin for each in outcomes)
    return {origin: [each for each in outcomes if each.attempt.origin == origin] for origin in origins}


def _features(outcomes: Sequence[Outcome]) -> Counter[str]:
    return Counter(feature for each in outcomes for feature in set(each.features()))


ORIGINS: Mapping[str, Callable[[Path, Path], Iterator[Attempt]]] = {
    "megatron_lm": attempts_of_megatron_lm,
    "megatron_deepspeed": partial(
        attempts_of_scripts, "Megatron-DeepSpeed, scripts", ("examples_deepspeed", "examples")
    ),
    "gpt_neox": attempts_of_gpt_neox,
}
"""Functions by name that yield the attempts of a checkout: each takes the checkout and a folder for its files."""


def main() -> int:
    """Run the survey. Returns the exit code: 1 if an attempt ended in anything but one line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megatron-lm", type=Path, metavar="DIR", help="a checkout of Megatron-LM")
    parser.add_argument("--megatron-deepspeed", type=Path, metavar="DIR", help="a checkout of Megatron-DeepSpeed")
    parser.add_argument("--gpt-neox", type=Path, metavar="DIR", help="a checkout of GPT-NeoX")
    parser.add_argument("--lines", action="store_true", help="show the line of every refusal, too")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = parser.parse_args()
    outcomes = []
    with TemporaryDirectory() as folder:
        for name, attempts in ORIGINS.items():
            checkout = getattr(options, name)
            if checkout is None:
                continue
            own = Path(folder, name)
            own.mkdir()
            for attempt in attempts(checkout.resolve(), own):
                outcomes.append(outcome_of(attempt))
                if sys.stderr.isatty():
                    print(f"\r{len(outcomes)} tried", end="", file=sys.stderr, flush=True)
    if options.json:
        print(json.dumps(as_json(outcomes), indent=2))
    else:
        print(*table(outcomes, shows_lines=options.lines), sep="\n")
    return int(any(outcome.is_defect for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
