"""Checkpoints of Megatron-LM as checkpoints of one rank, of which each tensor is read when it is used.

Weights have the layout of ours under other names, so that a run of any layout takes its parts of them.
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

from torch import Tensor

from deepspeed_ext.plan.layout import ParallelLayout
from megatron_terapipe.checkpoint.info import CheckpointInfo
from megatron_terapipe.checkpoint.megatron_files import WEIGHT_OF_OPTIMIZER, MegatronFiles, open_files
from megatron_terapipe.checkpoint.megatron_model import MEGATRON, model_of
from megatron_terapipe.checkpoint.optimizer_state import ParameterState, SavedRun
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.errors import CheckpointError
from megatron_terapipe.huggingface.folder_weights import FolderWeights


def megatron_info(directory: Path, model: ModelConfig | None = None) -> CheckpointInfo:
    """Return the facts of a checkpoint of Megatron-LM.

    Args:
        model: the run's, which has the vocabulary before padding; None where there is none yet.
    """
    files = open_files(directory)
    if files.args is None:
        raise CheckpointError(
            f"checkpoint {directory} of Megatron-LM has no arguments, which describe its model: load one that its "
            "trainer saved"
        )
    theirs = model_of(files.args, directory)
    if model is not None:
        _check_vocabulary(model, files, directory)
        own = ("vocab_size", "vocab_rows", "make_vocab_size_divisible_by", "model_preset")
        theirs = replace(theirs, **{name: getattr(model, name) for name in own})
    return CheckpointInfo(
        iteration=files.iteration,
        consumed_samples=getattr(files.args, "consumed_train_samples", 0),
        model=asdict(theirs),
        layout=asdict(ParallelLayout()),
        optimizer=str(getattr(files.args, "optimizer", "adam")),
        partitioned=False,
        tokenizer={},
    )


def _check_vocabulary(model: ModelConfig, files: MegatronFiles, directory: Path) -> None:
    """Refuse a run whose vocabulary Megatron does not pad to the rows of a checkpoint."""
    rows, words = files.shape(f"{MEGATRON.names(model).words}.weight")[0], model.vocab_size or 0
    multiple = getattr(files.args, "make_vocab_size_divisible_by", 128)
    multiple *= getattr(files.args, "tensor_model_parallel_size", 1)
    if rows not in (-(-words // multiple) * multiple, model.vocab_rows) or words > rows:
        raise CheckpointError(
            f"checkpoint {directory} of Megatron-LM has {rows} rows of words, to which the {words} tokens of this run "
            f"are not padded: give its tokenizer, or --padded-vocab-size {rows}"
        )


class _Tensors:
    """The tensors of a model as `FolderWeights` reads them: without the rows that pad the vocabulary.

    Args:
        state: of the optimizer, in place of the weights; None for the weights.
    """

    def __init__(self, files: MegatronFiles, model: ModelConfig, state: str | None) -> None:
        names = MEGATRON.names(model)
        self._files, self._words, self._state = files, model.vocab_size, state
        self._vocabulary = (names.words, names.output)
        self.names = files.names

    def read(self, name: str) -> Tensor:
        """Return a tensor [...]."""
        return self._files.read(name, self._state)[self._rows(name)]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, which is not read."""
        first, *rest = self._files.shape(name)
        return (len(range(first)[self._rows(name)]), *rest)

    def _rows(self, name: str) -> slice:
        return slice(self._words if name.startswith(self._vocabulary) else None)


class MegatronWeights(FolderWeights):
    """The weights of a checkpoint, and the states of its optimizer.

    A weight is the optimizer's, in fp32, where that has one of its own: the model's is this, rounded.
    """

    def __init__(self, directory: Path, model: ModelConfig) -> None:
        self._files = files = open_files(directory)
        own = WEIGHT_OF_OPTIMIZER if WEIGHT_OF_OPTIMIZER in files.states else None
        super().__init__(directory, MEGATRON, model, _Tensors(files, model, own))
        self._moments = {
            state: FolderWeights(directory, MEGATRON, model, _Tensors(files, model, state))
            for state in sorted(files.states - {WEIGHT_OF_OPTIMIZER})
        }

    def moments(self, index: int, name: str) -> dict[str, Tensor]:
        """Return the states of the optimizer of a weight of a pipeline layer, by name and in its shape [...]."""
        return {state: weights.weight(index, name) for state, weights in self._moments.items()}

    @property
    def step(self) -> float | None:
        """Updates done by the optimizer; None if it does not count them."""
        return self._files.step

    def of(self, name: str, tensor_parallel_rank: int, elements: range) -> ParameterState:
        """Return the optimizer's state of some elements of a parameter, by its name in the engine."""
        first, _, rest = name.partition(".")
        # The only tied layers are the word embedding and the output layer.
        index, in_layer = (int(first), rest) if first.isdecimal() else (0, rest.partition(".")[2])
        moments = self.moments(index, in_layer).items()
        return ParameterState(
            weight=None,
            moments={state: each.flatten()[elements.start : elements.stop] for state, each in moments},
            step=self.step,
        )

    def run(self) -> SavedRun:
        """Return the counters of the run, and the loss scale if it was in fp16."""
        optimizer = self._files.common.get("optimizer")
        scaler = optimizer.get("grad_scaler") if isinstance(optimizer, Mapping) else None
        return SavedRun(
            places={},
            counters={"global_steps": self._files.iteration, "skipped_steps": 0},
            loss_scaler=SimpleNamespace(cur_scale=float(scaler["scale"])) if scaler else None,
        )

    def check_states(self) -> None:
        """Check that the optimizer's states can be read."""
        if not self._moments:
            raise CheckpointError(
                f"checkpoint {self._directory} of Megatron-LM has no state of the optimizer that can be read: "
                f"{self._files.no_states}; load only the weights, with --no-load-optim or --finetune"
            )
