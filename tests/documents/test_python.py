"""Every block of Python that a document shows runs, the blocks of a document one after the other."""

import ast
import os
import sys
from pathlib import Path
from typing import Any

from tests.architecture.sources import ROOT
from tests.distributed import run_distributed
from tests.documents.blocks import Block, blocks_of, written

EXAMPLES = [path.read_text(encoding="utf-8") for path in (ROOT / "examples").glob("*.py")]


def python_of(path: Path) -> list[Block]:
    """The blocks of a document, but for what stands in an example, which has a test of its own."""
    blocks = [block for block in blocks_of(path) if block.language == "python"]
    return [block for block in blocks if not any(block.text in example for example in EXAMPLES)]


WITH_PYTHON = [path for path in written() if python_of(path)]


def names_of_the_text() -> dict[str, Any]:
    """Return what the blocks leave to the reader: the layers of `examples/own_model.py`, with names, and data."""
    import torch
    from deepspeed.pipe import LayerSpec
    from torch import nn

    example = ast.parse((ROOT / "examples" / "own_model.py").read_text(encoding="utf-8"))
    definitions = [node for node in example.body if not isinstance(node, ast.Expr | ast.For)]
    definitions = definitions[: next(i for i, node in enumerate(definitions) if isinstance(node, ast.FunctionDef)) + 1]
    names: dict[str, Any] = {}
    exec(compile(ast.Module(definitions, []), "own_model.py", "exec"), names)  # noqa: S102 - our own example

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(names["VOCAB"], names["HIDDEN"])

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.words(tokens)

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.projection = nn.Linear(names["HIDDEN"], names["VOCAB"], bias=False)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.projection(hidden)

    def counting(rows: int) -> Any:
        return ((data.repeat(rows // 8, 1), labels.repeat(rows // 8, 1)) for data, labels in names["counting"]())

    return names | {
        "layers": [LayerSpec(Words), *[LayerSpec(names["Block"])] * 4, LayerSpec(Head)],
        "layout": names["ParallelLayout"](num_token_slices=4),
        "loss_fn": lambda logits, labels: nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()),
        "config": {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2},
        "num_ranks": 1,
        "data_iter": counting(8),
        "eval_iter": counting(16),
        "Adam": torch.optim.Adam,
    }


def run_blocks(paths: list[Path], directory: Path) -> None:
    os.chdir(directory)  # Some blocks write files, and some read examples.
    Path("examples").symlink_to(ROOT / "examples")
    sys.path.insert(0, str(ROOT / "examples"))  # for `transformers_layers`
    for path in paths:
        names = names_of_the_text()
        for block in python_of(path):
            # A traceback names the block.
            exec(compile(block.text, block.where, "exec"), names)  # noqa: S102 - our own documents


def test_blocks_run(tmp_path: Path) -> None:
    """All in one process, since a process takes longer to start than all blocks to run."""
    assert len(WITH_PYTHON) > 3
    run_distributed(run_blocks, 1, WITH_PYTHON, tmp_path)
