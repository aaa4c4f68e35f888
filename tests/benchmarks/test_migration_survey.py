"""The survey of other projects' configurations, on checkouts of a few lines."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import migration_survey
from benchmarks.confined import landlock_version, run_confined
from benchmarks.migration_survey import (
    Attempt,
    Outcome,
    as_json,
    attempts_of_scripts,
    main,
    outcome_of,
    table,
    words_of,
)

confined = pytest.mark.skipif(landlock_version() < 3, reason="this kernel has no Landlock for scripts")

MODEL = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --train-iters 3"
DATA = "--lr 1 --vocab-file vocab.json --merge-file merges.txt --tokenizer-type GPT2BPETokenizer --data-path corpus"

SCRIPT = """
set -e
LOG_PATH=$2 # <where logs go>
LOGS=3
log_path=/nowhere/log
gpus=$(nvidia-smi --query-gpu=name | wc -l)
batch=$((2 * gpus))
corpus="$1"
mkdir -p configs /nowhere/at/all
cat <<EOT > configs/ds.json
{"train_batch_size": $batch, "steps_per_print": 5}
EOT
rm -rf "$PWD"; pip install everything; unheard_of_program
options="%s
  --global-batch-size ${batch}"
more=(--deepspeed_config configs/ds.json --save "$corpus" --seed $LOGS)
echo $(deepspeed ../pretrain_gpt.py $options "${more[@]}")
python tools/preprocess_data.py --input x
srun sh -c "torchrun --nnodes 1 pretrain_gpt.py $options --qk-clip-threshold 8" &>> ${log_path}/run.log
"""


NOT_RUN = "it does not start pretrain_gpt.py, and ends with: "
NO_FLAGS = "pretrain_gpt.py gets no flags: another script sets them"

STARTS = {
    "quoted": ('run="deepspeed pretrain_gpt.py --lr 1 &> $X/log/a.log"\neval $run', "--lr 1"),
    "escaped": ('run="deepspeed pretrain_gpt.py --lr 1 > \\"$X/log/a b\\" 2>&1"\neval $run', "--lr 1"),
    "placeholder": ("A=<Specify path>/a\npython pretrain_gpt.py --save $A --load <TO LOAD>\n", "--save PLACEHOLDER/a"),
    "own_folder": (
        "D=$(dirname $(realpath $0))\necho {} >$D/e\npython pretrain_gpt.py --data $(cat $D/e)",
        "--data {}",
    ),
    "new_folder": ("echo 7 > ./new/seed\npython pretrain_gpt.py --seed $(cat new/seed)", "--seed 7"),
    "batch": ("W='--lr 1' sbatch -N 1 part.sh", "--lr 1"),
    "batch_stdin": ("sbatch <<EOF\nsrun sh -c 'cd x && python pretrain_gpt.py --lr 1'\nEOF", "--lr 1"),
    "place": ("DATA_PATH=$1\npython pretrain_gpt.py --data-path ${DATA_PATH}", "--data-path argument1"),
    "default": ("LR=${1:-3}\npython pretrain_gpt.py --lr $LR", "--lr 3"),
}
DOES_NOT_START = {
    "part": ("python pretrain_gpt.py $W", NO_FLAGS),
    "number": ("lr=$1\npython pretrain_gpt.py --lr $lr", "its arguments are not only places: $1 (lr)"),
    "ends": ("echo no data; exit 1; python pretrain_gpt.py", NOT_RUN + "no data"),
    "folder": (
        "set -e\ncd /nowhere/at/all\npython pretrain_gpt.py --lr 1",
        NOT_RUN + "examples/folder.sh: line 2: cd: ",
    ),
}


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def test_values_of_a_functional_test_become_words() -> None:
    base = {"--bf16": "true", "--split": "99,1,0"}
    model_args = {
        "<<": base,
        "--split": "949,50,1",
        "--data-path": "[0.5 a 0.5 b]",
        "--spec": "a b",
        "--sizes": ["2 2"],
    }
    assert list(words_of(model_args | {"--seed": "${REPEAT}"})) == [
        *("--bf16", "--split", "949,50,1", "--data-path", "0.5", "a", "0.5", "b", "--spec", "a b"),
        *("--sizes", "2", "2", "--seed", "1"),
    ]


@confined
def test_a_script_is_run_with_every_program_replaced(tmp_path: Path) -> None:
    script = tmp_path / "checkout" / "examples" / "gpt" / "train.sh"
    script.parent.mkdir(parents=True)
    script.write_text(SCRIPT % f"{MODEL} {DATA}")
    first, second = attempts_of_scripts("set", ("examples",), tmp_path / "checkout", _empty(tmp_path / "copy"))
    assert (first.name, second.name) == ("examples/gpt/train.sh #1", "examples/gpt/train.sh #2")
    assert first.words[-8:] == words(
        "--global-batch-size 16 --deepspeed_config configs/ds.json --save argument1 --seed 3"
    )
    assert second.words[-4:] == words("--global-batch-size 16 --qk-clip-threshold 8")
    assert (first.directory / "configs" / "ds.json").read_text().startswith('{"train_batch_size": 16')
    assert [path.name for path in script.parent.iterdir()] == ["train.sh"]
    assert outcome_of(first).passed
    refused = outcome_of(second)
    assert refused.line.startswith("--qk-clip-threshold: ") and not refused.is_defect


@confined
def test_no_command_is_lost(tmp_path: Path) -> None:
    examples = tmp_path / "checkout" / "examples"
    examples.mkdir(parents=True)
    for name, (text, _) in {**STARTS, **DOES_NOT_START}.items():
        (examples / f"{name}.sh").write_text(text)
    found = {
        Path(each.name).stem: each.not_run or " ".join(each.words)
        for each in attempts_of_scripts("set", ("examples",), tmp_path / "checkout", _empty(tmp_path / "copy"))
    }
    expected = {name: line for name, (_, line) in {**STARTS, **DOES_NOT_START}.items()}
    assert {name: said[: len(expected[name])] for name, said in found.items()} == expected


@confined
def test_nothing_is_written_outside_of_the_copy(tmp_path: Path) -> None:
    outside, inside = _empty(tmp_path / "outside"), _empty(tmp_path / "inside")
    kept = outside / "kept"
    kept.write_text("kept")
    script = f"""
        echo > {outside}/new; echo > {kept}; tee {outside}/new < /dev/null; 
        (cd {outside}; mkdir new; rm kept; mv kept new; ln -s . new; cp {inside}/made .)
        {sys.executable} -c 'open("{outside}/by_python", "w")'
        echo > made; echo > /dev/null; echo "$(</dev/null)" ended"""
    for confinement in (True, False):
        command = ["bash", "-c", script]
        environment = {"PATH": os.environ["PATH"]}
        if confinement:
            said = run_confined(command, inside, directory=inside, environment=environment, seconds=30)
            assert said.splitlines()[-1] == " ended"
            assert (inside / "made").exists() and [kept.read_text(), *os.listdir(outside)] == ["kept", "kept"]
        else:
            subprocess.run(command, cwd=inside, env=environment, check=True, capture_output=True)
            assert sorted(os.listdir(outside)) != ["kept"]


def _empty(path: Path) -> Path:
    path.mkdir()
    return path


def test_what_is_not_a_line_of_ours_is_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(words: object) -> None:
        raise IndexError("list index out of range")

    monkeypatch.setattr("benchmarks.migration_survey.read_arguments", broken)
    outcome = outcome_of(Attempt(origin="set", name="test"))
    assert outcome.is_defect and not outcome.passed
    assert outcome.line.startswith("IndexError: list index out of range (test_migration_survey.py:")
    assert list(outcome.features()) == ["defect"]


def test_the_table_counts_features() -> None:
    lines = {"a": "", "b": "--x: no; --y 2: no", "c": "--x, --z: no", "d": "--x contradicts --y"}
    outcomes = [Outcome(attempt=Attempt(origin="set", name=name), line=line) for name, line in lines.items()]
    outcomes += [Outcome(attempt=Attempt(origin="set", name="e", not_run="it takes an age"))]
    text = "\n".join(table(outcomes, shows_lines=True))
    assert "| set | 1 | 3 | 0 | 4 | 1 |" in text
    assert "not run:\nset: e: it takes an age" in text
    assert "| --x | 3 | 1 |\n| --y | 1 | 0 |\n| --z | 1 | 0 |" in text
    assert "set: c: --x, --z: no" in text
    assert as_json(outcomes)["set"]["features"] == {"--x": 3, "--y": 1, "--z": 1}


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, more in (("plain", ""), ("experts", "\n  --qk-clip-threshold: 8")):
        case = tmp_path / "tests/functional_tests/test_cases/gpt" / name
        case.mkdir(parents=True)
        pairs = zip(f"{MODEL} {DATA}".split()[::2], f"{MODEL} {DATA}".split()[1::2], strict=True)
        listed = "\n".join(f"  {flag}: {value}" for flag, value in pairs)
        (case / "model_config.yaml").write_text(f"MODEL_ARGS:\n{listed}\n  --bf16: true{more}\n")
    monkeypatch.setattr(sys, "argv", ["survey", "--megatron-lm", str(tmp_path), "--lines"])
    assert main() == 0
    said = capsys.readouterr().out
    assert "| Megatron-LM, tests of gpt | 1 | 1 | 0 | 2 | 0 |" in said
    assert "Megatron-LM, tests of gpt: experts: --qk-clip-threshold: " in said


def test_models_of_neox_take_from_its_other_files_what_theirs_leave_open(tmp_path: Path) -> None:
    configs = tmp_path / "neox" / "configs"
    (configs / "llama").mkdir(parents=True)
    model = "num_layers: 2\nhidden_size: 64\nnum_attention_heads: 4\nseq_length: 32\nmax_position_embeddings: 32\n"
    training = "train_micro_batch_size_per_gpu: 2\ntrain_iters: 3\ngradient_accumulation_steps: 4\n"
    texts = {
        "whole.yml": f"{model}{training}data-path: other\nmodel_parallel_size: 2\n",
        "llama/alone.yml": model,
        "blend.yml": f"{model}{training}train-data-paths: [blend]\n",
        "mamba.yml": f"{model}attention_config: [[[mamba], 2]]\n",
        "broken.yml": "num_layers: [\n",
        "llama/train_config.yml": training,
        "local_setup.yml": "data-path: corpus\nvocab-file: vocab.json\nmerge-file: merges.txt\n",
    }
    for name, text in texts.items():
        (configs / name).write_text(text)
    found = {
        each.name: each for each in migration_survey.attempts_of_gpt_neox(tmp_path / "neox", _empty(tmp_path / "own"))
    }
    assert list(found) == ["blend.yml", "broken.yml", "llama/alone.yml", "mamba.yml", "whole.yml"]
    assert "is not YAML" in found["broken.yml"].refusal
    assert list(outcome_of(found["mamba.yml"]).features()) == ["attention_config mamba"]
    said = {name: " ".join(found[name].words) for name in ("llama/alone.yml", "whole.yml")}
    assert "--global-batch-size 8" in said["llama/alone.yml"] and "--data-path corpus" in said["llama/alone.yml"]
    assert "--data-path other" in said["whole.yml"] and "--vocab-file vocab.json" in said["whole.yml"]
    assert outcome_of(found["llama/alone.yml"]).passed and outcome_of(found["blend.yml"]).passed
