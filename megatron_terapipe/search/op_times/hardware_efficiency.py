"""Share of the data sheet that is reached: efficiencies, latencies and overheads, the same for every strategy."""

from dataclasses import dataclass

from megatron_terapipe.search.op_times.constants import constant, factors
from megatron_terapipe.search.op_times.reduction_factors import NUM_REDUCTION_FACTORS


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareEfficiency:
    """Constants of the cost model. None of them belongs to a strategy, a model or a row of a table.

    Times are products of these with what `Device` and `Link` say. What differs between generations of devices is known
    beside them, relative to A100s (`kernel_efficiency`, `attention_kernels`). The defaults are of A100s with Megatron,
    rounded:

    - from fits to published trials of A100s, rounded by hand, so nothing is "not fitted" on those trials:
      `gemm_efficiency` (0.82 to 0.98 over three sources), `misaligned_efficiency` (BigScience's chronicles, tr11),
      `memory_efficiency` (0.7 to 1.0), `launch_s`, `launch_jitter`, `launch_exposed`, `optimizer_passes` and
      `iteration_s` (vTrain's runs on one node).
    - `gemm_depth`, `gemm_area`: half a wave of 108 tiles of 128 x 256 is 1.8e6. Products of 1e10 FLOPs and more agree
      within 15 % with the cuBLAS times that aiconfigurator-core has of an A100; with less than 512 inputs cuBLAS is
      slower than this, by up to a half.
    - `inside_efficiency`: 230 of 300 GB/s (github.com/NVIDIA/nccl-tests/issues/149).
    - `transfer_inside_efficiency`: 80 of 450 GB/s on H100s, as NCCL sends by default (nccl-tests/issues/268).
    - `fused_attention`: as the kernels alone.
    - the rest are guesses with wide priors.

    The second number of a field is how far off the default may be, `Prior` says how; those without one are not fitted.
    """

    gemm_efficiency: float = constant(0.87, 0.15, most=1.0)
    """Share of the peak that large matrix products reach on an A100."""
    gemm_depth: float = 60.0
    """Inputs of a product at which half its time is prologue and epilogue of the tiles."""
    gemm_area: float = constant(1.0e6, 0.7)
    """Rows x outputs of a product at which half its time is the unfilled part of the last wave of tiles."""
    attention_efficiency: float = constant(0.35, 0.4, most=1.0)
    """Share of the peak that batched products of scores and values reach."""
    fused_attention: float = constant(1.0, 0.2)
    """Speed of fused kernels of attention in training, in that of the kernel alone."""
    misaligned_efficiency: float = constant(0.1, 0.5, most=1.0)
    """By how much attention is slower whose head size no tensor core can read (not a multiple of 8 numbers of 2 bytes;
    NVIDIA, Deep Learning Performance Guide, Matrix Multiplication, section 2.1)."""
    memory_efficiency: float = constant(0.85, 0.25, most=1.0)
    """Share of the memory bandwidth that element-wise work reaches on an A100."""
    launch_s: float = constant(30e-6, 0.7)
    """Host time of one launch, its share of Python and of autograd included."""
    launch_jitter: float = constant(0.1, 0.7)
    """By how much a host is later, as a share of its launches, for each doubling of the tensor-parallel ranks that wait
    for each other."""
    launch_exposed: float = constant(0.1, 1.0, most=1.0)
    """Share of the shorter of launching and computing that the longer does not hide; 1 where the host waits for each
    kernel (CUDA_LAUNCH_BLOCKING)."""
    overlap_exposed: float = constant(0.1, 1.0, most=1.0)
    """Share of reductions and gathers under ops that shows all the same: they take multiprocessors and memory bandwidth
    from the ops."""
    whole_loss_factor: float = constant(1.0, 0.7)
    """Memory traffic of the loss where one rank has the whole vocabulary, in that of ranks that share it."""
    inside_efficiency: float = constant(0.77, 0.2, most=1.0)
    """Share of a link inside a node that collectives reach."""
    network_efficiency: float = constant(0.65, 0.6, most=1.0)
    """Share of a network card that collectives reach."""
    transfer_inside_efficiency: float = constant(0.18, 0.5, most=1.0)
    """Share of a link inside a node that it reaches: it takes few of its lanes at once."""
    transfer_network_efficiency: float = constant(0.8, 0.3, most=1.0)
    """Share of a network card that one message between stages reaches."""
    host_efficiency: float = 0.8
    """Share of the link between a device and its host's page-locked memory that copies reach."""
    collective_s: float = constant(20e-6, 0.7)
    """Start of a collective, beside the latency of its links."""
    transfer_s: float = 30e-6
    """Start of a message between stages, beside the latency of its link."""
    optimizer_passes: float = constant(1.8, 0.3)
    """How often the optimizer step reads or writes the bytes that it keeps of a parameter."""
    op_s: float = 0.0
    """What a pipeline's executor needs between two ops of a rank."""
    iteration_s: float = constant(0.003, 1.0)
    """What an iteration takes however small it is."""
    reductions: tuple[float, ...] = factors(NUM_REDUCTION_FACTORS, 0.25)
    """Seconds of reductions inside a node, in those of the formula; by ranks and bytes (`reduction_factors`)."""
