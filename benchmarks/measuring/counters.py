"""Counters under torch's dispatcher: bytes of living tensors, and kernels that a device would launch.

`LiveBytes` counts the bytes of tensors that are alive, made by the code it watches; on any device, CPUs included.

`KernelCounter` counts kernels, and the numbers that each reads and writes, without a device. A kernel is an operator
that computes, or a loop that torch's compiler leaves of a pointwise function after fusion. It reads each of its inputs
once and writes each of its outputs once: registers and caches are not counted. Tensors are on the meta device, or are
fake ones of a CUDA device.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from deepspeed_ext.pointwise import Pointwise


class LiveBytes(TorchDispatchMode):
    """Watches every operation, forward and backward, and follows each storage that it makes until it is freed.

    Args:
        apart: live bytes that are not counted in the peak, such as buffers in place of a host's.

    Attributes:
        now: bytes alive, of storages made since watching began.
        peak: the most there were at once.
    """

    def __init__(self, apart: Callable[[], int] = lambda: 0) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._apart = apart
        self._followed: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        """Run an operation, then follow its outputs."""
        keywords = keywords or {}
        result = function(*arguments, **keywords)
        # A view, or a result in place, is no new memory; parameters are there from before.
        given = {storage._cdata for storage in _storages((arguments, keywords))}
        for storage in _storages(result):
            if storage._cdata not in given:
                self._follow(storage)
        return result

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._followed or not size:
            return
        self._followed.add(key)
        self.now += size
        self.peak = max(self.peak, self.now - self._apart())
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._followed.discard(key)
        self.now -= size


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


COMPUTES_NOTHING = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach", "_unsafe_view"}
"""Operators that launch nothing, besides views."""

OVERWRITES = {"copy_", "fill_", "zero_"}
"""Operators in place that do not read their output."""

LOOK_UPS = {"embedding", "gather", "index_add_", "scatter_", "scatter_add_"}
"""Operators that touch a part of a table, their first argument: as many numbers as they put out, or put in."""

PRODUCTS = {"mm", "addmm", "addmm_", "bmm", "_flash_attention_forward", "_flash_attention_backward"}
"""Operators whose bytes are not counted: they are moved during the computation."""

UPDATES = {"_fused_adamw_": ("self", "exp_avgs", "exp_avg_sqs")}
"""Operators that write to lists of tensors and put nothing out, and which arguments these are."""

READ_TWICE = {"native_layer_norm_backward": 2}
"""Operators that are two kernels on CUDA: how many of their first arguments both of them read. Layer norm has one for
the gradient of its input and one for its weights (`aten/src/ATen/native/cuda/layer_norm_kernel.cu`)."""


CASTS_INPUT = {"_softmax", "_log_softmax"}
"""Operators that on CUDA read half precision and compute in fp32, where the meta device sees a cast before them."""


class Kernels(NamedTuple):
    """Kernels of a function."""

    count: int
    moved: Counter[torch.dtype]
    """Numbers that they read and write, by type."""


class KernelCounter(TorchDispatchMode):
    """Counts the operators that run inside and launch a kernel.

    Attributes:
        found: how often each ran, by name.
        moved: numbers that they read and write, by type; of `PRODUCTS` none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.moved: Counter[torch.dtype] = Counter()
        # Held weakly: autograd copies a gradient that somebody else holds.
        self._cast: tuple[weakref.ref[Tensor], weakref.ref[Tensor]] | None = None

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Sequence[Any] = (), keywords: Mapping[str, Any] | None = None
    ) -> Any:
        result = function(*arguments, **(keywords or {}))
        name = function._schema.name.removeprefix("aten::")
        # The meta device asks for types with an operator of this name. Messages and marks for profilers are no kernels.
        if function.is_view or name in COMPUTES_NOTHING or name == "promote_types" or "::" in name:
            return result
        read = [value for keyword, value in (keywords or {}).items() if keyword != "out"]
        inputs, outputs = list(_tensors([*arguments, *read])), list(_tensors([result]))
        if name in UPDATES:
            named = zip((each.name for each in function._schema.arguments), arguments, strict=False)
            outputs += _tensors([value for each, value in named if each in UPDATES[name]])
        if name in CASTS_INPUT and self._cast is not None and inputs[0] is self._cast[1]():
            before = self._cast[0]()
            assert before is not None, "the input of a cast is alive"
            self.found["_to_copy"] -= 1
            self.moved.subtract(_moved("_to_copy", [before], inputs[:1]))
            inputs[0] = before
        self._cast = (weakref.ref(inputs[0]), weakref.ref(outputs[0])) if name == "_to_copy" else None
        self.found[name] += 1
        if name not in PRODUCTS:
            self.moved.update(_moved(name, inputs, outputs))
        return result


def _moved(name: str, inputs: list[Tensor], outputs: list[Tensor]) -> Counter[torch.dtype]:
    """Numbers that an operator reads and writes, by type."""
    moved: Counter[torch.dtype] = Counter()
    if name in LOOK_UPS:
        table, is_written = inputs[0], inputs[0] is outputs[0]
        touched = inputs[-1] if is_written else outputs[0]
        moved[table.dtype] += (1 + is_written) * _distinct(touched)
        inputs, outputs = inputs[1:], [] if is_written else outputs
    elif name in OVERWRITES:
        inputs = inputs[1:]
    for each in [*inputs, *inputs[: READ_TWICE.get(name, 0)], *outputs]:
        moved[each.dtype] += _distinct(each)
    return moved


def _tensors(values: Any) -> Iterator[Tensor]:
    for each in values:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, (list, tuple)):
            yield from _tensors(each)


def _distinct(tensor: Tensor) -> int:
    """Number of distinct elements in memory: an expanded tensor has fewer."""
    number = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        number *= size if stride else 1
    return number


class _Counted(Exception):
    """Ends a compilation once the kernels are known."""


def compiled_kernels(function: Callable[..., Any], *arguments: Any) -> Kernels:
    """Kernels of a function once torch has compiled and fused it; nothing is built."""
    import torch._inductor.config as inductor

    found: list[Kernels] = []

    def count(nodes: list[Any]) -> list[Any]:
        moved: Counter[torch.dtype] = Counter()
        for node in nodes:
            # A kernel of several loops keeps nothing in registers from one to the next.
            for loop in node.snodes if node.is_foreach() else [node]:
                moved.update(_moved_by(loop))
        found.append(Kernels(len(nodes), moved))
        raise _Counted

    # As for GPUs: fused by the rules of their backend, and what is concatenated is computed in place.
    settings = {
        "_post_fusion_custom_pass": count,
        "force_pointwise_cat": True,
        "realize_opcount_threshold": inductor.realize_cpu_opcount_threshold,
        "realize_acc_reads_threshold": inductor.realize_cpu_acc_reads_threshold,
        "fx_graph_cache": False,
        "cpu_backend": "triton",
        # Whether a sum over rows takes two kernels depends on the processors of the device.
        "split_reductions": False,
    }
    torch._dynamo.reset()
    # Where CPUs would rather keep the result of an exponential function than compute it twice, GPUs compute it.
    with inductor.patch(settings), patch("torch._inductor.ir.is_cpu", lambda _: False):
        try:
            torch.compile(function, fullgraph=True)(*arguments)
        except Exception:
            if not found:
                raise
    return found[0]


def _moved_by(node: Any) -> Counter[torch.dtype]:
    """Numbers that a kernel of torch's compiler reads and writes, by type."""
    from torch._inductor.dependencies import MemoryDep
    from torch._inductor.virtualized import V

    moved: Counter[torch.dtype] = Counter()
    for dependencies, writes in ((node.read_writes.reads, False), (node.read_writes.writes, True)):
        # The names leave out what stays in registers.
        for name in node.get_read_write_buffer_accesses(include_reads=not writes, include_writes=writes):
            largest = int(V.graph.get_numel(name))
            parts: list[tuple[int, Any]] = sorted(
                ((_offset(each), each) for each in dependencies if each.name == name and isinstance(each, MemoryDep)),
                key=lambda part: part[0],
            )
            number, end = 0, None
            for offset, each in parts:
                # Both halves of a head are read for each half: a part that overlaps the one before is read with it.
                if end is None or offset >= end:
                    number += int(each.get_numel())
                end = offset + int(each.size[-1] if each.size else 1)
            moved[V.graph.get_dtype(name)] += min(number, largest)
    return moved


def _offset(dependency: Any) -> int:
    """Where in a buffer a loop begins to read or write."""
    index = dependency.index
    return int(index.subs(dict.fromkeys(index.free_symbols, 0)).expand(identity=True))


_KNOWN: dict[Any, Kernels] = {}
"""Kernels of compiled functions, by the function and its arguments: to compile takes most of the time of a count."""


@contextmanager
def counting(*, compiled: bool) -> Iterator[KernelCounter]:
    """Count the kernels that run inside, on the meta device."""
    counter = KernelCounter()

    def call(function: Pointwise, *arguments: Any) -> Any:
        name, operators, moved = function.function.__name__, counter.found.copy(), counter.moved.copy()
        result = function.function(*arguments)
        if not compiled:
            return result
        key = function.function, *((each.shape, each.dtype) if isinstance(each, Tensor) else each for each in arguments)
        counter.found, counter.moved = operators, moved
        if key not in _KNOWN:
            with _disable_current_modes():
                on_cpu = [
                    torch.zeros_like(each, device="cpu") if isinstance(each, Tensor) else each for each in arguments
                ]
                _KNOWN[key] = compiled_kernels(function.function, *on_cpu)
        counter.found[name] += _KNOWN[key].count
        counter.moved += _KNOWN[key].moved
        return result

    with patch.multiple(Pointwise, __call__=call, is_compiled_on=lambda *_: compiled), counter:
        yield counter
