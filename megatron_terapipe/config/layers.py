"""Layers of the model: their numbers in the pipeline, patterns over them, and the shape of each transformer layer.

Megatron writes a pattern as a number (every Nth layer) or as a list with an entry for each layer. Models whose layers
are not all alike have a file of shapes, `--heterogeneous-layers-config-path`.
"""

import ast
import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_terapipe.config.parsing import parse_json, read_json
from megatron_terapipe.errors import ConfigError

LAYERS_BEFORE_BLOCKS = 2
"""The word and the position embedding."""
LAYERS_AFTER_BLOCKS = 2
"""The final norm and the output layer."""


def output_layer(num_layers: int) -> int:
    """Return the index of the output layer, or of its first part, after `num_layers` transformer layers."""
    return LAYERS_BEFORE_BLOCKS + num_layers + LAYERS_AFTER_BLOCKS - 1


def prediction_layers(num_layers: int, mtp_num_layers: int) -> range:
    """Return the indices of the layers that predict further tokens, after the layer that embeds these."""
    first = output_layer(num_layers) + 2
    return range(first, first + mtp_num_layers)


_LONGEST = 100_000
"""Entries of a list at most: no model has more layers."""


def layers_of_pattern(pattern: str, num_layers: int, flag: str) -> tuple[bool, ...]:
    """Return for each layer whether the pattern names it.

    A number N names every Nth layer: layers N, 2N, ... counted from 1. A list has a 1 for each layer that it names and
    a 0 for each other; it may be written as a sum and product of lists, `([0]*3+[1])*8`.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of doubtful expressions, and then reads them.
            value = _value(ast.parse(pattern.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        value = None
    if isinstance(value, int) and value > 0:
        return tuple((index + 1) % value == 0 for index in range(num_layers))
    if not isinstance(value, list) or not set(value) <= {0, 1}:
        raise ConfigError(
            f"{flag} {pattern} is not a pattern of layers: give a number N for every Nth layer, or a list of 0 and 1 "
            "such as ([0]*3+[1])*8"
        )
    if len(value) != num_layers:
        raise ConfigError(
            f"{flag} {pattern} lists {len(value)} layers, but --num-layers is {num_layers}: list each layer once"
        )
    return tuple(entry == 1 for entry in value)


def window_of_megatron(text: str) -> int | None:
    """Return the tokens that a token attends to, itself included, from the value of Megatron's `--window-size`.

    The value is the number of tokens before and after a token, without the token itself; -1 before it is all of them.
    """
    found = re.fullmatch(r"\(?\s*(-1|\d+)\s*,\s*0\s*\)?", text.strip())
    if found is None:
        raise ValueError(f"{text} is not N,0: give the number of tokens before a token, and 0 for those after it")
    return int(found[1]) + 1 or None


def _value(node: ast.expr) -> int | list[int]:
    """Return the value of an expression of whole numbers, lists of them, `+` and `*`."""
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return number
        case ast.List(elts=entries):
            numbers = [number for number in map(_value, entries) if isinstance(number, int)]
            if len(numbers) == len(entries):
                return numbers
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            first, second = _value(left), _value(right)
            if isinstance(first, list) and isinstance(second, list):
                return first + second
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            first, second = _value(left), _value(right)
            listed, times = (first, second) if isinstance(first, list) else (second, first)
            if isinstance(listed, list) and isinstance(times, int) and 0 <= times * max(len(listed), 1) <= _LONGEST:
                return listed * times
    raise ValueError("neither a number nor a list of numbers")


FLAG = "--heterogeneous-layers-config-path"
MOST_HEADS, MOST_WIDTH = 100_000, 10_000_000
"""Heads of an attention, and width of an MLP's hidden layer, at most."""

_MULTIPLE = 256
"""Widths that follow from `ffn_mult` are multiples of this, as in Megatron."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recurrence:
    """Sizes of a token mixer with a state [H, K, V] of each sequence, in place of attention.

    Ranks that share the layer share its groups.
    """

    kind: Literal["mamba2", "gated-delta-net"]
    num_heads: int
    """Heads of values, H."""
    num_groups: int
    """Heads of queries and keys, G; in Mamba-2 groups of C and B. A divisor of the heads of values."""
    key_size: int
    """Width of a query and of a key, K; in Mamba-2 the state of a channel."""
    value_size: int
    """Width of a head of values, V."""
    conv_size: int
    """Taps of the causal convolution before it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentSizes:
    """Sizes of latent attention."""

    query_rank: int
    """Width of the latent of the queries, q; 0 = queries are projected from the hidden state."""
    rank: int
    """Width of the latent of keys and values, c."""
    key_size: int
    """Channels of a head's queries and keys that are not rotated, n."""
    rotated_size: int
    """Rotated channels of a head's queries, and of the key that all heads share, r."""
    value_size: int
    """Width of a head's values, v."""

    @property
    def head_size(self) -> int:
        """Width of a head's queries and keys, n + r."""
        return self.key_size + self.rotated_size

    @property
    def kept_size(self) -> int:
        """Numbers of a token from which its keys and values of all heads follow, c + r."""
        return self.rank + self.rotated_size


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockShape:
    """Sizes of the parts of one transformer layer."""

    num_key_value_heads: int
    """Key and value heads of its attention; 0 = the attention is left out."""

    ffn_hidden_size: int
    """Width of the hidden layer of its MLP, or of each expert; 0 = the MLP is left out."""

    num_experts: int = 0
    """Experts in place of its MLP; 0 = an MLP."""

    shared_ffn_hidden_size: int = 0
    """Width of the hidden layer of its shared experts; 0 = none."""

    window: int | None = None
    """Tokens that a token attends to, itself included; None = all before it."""

    recurrence: Recurrence | None = None
    """Its token mixer, if it has one with a state in place of attention."""

    latent: LatentSizes | None = None
    """Its latent attention, if it has one; None for a layer without attention, too."""

    rotated: bool = True
    """Whether its queries and keys are rotated, in a model with rotary positions."""


def canonical_layers(text_or_path: str) -> str:
    """Return the JSON text of a per-layer description, from that text or from the file that holds it.

    Configurations and checkpoints keep the text, because the file may be gone when a checkpoint is loaded.
    """
    inline = text_or_path.lstrip().startswith("{")
    document = parse_json(text_or_path, FLAG) if inline else read_json(text_or_path, FLAG)
    if not isinstance(document, Mapping):
        raise ConfigError(f"{FLAG} {_short(text_or_path)} is not a JSON object: write one with a list `block_configs`")
    return json.dumps(document, separators=(",", ":"))


def block_shapes(layers: str, *, usual: BlockShape, num_attention_heads: int, hidden_size: int) -> list[BlockShape]:
    """Read a per-layer description in the manner of Megatron's heterogeneous-layers configuration.

    `{"block_configs": [{"attention": {"num_query_groups": 2}, "mlp": {"ffn_hidden_size": 512}}, ...]}`: a layer an
    entry. Parts that an entry leaves out, or has as null, are as usual; `"no_op": true` removes a part. The words of
    Nemotron's files, which Megatron reads too, are read as Megatron does: `ffn` for `mlp`, `n_heads_in_group` (query
    heads of each key and value head) and `ffn_mult` (the width is 2/3 of that many hidden sizes, rounded up to 256).
    """
    document = json.loads(layers)
    unknown = set(document) - {"block_configs"}
    entries = document.get("block_configs")
    if unknown or not isinstance(entries, list) or not entries:
        what = f"has unknown key {min(unknown)!r}" if unknown else "has no list `block_configs`"
        raise ConfigError(f'{FLAG} {what}: write {{"block_configs": [{{"attention": {{}}, "mlp": {{}}}}, ...]}}')
    return [_block_shape(index, entry, usual, num_attention_heads, hidden_size) for index, entry in enumerate(entries)]


def _block_shape(index: int, entry: Any, usual: BlockShape, num_attention_heads: int, hidden_size: int) -> BlockShape:
    where = f"{FLAG}: layer {index}"
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where} is {json.dumps(entry)}, not an object: write {{}} for a layer as usual")
    attention = _part(entry, "attention", {"num_query_groups", "n_heads_in_group"}, where)
    name = "ffn" if "ffn" in entry else "mlp"
    mlp = _part(entry, name, {"ffn_hidden_size", "ffn_mult"}, where)
    _check_keys(entry, {"attention", name}, where)
    groups, width = usual.num_key_value_heads, usual.ffn_hidden_size
    if "num_query_groups" in attention:
        groups = _count(attention["num_query_groups"], f"{where} attention.num_query_groups", MOST_HEADS)
    elif "n_heads_in_group" in attention:
        in_group = _count(attention["n_heads_in_group"], f"{where} attention.n_heads_in_group", MOST_HEADS)
        groups = num_attention_heads // in_group
        if groups * in_group != num_attention_heads:
            raise ConfigError(
                f"{where} attention.n_heads_in_group {in_group} does not divide --num-attention-heads "
                f"{num_attention_heads}: give one of its divisors"
            )
    if "ffn_hidden_size" in mlp:
        width = _count(mlp["ffn_hidden_size"], f"{where} {name}.ffn_hidden_size", MOST_WIDTH)
    elif "ffn_mult" in mlp:
        mult = mlp["ffn_mult"]
        if isinstance(mult, bool) or not isinstance(mult, int | float) or not 0 < mult < 1e6:
            raise ConfigError(f"{where} {name}.ffn_mult {json.dumps(mult)} is not a number above 0: give one")
        width = -(-int(2 * mult * hidden_size / 3) // _MULTIPLE) * _MULTIPLE or _MULTIPLE
        _count(width, f"{where} {name}.ffn_mult {json.dumps(mult)}: ffn_hidden_size", MOST_WIDTH)
    if num_attention_heads % groups:
        raise ConfigError(
            f"{where}: {groups} key and value heads do not divide --num-attention-heads {num_attention_heads}: "
            "give one of its divisors"
        )
    return BlockShape(
        num_key_value_heads=0 if attention.get("no_op") else groups, ffn_hidden_size=0 if mlp.get("no_op") else width
    )


def _part(entry: Mapping[str, Any], name: str, keys: set[str], where: str) -> Mapping[str, Any]:
    """One part of an entry, its keys known; those that are null left out."""
    part = entry.get(name, {})
    if not isinstance(part, Mapping):
        raise ConfigError(f"{where} {name} is {json.dumps(part)}, not an object: write {{}} for one as usual")
    for key in ("no_op", "replace_with_linear"):
        if not isinstance(part.get(key, False), bool):
            raise ConfigError(f"{where} {name}.{key} is {json.dumps(part[key])}: give true or false")
    if part.get("replace_with_linear"):
        raise ConfigError(
            f"{where} {name}.replace_with_linear: linear layers in its place are not in this trainer: use no_op"
        )
    _check_keys({key: part[key] for key in part if key != "replace_with_linear"}, {*keys, "no_op"}, f"{where} {name}")
    return {key: value for key, value in part.items() if value is not None}


def _check_keys(found: Mapping[str, Any], known: set[str], where: str) -> None:
    for key in found:
        if key not in known:
            raise ConfigError(f"{where} has unknown key {key!r}: use {' or '.join(sorted(known))}")


def _count(value: Any, where: str, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{where} {json.dumps(value)} is not a whole number above 0: give one, or no_op")
    if value > most:
        raise ConfigError(f"{where} {value} is more than {most:,}: give {most:,} or less")
    return value


def _short(text: str) -> str:
    return text if len(text) <= 60 or Path(text).exists() else f"{text[:57]}..."
