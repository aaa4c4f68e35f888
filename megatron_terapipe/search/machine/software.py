"""The form of a description of a trainer: facts that affect time or memory, and do not depend on the hardware."""

from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from math import log
from types import MappingProxyType
from typing import Literal, NamedTuple

from megatron_terapipe.devices import EIGHT_BITS, Device
from megatron_terapipe.errors import ConfigError

ELEMENT_BYTES: Mapping[str, int] = MappingProxyType({"fp16": 2, "bf16": 2, "fp32": 4, **dict.fromkeys(EIGHT_BITS, 2)})
"""Bytes of a number between products, by precision; of `EIGHT_BITS` are only the products of transformer layers."""

OPERAND_BYTES: Mapping[str, float] = MappingProxyType({**ELEMENT_BYTES, "fp8": 1, "mxfp8": 1 + 1 / 32})
"""Bytes of a number that products read, with its part of a scale. Megatron-core gathers weights so, too
(`--fp8-param-gather`), and the inputs of products that tensor-parallel ranks share (Transformer Engine, `linear.py` and
`layernorm_linear.py` of `pytorch/module`); their sums are in half precision."""

AttentionKernel = Literal[
    "scores", "flash-attention-1", "flash-attention-2", "flash-attention-3", "memory-efficient", "cudnn"
]
"""Implementation of attention. `scores` writes the matrix of scores to memory; the others keep none of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Operator:
    """Memory traffic and kernels of element-wise work, for each number that the operator puts out.

    A number has the bytes of the precision that layers compute in; `bytes` has those that do not depend on it: masks,
    and numbers in fp32.
    """

    forward: float = 0.0
    backward: float = 0.0
    forward_bytes: float = 0.0
    backward_bytes: float = 0.0
    forward_kernels: float = 1.0
    backward_kernels: float = 1.0

    def bytes_forward(self, element_bytes: int) -> float:
        """Bytes that the forward moves for each number of its output."""
        return element_bytes * self.forward + self.forward_bytes

    def bytes_backward(self, element_bytes: int) -> float:
        """Bytes that the backward moves for each number of the output."""
        return element_bytes * self.backward + self.backward_bytes


NOTHING = Operator(forward_kernels=0.0, backward_kernels=0.0)
"""An operator that is fused into the kernel of another."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Operators:
    """Element-wise work of a model, by operator; the number that one is counted for is in brackets."""

    layernorm: Operator
    """[hidden state]."""
    rmsnorm: Operator
    """[hidden state]."""
    residual: Operator
    """Dropout if there is one, and the sum with the residual [hidden state]."""
    activation: Operator
    """Activation function of an MLP without a gate [number that it puts out]."""
    gated_activation: Operator
    """The same with a gate [number that it puts out]."""
    bias: Operator
    """Bias of a product, and its gradient [output of the product]."""
    rotary: Operator
    """Rotation of queries and keys [channel of a query or key]."""
    head_norm: Operator
    """Norm of queries and keys [channel of a query or key]."""
    heads: Operator
    """Copies of queries, keys and values to where attention reads them, and of its output [channel of a query, key,
    value or output]."""
    loss: Operator
    """Cross-entropy, all of it after the product [logit]."""
    embedding: Operator
    """Rows looked up, and the gradient of the table [hidden state]."""
    exchange: Operator = Operator(forward=4, backward=4, forward_kernels=2, backward_kernels=2)
    """Packing and unpacking of the messages of a head exchange [channel of a query, key, value or output]."""
    routing: Operator = Operator(forward=4, backward=5, forward_kernels=12, backward_kernels=12)
    """Choice of experts, rows in the order of the experts, and sums of a token's rows [hidden state of a row]."""
    expert_bias: Operator = NOTHING
    """Bias of the second product of experts, where that product does not add it [hidden state of a chosen row]; its
    kernels are of one expert."""
    expert_activation: Operator = Operator(forward=5, backward=8)
    """Activation function of experts, and the weight of each row [number that it puts out]."""
    expert_clamp: Operator = NOTHING
    """Limits of its inputs, where they are kernels of their own [number that the activation puts out]."""
    scaled_rotary: Operator | None = None
    """Rotation with a factor, as with YaRN; None = as one without [channel of a query or key]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Products:
    """Kernels and memory traffic of matrix products, in addition to their FLOPs."""

    forward_kernels: float = 1.0
    """Kernels of one product: itself, casts and copies around it."""
    backward_kernels: float = 2.0
    accumulation_bytes: float = 8.0
    """Bytes that each backward moves for a weight to add its gradient to the sum."""
    accumulates_in_place: bool = False
    """Whether the product of the gradient itself adds to the sum, and these bytes move under it; a look-up then adds
    only to the rows that were used."""
    groups_experts: bool = True
    """Whether one kernel computes the product of all experts of a rank, on devices that have such a kernel."""
    fuses_experts: bool = False
    """Whether in 8 bits the grouped products of gated experts compute the activation and the casts of its inputs and
    outputs themselves, on rows that the exchange has put where such products read them."""
    router_precision: Literal["fp32", "bf16"] = "fp32"
    """Of the product that scores experts; in `bf16` also operands that are rounded for tensor cores (TF32)."""
    expert_accumulation_bytes: float = 0.0
    """Bytes that each backward moves for a weight after the grouped product of its gradient, where that cannot add to
    the sum."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionCore:
    """Computation of attention, between the products before and after it."""

    kernel: AttentionKernel = "flash-attention-2"
    """The kernel on generations of devices that are not in `on`."""
    on: tuple[tuple[str, AttentionKernel], ...] = ()
    """(generation of devices, kernel) for those with another kernel."""
    skips_masked: bool = True
    """Whether it leaves out masked scores."""
    forward_kernels: float = 1.0
    backward_kernels: float = 1.0
    keeps_keys: bool = False
    """Whether keys and values of whole sequences are kept, whatever is recomputed, because token slices that come later
    attend to them."""
    score_bytes: float = 13.0
    """Bytes that one score moves in the forward where scores are written out. 13: the product writes it (2), a fused
    softmax reads and writes it (4), dropout reads and writes it with a mask (5), the product with the values reads it
    (2)."""
    score_bytes_backward: float | None = None
    """The same of the backward; None = 1.5 times the forward's."""
    keeps_dropped: bool = False
    """Whether scores that are written out are kept a second time, with the mask of dropout."""
    prefix: Operator = NOTHING
    """Gradients of keys and values before the token slice that its backward adds to gradients of later ones, kept in
    fp32 [channel of a key or value]; its kernels are of all of them."""

    @property
    def writes_scores(self) -> bool:
        """Whether the matrix of scores is written to memory."""
        return self.kernel == "scores"

    def prefix_bytes(self, element_bytes: int, kept_bytes: int) -> float:
        """Return the bytes that a channel of an earlier key or value moves, see `prefix`."""
        in_fp32 = self.prefix.backward_bytes
        return self.prefix.bytes_backward(element_bytes) - in_fp32 + in_fp32 * kept_bytes / ELEMENT_BYTES["fp32"]

    def kernel_on(self, generation: str) -> AttentionKernel:
        """Return the kernel on devices of a generation, as `devices.GENERATION_NAMES` calls them."""
        return dict(self.on).get(generation, self.kernel)


@dataclass(frozen=True, kw_only=True, slots=True)
class Communication:
    """Messages between ranks, and their overlap with ops."""

    overlaps_transfers: bool = False
    """Whether messages between stages travel under ops; else both ends wait for each."""
    shares_transfers: bool = False
    """Whether each tensor-parallel rank sends its part of an activation, and the other end gathers."""
    overlaps_gradient_reduction: bool = False
    """Whether data-parallel reductions travel under the last backward, layer by layer."""
    overlaps_weight_gather: bool = False
    """Whether stepped weights are gathered under the next forward."""
    broadcasts_parts: bool = False
    """Whether each data-parallel rank broadcasts the weights that it stepped, one rank after the other."""
    tensor_parallel_overlap: float = 0.0
    """Share of the collectives between tensor-parallel ranks that products hide, where these share tokens and a node
    with links faster than PCIe (github.com/NVIDIA/TransformerEngine/issues/1071)."""
    copies_parts: bool = False
    """Whether parts of sequences are copied after they were gathered, and before they are summed, because collectives
    join tensors by the first dimension only."""
    gathers_again: bool = False
    """Whether selective recomputation gathers such parts again for the products that read them."""
    ring: bool = False
    """Whether ranks that share tokens pass keys and values on under attention (arXiv 2310.01889), and exchange no
    heads."""
    sums_at_once: bool = False
    """Whether parallel attention and MLP are summed in one reduction (`Layer.sums_at_once`)."""
    cuts_experts: bool = False
    """Whether tensor-parallel ranks share each expert, as they share other matrices: they gather the rows that one of
    them gets, and sum parts of its output. They are then among the ranks that share the experts."""
    sends_once: bool = False
    """Whether a token travels once to each node and to each rank, however many of its experts are there, as with
    DeepEP and HybridEP."""
    hidden_exchange: float = 0.0
    """Share of the exchanges of tokens that ops of other micro-batches hide."""
    overlaps_shared_experts: bool = False
    """Whether shared experts are computed while tokens travel to their experts and back."""
    reduction_bytes: int | None = None
    """Bytes of an entry in data-parallel reductions; None = as DeepSpeed's optimizers do it by precision and ZeRO stage
    (`price.step.step_traffic`)."""


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes of a parameter's weight, gradient and optimizer state on a rank, for a precision and a ZeRO stage."""

    precision: str
    zero_stage: int
    _: KW_ONLY
    weights: float
    gradients: float
    optimizer: float
    step: float = 0.0
    """More while the optimizer steps; by then no activations are held."""
    divided: tuple[str, ...] = ()
    """Names of the fields above that the ranks of a shard group divide."""
    bucket: int = 0
    """Bytes of an element of the buckets that reduce gradients and gather weights; 0 = none."""
    whole_step: float = 0.0
    """Bytes that the step reads or writes for each parameter of the rank, also for those that other data-parallel ranks
    step: the norm of gradients, and zeroing them."""

    def on_rank(self, name: str, shard_size: int) -> float:
        """Return the bytes of a field on one of the ranks that divide states."""
        each: float = getattr(self, name)
        return each / shard_size if name in self.divided else each


Values = tuple[tuple[str, tuple[int | str | None, ...]], ...]

WITH_PIPELINES: Values = (("zero_stage", (0, 1)), ("zero_shard_size", (None,)))
"""Values that DeepSpeed combines with pipelines; a part of `Software.runs`."""

ONLY_OURS: Values = (
    ("sequence_parallel_size", (1,)),
    ("recompute", ("none", "selective", "full")),
    ("offload", (False,)),
    ("key_value_gradients", ("fp32",)),
    ("latent_kept", ("expanded",)),
)
"""Values that other trainers can run of the dimensions for long sequences; a part of `Software.runs`."""


LIKE = 3.0
"""Factor up to which sizes are alike: parameters of two models, and numbers of devices."""


class MeasuredRun(NamedTuple):
    """Published runs of one model, with which the times of a trainer were compared."""

    device: str
    """Beginning of the names of the devices."""
    kind: str
    """Of the model: `dense` or `experts`, both without latent attention."""
    parameters: float
    num_devices: tuple[int, int]
    """Fewest and most."""
    model: str
    source: str

    def __str__(self) -> str:
        """Return model, devices and source."""
        numbers = " to ".join(f"{number:,}" for number in dict.fromkeys(self.num_devices))
        return f"{self.model} on {numbers} {self.device.partition('-')[0]} ({self.source})"

    def is_like(self, device: Device, num_devices: int, kind: str, parameters: float) -> bool:
        """Whether a model on such devices is as large, within `LIKE`, and of the same kind."""
        least, most = self.num_devices
        is_as_large = 1 / LIKE <= parameters / self.parameters <= LIKE and least / LIKE <= num_devices <= most * LIKE
        return device.name.startswith(self.device) and kind == self.kind and is_as_large


@dataclass(frozen=True, kw_only=True, slots=True)
class Software:
    """Facts about the trainer that runs a strategy."""

    name: str
    """Its name in the field `software` of trials."""
    title: str
    measured: tuple[MeasuredRun, ...] = ()
    operators: Operators
    products: Products
    attention: AttentionCore
    communication: Communication
    states: tuple[StateBytes, ...]
    """Bytes of parameters, for each precision and ZeRO stage."""
    bucket_elements: int
    """Elements of ZeRO's buckets, one to reduce and one to gather; a model with fewer parameters on a rank has smaller
    ones. With stage 3 both have the largest layer."""
    bucket_elements_per_rank: int = 0
    """Elements of a bucket for each data-parallel rank at least, so that rings of many ranks have large messages."""
    runs: Values = ()
    """(dimension of a strategy, values that it can run) for each dimension of which it does not run all."""
    step_bytes: float = 18.0
    """Bytes of weights, gradients and optimizer state that the step of a parameter reads or writes."""
    selective_recomputes: Literal["attention", "norms", "operators"] = "attention"
    """Part that recompute "selective" runs again: the `attention` core (arXiv 2205.05198 section 5), `norms` and
    activation functions, or all `operators` outside of products and attention with half of the products that
    tensor-parallel ranks share by outputs."""
    residual_dropout: bool = False
    """Whether masks of dropout are kept with each residual."""
    logits_at_once: int | None = None
    """Logits of a rank that may be alive, others being computed again, and the gradient of the head's weight at once;
    None = the loss keeps all of them in fp32."""
    loss_in_place: bool = False
    """Whether the loss reads logits as they are and writes their gradient over them; else it keeps them in fp32."""
    launch_factor: float = 1.0
    """Host time of a kernel launch, relative to a Megatron layer of 2021 written in Python."""
    allocator_factor: float = 1.06
    """Memory taken for a byte of activations, with fragmentation of the allocator."""

    def can_run(self, dimension: str, value: object) -> bool:
        """Whether it can run a value of a dimension."""
        values = dict(self.runs).get(dimension)
        return values is None or value in values

    def measured_on(self, devices: Iterable[Device], num_devices: int, kind: str, parameters: float) -> str | None:
        """Return runs of such a model on as many devices, one for each of their kinds; None if one has none."""
        runs = []
        for device in devices:
            like = [each for each in self.measured if each.is_like(device, num_devices, kind, parameters)]
            if not like:
                return None
            runs.append(str(min(like, key=lambda run: abs(log(run.parameters / parameters)))))
        return "; ".join(dict.fromkeys(runs))

    def state(self, precision: str, zero_stage: int) -> StateBytes:
        """Return the bytes of weights, gradients and optimizer state."""
        for each in self.states:
            if (each.precision, each.zero_stage) == (precision, zero_stage):
                return each
        known = ", ".join(f"{each.precision} at {each.zero_stage}" for each in self.states)
        raise ConfigError(f"{self.name} has no states in {precision} at zero_stage {zero_stage}: choose one of {known}")

    def keeping_gradients(self, precision: str) -> "Software":
        """Return the trainer with gradients that add up and travel in a precision; its step casts them to fp32."""
        size, products, messages = ELEMENT_BYTES[precision], self.products, self.communication
        states = []
        for each in self.states:
            divided, step = {*each.divided, "step"} if each.divided else (), 4.0 * (size < ELEMENT_BYTES["fp32"])
            kept = replace(each, gradients=size, step=max(each.step, step), divided=tuple(sorted(divided)))
            states.append(each if each.precision == "fp32" else kept)
        products = replace(products, accumulation_bytes=products.accumulation_bytes * size / ELEMENT_BYTES["fp32"])
        messages = replace(messages, reduction_bytes=size)
        return replace(self, states=tuple(states), communication=messages, products=products)
