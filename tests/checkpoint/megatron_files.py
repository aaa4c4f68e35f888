"""Checkpoints of Megatron-LM by megatron-core on a CPU: its model, optimizer and scheduler after real updates.

megatron-core builds, trains, shards and loads; what Megatron-LM's trainer adds around it (folders, the dictionary of a
rank, the arguments) has the form of its `megatron/training/checkpointing.py`. All layouts begin with equal weights.
"""

import queue
import threading
import zlib
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from tests.distributed import run_distributed

SEQ, ROWS, MICRO = 16, 4, 2
BEFORE, AFTER = 5, 2
"""Updates before the checkpoint is written, and after."""
VOCAB, DIVISIBLE_BY = 113, 8
"""Ids; the embedding has 120 rows on one tensor-parallel rank, and 128 on two."""


@dataclass(frozen=True)
class MegatronModel:
    """What Megatron-LM's arguments say of a model; the defaults are those of model A, GPT-2's form."""

    num_layers: int = 4
    hidden_size: int = 32
    ffn_hidden_size: int = 128
    num_attention_heads: int = 4
    num_query_groups: int | None = None
    kv_channels: int = 8
    position_embedding_type: Literal["learned_absolute", "rope"] = "learned_absolute"
    rotary_percent: float = 1.0
    rotary_interleaved: bool = False
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    swiglu: bool = False
    bias_gelu_fusion: bool = False
    """Also selects the form of GELU: tanh's with it, that of the error function without."""
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    attention_output_gate: bool = False
    untie_embeddings_and_output_weights: bool = False
    num_experts: int | None = None
    moe_ffn_hidden_size: int | None = None
    moe_shared_expert_intermediate_size: int | None = None
    moe_shared_expert_gate: bool = False
    moe_layer_freq: int | list[int] = 1
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    moe_router_enable_expert_bias: bool = False
    softmax_type: Literal["vanilla", "learnable"] = "vanilla"
    quick_geglu: bool = False
    activation_func_clamp_value: float | None = None
    glu_linear_offset: float = 0.0
    mtp_num_layers: int | None = None
    mtp_loss_scaling_factor: float = 0.1
    multi_latent_attention: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int = 12
    qk_head_dim: int = 8
    qk_pos_emb_head_dim: int = 8
    v_head_dim: int = 8
    rope_type: Literal["rope", "yarn"] | None = None
    rotary_scaling_factor: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0


MODELS = {
    "A": MegatronModel(),
    "A-rope": MegatronModel(
        position_embedding_type="rope", rotary_percent=0.5, rotary_interleaved=True, bias_gelu_fusion=True
    ),
    "B": MegatronModel(
        **{"ffn_hidden_size": 48, "num_query_groups": 2, "kv_channels": 16, "position_embedding_type": "rope"},
        **{"normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False, "qk_layernorm": True},
        **{"untie_embeddings_and_output_weights": True, "attention_output_gate": True},
    ),
}
MODELS["E"] = replace(MODELS["B"], num_experts=4, moe_ffn_hidden_size=24)
MODELS["E-shared"] = replace(
    MODELS["E"],
    **{"moe_layer_freq": [0, 1, 0, 1], "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
    moe_shared_expert_intermediate_size=16,
    moe_shared_expert_gate=True,
)
MODELS["L"] = replace(
    MODELS["B"],
    **{"num_query_groups": None, "kv_channels": 8, "attention_output_gate": False},
    **{"multi_latent_attention": True, "q_lora_rank": 20},
    **{"rotary_scaling_factor": 40.0, "mscale": 0.5, "mscale_all_dim": 0.7, "mtp_num_layers": 1},
)
MODELS["L-experts"] = replace(
    MODELS["L"],
    **{"q_lora_rank": None, "rope_type": "rope", "qk_layernorm": False, "mtp_num_layers": 2},
    **{"num_experts": 4, "moe_ffn_hidden_size": 24, "mtp_loss_scaling_factor": 0.3},
)
MODELS["S"] = replace(
    MODELS["E"],
    **{"qk_layernorm": False, "attention_output_gate": False, "add_bias_linear": True, "softmax_type": "learnable"},
    **{"swiglu": False, "quick_geglu": True, "activation_func_clamp_value": 0.3, "glu_linear_offset": 1.0},
)


@dataclass(frozen=True)
class Case:
    """A checkpoint to write."""

    model: MegatronModel
    file_format: Literal["torch", "torch_dist"]
    tensor: int = 1
    pipeline: int = 1
    virtual: int | None = None
    """Model chunks of a stage."""
    bf16: bool = False
    """Weights in bf16, with fp32 copies in the optimizer."""
    distributed_optimizer: Literal["dp_reshardable", "fully_reshardable"] | None = None
    """The form of its state in format "torch_dist". megatron-core loads it with Transformer Engine's optimizer only."""
    transformer_engine: bool = False
    """Norms have the names of Transformer Engine's fused layers, in format "torch", which keeps names of modules."""
    without_optimizer: bool = False
    adam_eps: float = 1e-3
    """Large enough that layouts agree to the last digits for several updates, in spite of gradients near 0."""

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline

    @property
    def padded_vocab_size(self) -> int:
        rows = DIVISIBLE_BY * self.tensor
        return -(-VOCAB // rows) * rows


@dataclass(frozen=True)
class Expected:
    """What megatron-core computes with the weights that it saved."""

    tokens: torch.Tensor
    logits: torch.Tensor
    """fp32, `(rows, length, VOCAB)`, without the rows that pad the vocabulary."""
    losses: list[float] = field(default_factory=list)
    """Of the updates after the checkpoint, on `samples(BEFORE)` and on: right only with the optimizer's state."""
    gradient_norms: list[float] = field(default_factory=list)


def write_checkpoints(cases: dict[Path, Case]) -> dict[Path, Expected]:
    """Write the checkpoint of each case into its folder: one launch of ranks for each number of ranks."""
    return on_ranks(write, cases)


def read_checkpoints(cases: dict[Path, Case]) -> dict[Path, Expected]:
    """Load the weights of each folder by megatron-core, for the layout of its case, and train on."""
    return on_ranks(read, cases)


def on_ranks(perform: Callable[[Path, Case], Any], cases: dict[Path, Case]) -> dict[Path, Any]:
    """Call `perform(folder, case)` on the ranks of each case, and return the results of the last ones."""
    found: dict[Path, Any] = {}
    for world_size in sorted({case.world_size for case in cases.values()}):
        chosen = {folder: case for folder, case in cases.items() if case.world_size == world_size}
        found.update(zip(chosen, run_distributed(_perform, world_size, perform, chosen)[-1], strict=True))
    return found


def samples(step: int) -> torch.Tensor:
    """Tokens of one global batch with the labels of its last ones, `(ROWS, SEQ + 1)`."""
    return torch.randint(0, VOCAB, (ROWS, SEQ + 1), generator=torch.Generator().manual_seed(step))


class _OnCPU(TorchFunctionMode):
    """Makes tensors on the CPU that megatron-core's code makes on a GPU by name, and has them pass for a GPU's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.add_ and args[0].grad_fn is not None:
            # The biases of experts are added to the view that one rank's sum over ranks is.
            func = torch.add
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
        return result


def _perform(perform: Callable[[Path, Case], Any], cases: dict[Path, Case]) -> list[Any]:
    import logging
    import warnings

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.tensor_parallel import random as theirs

    # Ranks of tests may start no processes: threads write the files.
    threads = SimpleNamespace(Queue=queue.Queue, JoinableQueue=queue.Queue, Process=threading.Thread)
    filesystem_async.mp = SimpleNamespace(get_context=lambda _: threads)
    filesystem_async._results_queue = queue.Queue()
    # Its fused functions are compiled at their first call, for longer than these tests run.
    torch._dynamo.config.disable = True
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda *_: None
    torch.cuda.manual_seed = torch.manual_seed
    torch.cuda.get_rng_state = theirs._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    theirs._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    with _OnCPU():
        return [perform(folder, case) for folder, case in cases.items()]


def write(folder: Path, case: Case) -> Expected:
    """Train and save, on every rank of the case; the values are those of its last rank."""
    with parallel(case):
        training = Training(case)
        for step in range(BEFORE):
            training.update(samples(step))
        training.save(folder)
        return training.expected()


def read(folder: Path, case: Case) -> Expected:
    """Load and train on, on every rank of the case."""
    with parallel(case):
        training = Training(case)
        training.load(folder)
        return training.expected()


@contextmanager
def parallel(case: Case) -> Iterator[None]:
    """megatron-core's process groups of the layout of a case."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.num_microbatches_calculator import (
        init_num_microbatches_calculator,
        unset_num_microbatches_calculator,
    )

    parallel_state.initialize_model_parallel(
        case.tensor, case.pipeline, virtual_pipeline_model_parallel_size=case.virtual
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    init_num_microbatches_calculator(0, None, ROWS, MICRO, 1)
    yield
    unset_num_microbatches_calculator()
    parallel_state.destroy_model_parallel()


class Training:
    """megatron-core's model, optimizer and scheduler on this rank."""

    def __init__(self, case: Case) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
        from megatron.core.transformer.module import Float16Module

        self.case = case
        self.iteration = 0
        self.config = _config(case)
        # Sums the gradients of tied embeddings over stages, and those of query and key norms over tensor ranks.
        self.config.finalize_model_grads_func = finalize_model_grads
        self.models = [_stage(case, self.config, chunk) for chunk in range(case.virtual or 1)]
        for model in self.models:
            _fill(model, self._metadata())
            model.compute_language_model_loss = _loss_of_words
        settings = DistributedDataParallelConfig(use_distributed_optimizer=case.distributed_optimizer is not None)
        self.wrapped = [
            DistributedDataParallel(
                self.config, settings, Float16Module(self.config, model) if case.bf16 else model, disable_bucketing=True
            )
            for model in self.models
        ]
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                **{"optimizer": "adam", "lr": 1e-2, "min_lr": 1e-3, "weight_decay": 0.1, "adam_eps": case.adam_eps},
                **{"adam_beta1": 0.9, "adam_beta2": 0.95, "clip_grad": 1.0, "bf16": case.bf16},
                params_dtype=self.config.params_dtype,
                use_distributed_optimizer=case.distributed_optimizer is not None,
            ),
            self.wrapped,
        )
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            **{"init_lr": 0.0, "max_lr": 1e-2, "min_lr": 1e-3, "lr_decay_style": "cosine"},
            **{"lr_warmup_steps": 2 * ROWS, "lr_decay_steps": 10 * ROWS},
            **{"start_wd": 0.1, "end_wd": 0.1, "wd_incr_steps": 10 * ROWS, "wd_incr_style": "constant"},
        )
        self.last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)

    def update(self, batch: torch.Tensor) -> tuple[float, float]:
        """One update, with its loss (on the last stage) and the norm of its gradients."""
        for model in self.wrapped:
            model.zero_grad_buffer()
        self.optimizer.zero_grad()
        found = self._forward(batch, labels=True)
        _, norm, _ = self.optimizer.step()
        self.scheduler.step(increment=ROWS)
        self.iteration += 1
        return sum(each.item() for each in found) / max(len(found), 1), float(norm)

    def expected(self) -> Expected:
        tokens = samples(1000)[:, :-1]
        with self._without_further_tokens():
            logits = self.logits(tokens)
        after = [self.update(samples(BEFORE + step)) for step in range(AFTER)]
        return Expected(tokens, logits, [loss for loss, _ in after], [norm for _, norm in after])

    @contextmanager
    def _without_further_tokens(self) -> Iterator[None]:
        """The model without the layers that predict them, which need labels."""
        number, self.config.mtp_num_layers = self.config.mtp_num_layers, None
        processed = [model.mtp_process for model in self.models]
        for model in self.models:
            model.mtp_process = False
        yield
        self.config.mtp_num_layers = number
        for model, each in zip(self.models, processed, strict=True):
            model.mtp_process = each

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """fp32, on the last stage; elsewhere nothing."""
        found = self._forward(torch.nn.functional.pad(tokens, (0, 1)), labels=False)
        if not self.last:
            return torch.empty(0)
        return torch.cat(found)

    def _forward(self, batch: torch.Tensor, *, labels: bool) -> list[torch.Tensor]:
        """Losses (with the gradients) or logits of the micro-batches of a batch, on the last stage."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        def forward_step(rows: Iterator[torch.Tensor], model: Any) -> Any:
            of = next(rows)
            targets = of[:, 1:].contiguous() if labels else None
            output = model(of[:, :-1], torch.arange(SEQ).expand(len(of), -1), None, labels=targets)

            def loss(output: torch.Tensor, **_: Any) -> Any:
                if not labels:
                    return _of_words(output).detach()
                return output.mean(), {"loss": output.detach().mean()}

            return output, loss

        found = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(batch.split(MICRO)) for _ in self.wrapped],
            model=self.wrapped,
            num_microbatches=ROWS // MICRO,
            seq_length=SEQ,
            micro_batch_size=MICRO,
            forward_only=not labels,
            collect_non_loss_data=not labels,
        )
        return [each["loss"] for each in found] if labels else found

    def save(self, folder: Path) -> None:
        from megatron.core import dist_checkpointing

        directory = folder / f"iter_{self.iteration:07d}"
        if self.case.file_format == "torch":
            own = self._own_file(directory)
            own.parent.mkdir(parents=True)
            if self.case.distributed_optimizer and not self.case.without_optimizer:
                self.optimizer.save_parameter_state(str(own.with_name("distrib_optim.pt")))
            torch.save(self._state(), own)
        else:
            directory.mkdir(parents=True, exist_ok=True)
            metadata = self._metadata()
            metadata.pop("dp_cp_group")
            dist_checkpointing.save(self._state(), str(directory), content_metadata=metadata)
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            (folder / "latest_checkpointed_iteration.txt").write_text(str(self.iteration))

    def load(self, folder: Path) -> None:
        """The weights in format torch_dist, by megatron-core's own reader; all names must be there."""
        from megatron.core import dist_checkpointing

        iteration = (folder / "latest_checkpointed_iteration.txt").read_text()
        directory = folder / (iteration if iteration == "release" else f"iter_{int(iteration):07d}")
        assert dist_checkpointing.check_is_distributed_checkpoint(str(directory))
        state = dist_checkpointing.load(self._state(), str(directory))
        for name, model in zip(self._names(), self.models, strict=True):
            model.load_state_dict(state[name])
        self.optimizer.reload_model_params()

    def _names(self) -> list[str]:
        """Of the model chunks of this rank, in a checkpoint."""
        return ["model"] if len(self.models) == 1 else [f"model{chunk}" for chunk in range(len(self.models))]

    def _own_file(self, directory: Path) -> Path:
        from megatron.core import parallel_state

        rank = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
        stage = f"_{parallel_state.get_pipeline_model_parallel_rank():03d}" if self.case.pipeline > 1 else ""
        return directory / (rank + stage) / "model_optim_rng.pt"

    def _metadata(self) -> dict[str, Any]:
        from megatron.core import parallel_state

        form = self.case.distributed_optimizer
        return {
            **({"distrib_optim_sharding_type": form} if form else {}),
            **({"distrib_optim_fully_reshardable_mem_efficient": False} if form == "fully_reshardable" else {}),
            **{"singleton_local_shards": False, "chained_optim_avoid_prefix": True},
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        }

    def _state(self) -> dict[str, Any]:
        """The dictionary that Megatron-LM's trainer writes, without states of random numbers."""
        sharded = self.case.file_format == "torch_dist"
        state: dict[str, Any] = {"args": arguments(self.case, self.iteration), "checkpoint_version": 3.0}
        state["iteration"] = self.iteration
        for name, model in zip(self._names(), self.models, strict=True):
            if sharded:
                state[name] = model.sharded_state_dict(metadata=self._metadata())
            else:
                state[name] = model.state_dict_for_save_checkpoint()
                if self.case.transformer_engine:
                    state[name] = _named_by_transformer_engine(state[name])
        if not self.case.without_optimizer:
            state["optimizer"] = (
                self.optimizer.sharded_state_dict(state, is_loading=False, metadata=self._metadata())
                if sharded
                else self.optimizer.state_dict()
            )
            state["opt_param_scheduler"] = self.scheduler.state_dict()
        return state


def arguments(case: Case, iteration: int = BEFORE) -> Namespace:
    """Those of Megatron-LM's arguments that describe a model, its data and its training, and some that are not read."""
    model = case.model
    return Namespace(
        **asdict(replace(model, num_query_groups=model.num_query_groups or 1)),
        **{"group_query_attention": model.num_query_groups is not None, "norm_epsilon": 1e-5, "rotary_base": 10000},
        **{"add_position_embedding": True, "apply_layernorm_1p": False, "squared_relu": False, "moe_router_topk": 2},
        **{"openai_gelu": False, "max_position_embeddings": SEQ, "seq_length": SEQ},
        **{"use_rotary_position_embeddings": False, "rotary_seq_len_interpolation_factor": None},
        **{"use_rope_scaling": False, "rope_scaling_factor": 8.0, "window_size": None, "hidden_dropout": 0.0},
        **{"attention_dropout": 0.0, "vocab_size": VOCAB, "tokenizer_type": "NullTokenizer"},
        **{"padded_vocab_size": case.padded_vocab_size, "make_vocab_size_divisible_by": DIVISIBLE_BY},
        **{
            "tensor_model_parallel_size": case.tensor,
            "pipeline_model_parallel_size": case.pipeline,
            "optimizer": "adam",
        },
        **{"params_dtype": torch.bfloat16 if case.bf16 else torch.float32, "lr": 1e-2, "min_lr": 1e-3},
        **{"weight_decay": 0.1, "lr_decay_style": "cosine", "lr_decay_iters": 10, "global_batch_size": ROWS},
        **{"iteration": iteration, "consumed_train_samples": iteration * ROWS, "ckpt_format": case.file_format},
    )


def _of_words(logits: torch.Tensor) -> torch.Tensor:
    """Logits of all tensor-parallel ranks in fp32, without the rows that pad the vocabulary."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    return gather_from_tensor_model_parallel_region(logits)[..., :VOCAB].float()


def _loss_of_words(labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Loss of each token, `(rows, length)`: Megatron's own has the rows that pad the vocabulary in its sum.

    Args:
        logits: `(length, rows, words of this rank)`.
    """
    return torch.nn.functional.cross_entropy(_of_words(logits).permute(1, 2, 0), labels, reduction="none")


def _config(case: Case) -> Any:
    from megatron.core.fusions.fused_bias_geglu import quick_gelu
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    model = case.model
    dtype = torch.bfloat16 if case.bf16 else torch.float32
    latents = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
    further = ("rotary_scaling_factor", "mscale", "mscale_all_dim", "multi_latent_attention")
    functional = torch.nn.functional
    return (MLATransformerConfig if model.multi_latent_attention else TransformerConfig)(
        **{name: getattr(model, name) for name in (*latents, *further) if model.multi_latent_attention},
        **({} if model.rope_type is None else {"rope_type": model.rope_type}),
        **{name: getattr(model, name) for name in ("softmax_type", "activation_func_clamp_value", "glu_linear_offset")},
        **{name: getattr(model, name) for name in ("mtp_num_layers", "mtp_loss_scaling_factor")},
        **{name: getattr(model, name) for name in ("num_layers", "hidden_size", "ffn_hidden_size", "kv_channels")},
        **{name: getattr(model, name) for name in ("num_attention_heads", "num_query_groups", "rotary_interleaved")},
        **{name: getattr(model, name) for name in ("normalization", "add_bias_linear", "add_qkv_bias", "qk_layernorm")},
        attention_output_gate=model.attention_output_gate,
        gated_linear_unit=model.swiglu or model.quick_geglu,
        **({} if model.num_experts is None else _experts(model)),
        activation_func=functional.silu if model.swiglu else quick_gelu if model.quick_geglu else functional.gelu,
        **{"attention_dropout": 0.0, "hidden_dropout": 0.0, "bias_activation_fusion": model.bias_gelu_fusion},
        **{"apply_rope_fusion": False},
        **{"masked_softmax_fusion": False, "gradient_accumulation_fusion": False, "persist_layer_norm": False},
        **{"use_cpu_initialization": True, "bf16": case.bf16, "params_dtype": dtype, "pipeline_dtype": dtype},
        tensor_model_parallel_size=case.tensor,
        pipeline_model_parallel_size=case.pipeline,
        virtual_pipeline_model_parallel_size=case.virtual,
        batch_p2p_comm=False,
    )


def _experts(model: MegatronModel) -> dict[str, Any]:
    from megatron.core.transformer.moe import moe_utils

    # Without Transformer Engine the router of release 0.16 fails on a name that is not defined.
    vars(moe_utils).setdefault("te_general_gemm", None)
    same = ("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_shared_expert_gate", "moe_layer_freq")
    return {
        **{
            name: getattr(model, name) for name in (*same, "moe_router_score_function", "moe_router_enable_expert_bias")
        },
        **{"num_moe_experts": model.num_experts, "moe_router_topk": 2, "moe_router_load_balancing_type": "none"},
    }


def _stage(case: Case, config: Any, chunk: int) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    virtual = None if case.virtual is None else chunk
    layers = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=case.model.normalization, vp_stage=virtual
    )
    if case.model.multi_latent_attention:
        # Without Transformer Engine release 0.16 has None for its classes.
        multi_latent_attention.HAVE_TE = False

        class OfLatents(DotProductAttention):
            """Takes widths as Transformer Engine's attention does; values are as wide as --kv-channels."""

            def __init__(self, *args: Any, k_channels: int = 0, v_channels: int = 0, **more: Any) -> None:
                super().__init__(*args, **more)

        for layer in layers.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = OfLatents
            # Files of Transformer Engine's layers are megatron-core's with these names.
            layer.submodules.sharded_state_dict_keys_map = dict(_names_of_latents(case.model))
    further = None
    if case.model.mtp_num_layers:
        further = get_gpt_mtp_block_spec(config, layers, use_transformer_engine=False, vp_stage=virtual)
    return GPTModel(
        config,
        layers,
        case.padded_vocab_size,
        SEQ,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=virtual),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=virtual),
        parallel_output=True,
        share_embeddings_and_output_weights=not case.model.untie_embeddings_and_output_weights,
        position_embedding_type=case.model.position_embedding_type,
        rotary_percent=case.model.rotary_percent,
        vp_stage=virtual,
        mtp_block_spec=further,
    )


def _names_of_latents(model: MegatronModel) -> Iterator[tuple[str, str]]:
    """Names of norms in layers with latent attention, as modules of megatron-core and as in Transformer Engine's."""
    if model.qk_layernorm:
        yield "self_attention.q_layernorm.", "self_attention.linear_q_up_proj.layer_norm_"
        yield "self_attention.kv_layernorm.", "self_attention.linear_kv_up_proj.layer_norm_"
    if model.num_experts is None:
        yield "pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"


def _fill(model: Any, metadata: dict[str, Any]) -> None:
    """Give each weight values that follow from its name and its place in the whole: equal ones for every layout."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    state = model.sharded_state_dict(metadata=metadata)
    apply_factories(state)
    for each in nested_values(state):
        if isinstance(each, ShardedTensor):
            rng = np.random.default_rng(zlib.crc32(each.key.encode()))
            whole = torch.from_numpy(rng.standard_normal(each.global_shape, dtype=np.float32))
            whole = whole * 0.1 + 1 if "norm" in each.key and each.key.endswith("weight") else whole * 0.1
            with torch.no_grad():
                each.data.copy_(whole[each.global_slice()].view(each.data.shape))


def _named_by_transformer_engine(state: dict[str, Any]) -> dict[str, Any]:
    """The norms before attention and MLP as parts of the linear layers that follow them."""
    fused = {".input_layernorm.": ".self_attention.linear_qkv.layer_norm_"}
    fused[".pre_mlp_layernorm."] = ".mlp.linear_fc1.layer_norm_"
    named = {}
    for name, value in state.items():
        for plain, of_linear in fused.items():
            name = name.replace(plain, of_linear)
        named[name] = value
    return named
