"""The weights of a folder of Hugging Face, each read as one of ours.

First tensors in safetensors files, in one or in several with an index.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from deepspeed_ext.plan.text_files import permit_as_new
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.config.options import one_of
from megatron_terapipe.config.parsing import read_json
from megatron_terapipe.errors import CheckpointError, ConfigError, first_line, not_installed
from megatron_terapipe.huggingface.families.family import Family
from megatron_terapipe.huggingface.weight_rules import WeightRule, layer_rules
from megatron_terapipe.model.gpt import gpt_layers, layers_with_weights

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_FLOATS = ("F64", "F32", "F16", "BF16")
SHARD_BYTES = 5 * 10**9
"""Bytes of tensors in one file; as large as Hugging Face's library writes them."""


_MXFP4 = ("_blocks", "_scales")
"""Ends of the names of the two tensors that one in MXFP4 is (OCP Microscaling Formats (MX) Specification, version 1.0:
32 numbers E2M1 of 4 bits, and their exponent E8M0), both uint8, of transposed matrices: [E, out, in / 32, 16], a byte
for two numbers, the first in the low half, and [E, out, in / 32], an exponent and 127. gpt-oss has its experts so."""

_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Numbers of MXFP4 by their three low bits; the fourth is the sign."""


def _dequantized_shape(blocks: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a tensor by the shapes of its two; the shape of the blocks where they do not fit."""
    if len(blocks) != 4 or blocks[:3] != scales:
        return blocks
    experts, outputs, groups, width = blocks
    return experts, groups * width * 2, outputs


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return [E, in, out] in bf16, in which every number is exact, of blocks [E, out, in / 32, 16] and their scales."""
    table = torch.tensor([*_NUMBERS, *(-each for each in _NUMBERS)])
    found = torch.empty(_dequantized_shape(tuple(blocks.shape), tuple(scales.shape)), dtype=torch.bfloat16)
    for matrix, halves, exponents in zip(found, blocks, scales, strict=True):
        codes = torch.stack((halves & 15, halves >> 4), dim=-1).flatten(2)
        matrix.copy_(torch.ldexp(table[codes.int()], exponents.int().unsqueeze(2) - 127).flatten(1).t())
    return found


class SavedTensors:
    """The tensors of a directory with one file, or with an index and its files; each is read when it is used.

    A tensor in MXFP4, which is two there, is one in bf16 here.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open = lru_cache(maxsize=None)(self._open_file)
        self._files = self._index()
        packed = [{each[: -len(end)] for each in self._files if each.endswith(end)} for end in _MXFP4]
        self._packed = frozenset.intersection(*map(frozenset, packed))
        pairs = {each + end for each in self._packed for end in _MXFP4}
        self.names = frozenset(self._files.keys() - pairs | self._packed)

    def read(self, name: str) -> Tensor:
        """Read one tensor, in the shape [...] that the file gives it."""
        if name in self._packed:
            return dequantized(*(self.read(name + end) for end in _MXFP4))
        return self._found(name, lambda file: file.get_tensor(name))

    def shape(self, name: str, kinds: Sequence[str] = _FLOATS) -> tuple[int, ...]:
        """Return the shape of a weight, which is not read."""
        if name in self._packed:
            return _dequantized_shape(*(self.shape(name + end, ("U8",)) for end in _MXFP4))
        found = self._found(name, lambda file: file.get_slice(name))
        if (kind := found.get_dtype()) not in kinds:
            raise self._unreadable(self._files[name], ValueError(f"{name} is in {kind}, and not in {one_of(kinds)}"))
        return tuple(found.get_shape())

    def _found(self, name: str, find: Callable[[Any], Any]) -> Any:
        try:
            return find(self._open(self._files[name]))
        except Exception as error:
            raise self._unreadable(self._files[name], error) from None

    def _index(self) -> Mapping[str, str]:
        if (self._directory / INDEX).is_file():
            index = read_json(str(self._directory / INDEX), "--load", unbounded=True)
            files = index.get("weight_map") if isinstance(index, dict) else None
            if not isinstance(files, dict):
                raise self._unreadable(INDEX, ValueError("it has no object weight_map"))
            for file in files.values():
                if not isinstance(file, str) or Path(file).name != file:
                    raise CheckpointError(
                        f"{self._directory / INDEX} names {json.dumps(file)[:60]}, which is not a file of this "
                        "folder: get it again"
                    )
                self._open(file)
            return files
        if not (self._directory / SINGLE).is_file():
            raise CheckpointError(
                f"{self._directory} holds neither {SINGLE} nor {INDEX}: give a directory that a model was saved to as "
                "safetensors"
            )
        return dict.fromkeys(self._open(SINGLE).keys(), SINGLE)

    def _open_file(self, file: str) -> Any:
        try:
            if not (self._directory / file).is_file():  # A pipe would never be opened.
                raise FileNotFoundError("No such file")
            return safetensors("").safe_open(self._directory / file, framework="pt")
        except ConfigError:
            raise
        except Exception as error:  # Its errors have a class of their own.
            raise self._unreadable(file, error) from None

    def _unreadable(self, file: str, error: Exception) -> CheckpointError:
        return CheckpointError(f"{self._directory / file} cannot be read ({first_line(error)}): get it again")


def write_tensors(directory: Path, tensors: Iterable[tuple[str, Tensor]], *, shard_bytes: int = SHARD_BYTES) -> None:
    """Write tensors [...] by name as they come; never more than one file of `shard_bytes` is in memory."""
    shards: list[list[str]] = []
    held: dict[str, Tensor] = {}
    total = size = 0

    def flush() -> None:
        save, fault = safetensors(".torch").save_file, safetensors("").SafetensorError
        try:
            save(held, directory / _temporary(len(shards)), metadata={"format": "pt"})
        except fault as error:
            raise OSError(first_line(error)) from None
        shards.append(list(held))
        held.clear()

    for name, tensor in tensors:
        bytes_of_tensor = tensor.numel() * tensor.element_size()
        if held and size + bytes_of_tensor > shard_bytes:
            flush()
            size = 0
        held[name] = tensor.contiguous()
        size, total = size + bytes_of_tensor, total + bytes_of_tensor
    flush()
    _name_files(directory, shards, total)


def _name_files(directory: Path, shards: list[list[str]], total: int) -> None:
    """Give the files names with their number, and write the index if there are several."""
    count = len(shards)
    files = [SINGLE] if count == 1 else [f"model-{each:05d}-of-{count:05d}.safetensors" for each in range(1, count + 1)]
    for number, file in enumerate(files):
        # Safetensors makes files that only the owner can read.
        permit_as_new(directory / _temporary(number))
        (directory / _temporary(number)).rename(directory / file)
    if count > 1:
        weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def safetensors(module: str) -> Any:
    """The package, or a module of it."""
    try:
        return import_module(f"safetensors{module}")
    except ImportError:
        raise ConfigError(f"files of Hugging Face need {not_installed('safetensors')}") from None


def _temporary(number: int) -> str:
    return f"shard-{number}.partial"


DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Types that weights can be converted to, by their names in flags."""


class Tensors(Protocol):
    """Tensors by name, each read when it is used."""

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""

    def read(self, name: str) -> Tensor:
        """Return a tensor [...]."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, which is not read."""


class FolderWeights:
    """The weights of a folder, each read from its file when it is used.

    Args:
        tensors: of the folder; None for those in files of safetensors.
    """

    def __init__(self, directory: Path, family: Family, model: ModelConfig, tensors: Tensors | None = None) -> None:
        self._directory, self._family, self._model = directory, family, model
        self._tensors = tensors or SavedTensors(directory)
        names = family.names(model)
        if family.with_named_layers(model) != model:
            raise ConfigError(
                f"--mtp-num-layers {model.mtp_num_layers}: files of {family.name} have names for "
                f"{family.with_named_layers(model).mtp_num_layers} layers that predict further tokens: give that number"
            )
        weights = (name for name in self._tensors.names if names.is_weight(name, model))
        # From the name of a tensor in the rules to its name in this folder.
        self._spelled = {names.canonical(name): name for name in weights}
        self._rules = lru_cache(maxsize=1)(lambda index: {rule.ours: rule for rule in rules_of(model, family, index)})

    def weight(self, index: int, name: str, tensor_parallel_rank: int = 0) -> Tensor:
        """Return a weight [...] of a pipeline layer, whole: the rank is always 0."""
        rule = self._rules(index)[name]
        return rule.join([self._tensors.read(self._spelled[theirs]) for theirs in rule.theirs])

    def whole(self, index: int, layer: nn.Module | None = None) -> dict[str, Tensor]:
        """Return all weights [...] of a pipeline layer by name; the layer itself is not needed."""
        return {name: self.weight(index, name) for name in self._rules(index)}

    def check(self) -> None:
        """Check that the folder has every tensor of the model, each in its shape, and no other.

        Tensors are read only where a tied output layer is there, too.
        """
        expected: dict[str, torch.Size] = {}
        for index in layers_with_weights(self._model):
            shapes = meta_layer(self._model, index).state_dict()
            for name, rule in self._rules(index).items():
                parts = rule.split(shapes[name])
                expected |= {theirs: part.shape for theirs, part in zip(rule.theirs, parts, strict=True)}
        further = self._family.names(self._model).further
        for missing in sorted(expected.keys() - self._spelled.keys()):
            if further is not None and further.depth_of(missing) is not None:
                raise CheckpointError(
                    f"--mtp-num-layers {self._model.mtp_num_layers} reads {missing}, which {self._directory} does not "
                    "have: give the number of its layers that predict further tokens, 0 for none"
                )
            raise CheckpointError(
                f"{self._directory} has no tensor {missing}, which the model that it describes needs: get it again"
            )
        for extra in sorted(self._spelled.keys() - expected.keys()):
            raise CheckpointError(
                f"{self._directory} has a tensor {self._spelled[extra]}, for which the {self._family.name} "
                "that it describes has no place: this model cannot be trained here"
            )
        for name, shape in expected.items():
            found = self._tensors.shape(self._spelled[name])
            if found != tuple(shape):
                raise CheckpointError(
                    f"{self._directory} has {name} {found}, which is not the {tuple(shape)} of the model "
                    "that it describes: get it again"
                )
        self._check_tied()

    def left_out(self) -> str | None:
        """Return a sentence about layers that predict further tokens and are not read; None without any."""
        further = self._family.names(self._model).further
        depths = {further.depth_of(name) for name in self._tensors.names} - {None} if further is not None else set()
        if (unread := len(depths) - self._model.mtp_num_layers) <= 0 or further is None:
            return None
        first = further.begin.format(further.first + self._model.mtp_num_layers)
        return (
            f"{self._directory} has {unread} layer{'s' * (unread > 1)} that predict further tokens ({first}*), which "
            f"--mtp-num-layers {len(depths)} reads, and which {'are' if unread > 1 else 'is'} left out"
        )

    def _check_tied(self) -> None:
        """Refuse an output layer with values of its own in a tied model: versions of transformers differ on it."""
        names = self._family.names(self._model)
        own, words = f"{names.output}.weight", f"{names.prefix}{names.words}.weight"
        if own in self._spelled or own not in self._tensors.names:
            return
        tied = self._tensors.read(self._spelled[words])
        if not torch.equal(self._tensors.read(own).to(tied.dtype), tied):
            raise CheckpointError(
                f"{self._directory} has a tensor {own} with other values than {words}, and the model that it describes "
                "ties them: set tie_word_embeddings to false in config.json to train both, as transformers 5 does"
            )


def rules_of(model: ModelConfig, family: Family, index: int) -> list[WeightRule]:
    """Return the rules of the weights of a pipeline layer."""
    return layer_rules(model, family.names(model), index, meta_layer(model, index).state_dict())


def meta_layer(model: ModelConfig, index: int) -> nn.Module:
    """Return a pipeline layer on the meta device."""
    with torch.device("meta"):
        return gpt_layers(model)[index].build()
