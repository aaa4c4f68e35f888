"""Files that users name are read by `deepspeed_ext/plan/text_files.py`, which has bounds of size and time."""

import ast

import pytest

from tests.architecture.sources import CODE, ROOT, python_files

OWN_READERS = {
    "deepspeed_ext/plan/text_files.py": "the reader itself",
    "deepspeed_ext/plan/draw/html.py": "files of the package",
    "deepspeed_ext/plan/simulate/arrays.py": "sources of the package",
    "megatron_terapipe/arguments/foreign_flags.py": "a file of the package",
    "megatron_terapipe/checkpoint/directories.py": "the first bytes of `latest` and of the lock",
    "megatron_terapipe/checkpoint/inert_pickles.py": "pickles of other trainers, after a check of their size",
    "megatron_terapipe/checkpoint/megatron_files.py": "tensors of Megatron-LM, one at a time",
    "megatron_terapipe/checkpoint/manifest.py": "hashes of files, by blocks",
    "megatron_terapipe/data/file_arrays.py": "columns of data files, and the cache, which has an owner",
    "megatron_terapipe/data/indexed_dataset.py": "data files, by blocks",
    "megatron_terapipe/data/preprocess.py": "the corpus, by runs of lines",
    "megatron_terapipe/data/tokenizer_checks.py": "hashes of data files, by blocks",
    "megatron_terapipe/doctor/examination.py": "a file of the package",
    "megatron_terapipe/doctor/facts.py": "output of its own probes",
    "megatron_terapipe/doctor/probe.py": "/proc, and files of the installation; it has the standard library only",
    "megatron_terapipe/huggingface/folder_weights.py": "weights by the package safetensors",
    "megatron_terapipe/neox/convert.py": "a file of the package",
    "megatron_terapipe/page/document.py": "files of the package",
    "megatron_terapipe/run_report/__main__.py": "the first bytes of a file",
    "megatron_terapipe/run_report/own_report.py": "the last bytes of its own metrics file",
    "megatron_terapipe/search/answer/trial_command.py": "output of its own trials",
    "megatron_terapipe/launch/supervisor.py": "/proc",
    "megatron_terapipe/search/measure/layers.py": "/proc",
    "deepspeed_ext/runtime/health/processes.py": "/proc",
    "deepspeed_ext/runtime/saved_files.py": "checkpoints by torch, after a check of their size",
}
"""Modules that read files in another way, and which files."""

LOADERS = ("load", "fromfile", "memmap", "from_file", "safe_open")
"""Functions of packages that read a file by its name."""


def own_reads(source: str) -> list[int]:
    """The lines of a source text that read a file in another way."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            function = ast.unparse(node.func)
            name = function.rpartition(".")[2]
            if function in ("open", "os.open", "io.open") or (name == "open" and "." in function):
                reads = not _is_for_writing(node)
            elif name in ("read_text", "read_bytes"):
                reads = function not in ("read_text", "text_files.read_text")
            else:
                reads = name in LOADERS and function not in ("yaml.load", "json.load", "super().load")
            if reads:
                found.append(node.lineno)
    return found


def _is_for_writing(call: ast.Call) -> bool:
    words = [each.value for each in ast.walk(call) if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    flags = ast.unparse(call)
    return any(word in ("w", "wb", "x", "a", "ab") for word in words) or "O_WRONLY" in flags


def test_files_of_users_have_one_reader() -> None:
    found = {}
    for path in python_files(*CODE):
        name = str(path.relative_to(ROOT))
        if name != "setup.py" and (lines := own_reads(path.read_text(encoding="utf-8"))):
            found[name] = lines
    others = [f"{name}:{lines[0]}" for name, lines in found.items() if name not in OWN_READERS]
    assert not others, f"read by something else than deepspeed_ext/plan/text_files.py: {', '.join(others)}"
    assert not OWN_READERS.keys() - found.keys(), "no file is read there"


@pytest.mark.parametrize(
    "source",
    [
        *("Path(name).read_text()", "path.read_bytes()", "open(name)", "path.open('rb')", "os.open(name, os.O_RDONLY)"),
        *("torch.load(path)", "Tokenizer.from_file(name)", "np.memmap(name)", "np.load(name)"),
    ],
)
def test_such_reads_are_found(source: str) -> None:
    assert own_reads(source)
    assert not own_reads("read_text(name)\nopen(name, 'w')\ntext_files.read_text(name)\nos.open(name, os.O_WRONLY)")
