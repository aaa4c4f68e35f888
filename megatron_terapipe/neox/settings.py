"""NeoX's settings: YAML files, defaults by date, the table of keys, and the state of a conversion.

`Conversion` holds the command so far, what was left out of it, and what prevents it.
"""

import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from types import MappingProxyType
from typing import Any

from deepspeed_ext.plan.text_files import read_text
from megatron_terapipe.config.parsing import parse_yaml
from megatron_terapipe.errors import MODEL_CANNOT_BE_TRAINED, ConfigError


def paths_of(names: Iterable[str], directory: str | None = None) -> list[str]:
    """Return the paths of configuration files, which may be named without `.yml`, as NeoX's launcher takes them."""
    named = (name if name.endswith((".yml", ".yaml", ".json")) else f"{name}.yml" for name in names)
    return [str(PurePath(directory or "", name)) for name in named]


def read_settings(paths: Iterable[str]) -> dict[str, Any]:
    """Read files and put them together, as NeoX does: dashes are underscores, and no key may stand twice.

    Raises:
        UserError: if a file cannot be read, is no YAML mapping, or a key stands twice.
    """
    settings: dict[str, Any] = {}
    came_from: dict[str, str] = {}
    for path in paths:
        document = parse_yaml(read_text(path), path)
        if not isinstance(document, dict):
            raise ConfigError(f"{path} is not a mapping of settings to values: write one")
        for key, value in document.items():
            name = str(key).replace("-", "_")
            if came_from.get(name) == path:
                raise ConfigError(f"{path} sets {name} twice: remove one")
            if name in settings:
                raise ConfigError(f"{path} sets {name}, and so does {came_from[name]}: remove it from one of them")
            settings[name], came_from[name] = value, path
    return settings


@dataclass(frozen=True, kw_only=True, slots=True)
class Defaults:
    """Values of settings that a file leaves out."""

    dropout: float
    weight_decay: float


SINCE_2023_12 = Defaults(dropout=0.0, weight_decay=0.1)
"""Defaults of NeoX since December 2023."""

BEFORE_2023_12 = Defaults(dropout=0.1, weight_decay=0.01)
"""Defaults of NeoX until then, version 2.0 included."""


def _each(names: str, value: Any) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


VALUES: Mapping[str, tuple[str, object]] = MappingProxyType(
    {
        "num_layers": ("--num-layers", None),
        "hidden_size": ("--hidden-size", None),
        "num_attention_heads": ("--num-attention-heads", None),
        "seq_length": ("--seq-length", None),
        "max_position_embeddings": ("--max-position-embeddings", None),
        "make_vocab_size_divisible_by": ("--make-vocab-size-divisible-by", 128),
        "distributed_backend": ("--distributed-backend", None),
        "train_iters": ("--train-iters", None),
        "exit_interval": ("--exit-interval", None),
        "seed": ("--seed", 1234),
        "num_workers": ("--num-workers", 2),
        "save": ("--save", None),
        "load": ("--load", None),
        "log_interval": ("--log-interval", 100),
        "eval_interval": ("--eval-interval", 1000),
        "eval_iters": ("--eval-iters", 100),
        "tensorboard_dir": ("--tensorboard-dir", None),
    }
)
"""Settings whose value is that of a flag, and NeoX's default; None = the flag is left out."""

SWITCHES: Mapping[str, str] = MappingProxyType(
    {
        "no_weight_tying": "--untie-embeddings-and-output-weights",
        "sequence_parallel": "--sequence-parallel",
        "mmap_warmup": "--mmap-warmup",
        "eod_mask_loss": "--eod-mask-loss",
        "finetune": "--finetune",
        "no_load_optim": "--no-load-optim",
        "no_load_rng": "--no-load-rng",
        "no_save_optim": "--no-save-optim",
        "no_save_rng": "--no-save-rng",
        "log_param_norm": "--log-params-norm",
    }
)
"""Settings that are true or false, as a flag is there or not."""

_DENSE = ((0, 1), "mixtures of experts are not in this trainer")

MODELS: Mapping[str, tuple[tuple[object, ...], str]] = MappingProxyType(
    {
        "use_qk_layernorm": ((False,), "NeoX has one norm for the queries and keys of all heads of a rank"),
        "use_mup": ((False,), "widths have no multipliers (muP)"),
        "num_unique_layers": ((), "layers do not share weights"),
        "opt_pos_emb_offset": ((0,), "positions count from 0"),
        "attention_type": (("multihead", "groupedquery", "multiquery"), "heads follow from num_kv_heads"),
        "model_arch": (("gpt2",), "encoder-decoder models are out of scope"),
        "moe_num_experts": _DENSE,
        "num_experts": _DENSE,
        "sparse_attention": ((), "attention is dense"),
        "soft_prompt_tuning": ((), "there are no prompts that are trained"),
        "adapter_config": ((), "there are no adapters"),
        "lora_config": ((), "there are no adapters"),
    }
)
"""Settings of the model that are what they are here: the values that agree with that, and the reason. Null agrees."""

TRAININGS: Mapping[str, tuple[tuple[object, ...], str]] = MappingProxyType(
    {
        "te_fp8_mha": ((False,), "numbers of 8 bits and less are not in this trainer"),
        "train_impl": (("normal",), "training is on the next token"),
        **_each(
            "train_label_data_paths valid_label_data_paths test_label_data_paths train_reward_data_paths"
            " valid_reward_data_paths test_reward_data_paths pos_train_data_paths neg_train_data_paths"
            " pos_train_label_data_paths neg_train_label_data_paths pos_valid_data_paths neg_valid_data_paths"
            " pos_valid_label_data_paths neg_valid_label_data_paths pos_test_data_paths neg_test_data_paths"
            " pos_test_label_data_paths neg_test_label_data_paths label_data_paths",
            ((), "labels are the next tokens"),
        ),
        "weight_by_num_documents": ((False,), "weights of a blend are those given"),
        "dataset_impl": (("gpt2",), "samples are cut from documents one after the other"),
        "pack_impl": (("packed",), "samples are cut from documents one after the other"),
        "train_epochs": ((), "its length is a number of iterations, train_iters"),
        "curriculum_learning": ((), "sequences have one length"),
        "data_efficiency": ((), "data is read in one order"),
        "compression_training": ((), "weights are not compressed"),
        "elasticity": ((), "batch sizes are those given"),
        "scheduler": ((), "the learning rate follows from lr_decay_style and its like"),
        "amp": ((), "number types are those of fp16 and bf16"),
    }
)
"""Settings of the data, the loss and the numbers, likewise: the values that agree, and the reason."""

_KERNELS = "kernels are chosen by what the machine has"
_RECOMPUTE = "whole layers are recomputed, without variants"
_LOG = "the log and --metrics-file have what there is"
_GENERATION = "for generation, use terapipe generate"
_FILE = "it can stand in a file for --deepspeed-config"
_ONLY_WITH_OTHERS = "without effect in this model"
_WANDB = "Weights & Biases takes it from the environment"


OPERATION: Mapping[str, str] = MappingProxyType(
    {
        **_each(
            "scaled_upper_triang_masked_softmax_fusion scaled_masked_softmax_fusion bias_dropout_fusion rope_fusion"
            " te_columnparallel te_rowparallel te_mha layernorm_fusion"
            " rmsnorm_fusion use_flashattn_swiglu use_triton rotary_save_freqs_buffer",
            _KERNELS,
        ),
        **_each("attention_softmax_in_fp32 apply_query_key_layer_scaling", "softmax runs in fp32"),
        **_each("fp16_lm_cross_entropy", "the loss is computed in fp32"),
        **_each("output_layer_parallelism", "the output layer is cut along the vocabulary"),
        **_each("use_cpu_initialization lazy_mpu_init", "weights are made on the CPU, then moved"),
        **_each(
            "partition_activations contiguous_checkpointing checkpoint_in_cpu synchronize_each_layer profile_backward"
            " deepspeed_activation_checkpointing activation_checkpointing",
            _RECOMPUTE,
        ),
        **_each(
            "log_dir log_grad_pct_zeros log_grad_norm log_optimizer_states log_gradient_noise_scale log_memory_stats"
            " gradient_noise_scale_n_batches gradient_noise_scale_cpu_offload char_level_ppl git_hash memory_profiling"
            " memory_profiling_path peak_theoretical_tflops",
            _LOG,
        ),
        **_each(
            "steps_per_print wall_clock_breakdown memory_breakdown dump_state prescale_gradients"
            " gradient_predivide_factor sparse_gradients communication_data_type comms_logger csv_monitor tensorboard"
            " wandb checkpoint flops_profiler autotuning zero_allow_untested_optimizer compile",
            _FILE,
        ),
        "use_bnb_optimizer": "the optimizer keeps its state in fp32, not in 8 bits",
        **_each("s3_path s3_chunk_size", "checkpoints are saved in --save: copy them from there"),
        **_each(
            "use_comet comet_workspace comet_project comet_experiment_name comet_tags comet_others comet_experiment",
            "TensorBoard and Weights & Biases are reported to, not Comet",
        ),
        **_each("fp32_allreduce", "gradients are reduced in fp32 where they add up in fp32"),
        **_each("wandb_group wandb_team wandb_host wandb_init_all_ranks", _WANDB),
        **_each(
            "text_gen_type temperature top_p top_k return_logits maximum_tokens prompt_end sample_input_file"
            " sample_output_file num_samples recompute eval_results_prefix eval_tasks",
            _GENERATION,
        ),
        **_each(
            "rpe_num_buckets rpe_max_distance param_sharing_style gmlp_attn_dim scalenorm_epsilon sparsity_config"
            " weighted_sampler_alpha coord_check save_base_shapes base_shapes_file mup_init_scale"
            " mup_attn_temp mup_output_temp mup_embedding_mult mup_rp_embedding_mult mup_width_scale onnx_safe"
            " short_seq_prob te_fp8_format te_fp8_wgrad te_fp8_margin te_fp8_amax_history_len"
            " te_fp8_amax_compute_algo allow_chopped dpo_fp32 dpo_reference_free dpo_beta kto_fp32 kto_desirable_weight"
            " kto_undesirable_weight kto_beta z_loss mamba_selective_scan_fusion mamba_causal_conv_fusion"
            " mamba_inner_func_fusion mamba_selective_fp32_params mamba_use_bias_in_conv mamba_use_bias_in_linears"
            " dim_att head_size ffn_dim expert_interval moe_expert_interval moe_top_k use_tutel moe_loss_coeff"
            " moe_train_capacity_factor moe_eval_capacity_factor moe_min_capacity moe_token_dropping"
            " create_moe_param_group moe_use_residual moe_expert_parallel_size moe_type moe_glu moe_lbl_in_fp32"
            " moe_jitter_eps moe_aux_loss_coeff enable_expert_tensor_parallelism precompute_model_name",
            _ONLY_WITH_OTHERS,
        ),
        **_each("data_impl use_shared_fs", "data is memory-mapped, and every rank finds its samples itself"),
        **_each("checkpoint_validation_with_forward_pass load_universal", "checkpoints load onto every layout"),
        **_each("override_lr_scheduler use_checkpoint_lr_scheduler", "the schedule follows from the flags"),
        **_each("adlr_autoresume adlr_autoresume_interval", "a run resumes with --load"),
        **_each("detect_nvlink_pairs autotuning_run deepscale deepscale_config", "the launcher does not know it"),
        **_each(
            "deepspeed local_rank rank world_size is_pipe_parallel iteration do_train do_valid do_test"
            " save_iters user_script padded_vocab_size dynamic_loss_scale config_files lr gas batch_size zero_stage"
            " zero_reduce_scatter zero_contiguous_gradients zero_reduce_bucket_size zero_allgather_bucket_size"
            " optimizer_type curriculum_seqlen min_scale loss_scale loss_scale_window hysteresis clip_grad",
            "NeoX sets it itself",
        ),
    }
)
"""Settings of operation, which do not change what is trained, and why none is written."""


@dataclass(kw_only=True, slots=True)
class Conversion:
    """A conversion under way: settings are taken from it; flags, remarks and refusals are put into it."""

    settings: Mapping[str, Any]
    """NeoX's settings by key; null stands for NeoX's default."""

    flags: list[tuple[str, ...]] = field(default_factory=list)
    """Flags of the trainer, each with its values."""

    launcher: list[tuple[str, ...]] = field(default_factory=list)
    """Flags of the launcher."""

    refusals: list[str] = field(default_factory=list)
    """Settings that decide what is trained and have no counterpart, each with its value and the reason."""

    remarks: list[tuple[str, str]] = field(default_factory=list)
    """Settings of operation that the command does without, or says in another way, each with the reason."""

    taken: set[str] = field(default_factory=set)
    """Keys that have been looked at."""

    def take(self, key: str, default: Any = None) -> Any:
        """Return a setting, or its default in NeoX, and mark it as converted.

        Args:
            default: its default in NeoX.
        """
        self.taken.add(key)
        value = self.settings.get(key)
        return default if value is None else value

    def number(self, key: str, default: float | None = None) -> Any:
        """Return a setting that is a number. YAML reads 1e-4 as text, because it has no point.

        Args:
            default: its default in NeoX.

        Raises:
            ConfigError: if it is no number.
        """
        return as_number(key, self.take(key, default))

    def count(self, key: str, default: int | None = None) -> int | None:
        """Return a setting that is a whole number.

        Args:
            default: its default in NeoX.

        Raises:
            ConfigError: if it is no whole number.
        """
        value = self.number(key, default)
        if value is not None and value != int(value):
            raise ConfigError(f"{key} {value} is not a whole number: give one")
        return None if value is None else int(value)

    def several(self, key: str) -> list[Any]:
        """Return a setting that is a list; empty if it is not set.

        Raises:
            ConfigError: if it is no list.
        """
        value = self.take(key, [])
        if not isinstance(value, list):
            raise ConfigError(f"{key} {value!r} is not a list: write it as [...]")
        return value

    def section(self, key: str) -> dict[str, Any]:
        """Return a setting that holds others.

        Raises:
            ConfigError: if it does not.
        """
        value = self.take(key, {})
        if not isinstance(value, Mapping):
            raise ConfigError(f"{key} {value!r} is not a mapping: write it as {{...}}")
        return {str(name): inner for name, inner in value.items() if inner is not None}

    def flag(self, name: str, *values: object) -> None:
        """Add a flag to the command.

        Args:
            *values: its values; none for a switch.
        """
        self.flags.append((name, *map(str, values)))

    def refuse(self, setting: str, reason: str, end: str = MODEL_CANNOT_BE_TRAINED) -> None:
        """Record a setting without which another model would be trained, or in another way."""
        # A value of YAML may have several lines; an error has one.
        self.refusals.append(" ".join(f"{setting}: {reason}: {end}".split()))

    def remark(self, setting: str, reason: str) -> None:
        """Record a setting of operation that has no flag."""
        self.remarks.append((" ".join(setting.split()), reason))

    def check(self) -> None:
        """See that the command trains what the settings say.

        Raises:
            ConfigError: if it would not; one line names every setting that is in the way.
        """
        if self.refusals:
            raise ConfigError("; ".join(self.refusals))

    def words(self) -> list[str]:
        """Return the words after the name of the trainer."""
        return [word for flag in self.flags for word in flag]

    def command(self) -> str:
        """Return the command, a flag a line, as a shell reads it."""
        launch = " ".join(["deepspeed", *(_quoted(flag) for flag in self.launcher), "pretrain_gpt.py"])
        return " \\\n    ".join([launch, *(_quoted(flag) for flag in self.flags)]) + "\n"

    def comments(self) -> Iterator[str]:
        """Yield the remarks, those with one reason in one line."""
        settings_by_reason = defaultdict(list)
        for setting, reason in self.remarks:
            settings_by_reason[reason].append(setting)
        for reason, settings in settings_by_reason.items():
            yield f"{', '.join(settings)}: {reason}"


MOST_NUMBER = 1e36
"""Numbers are below this: loss scales come next to it."""


def as_number(key: str, value: Any) -> Any:
    """Return a value that must be a number or None.

    Raises:
        ConfigError: if it is neither.
    """
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise ConfigError(f"{key} {value} is not a number: give one") from None
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ConfigError(f"{key} {value!r} is not a number: give one")
    if value is not None and not abs(value) < MOST_NUMBER:
        raise ConfigError(f"{key} {value!r} is beyond {MOST_NUMBER:g}: give less")
    return value


def _quoted(flag: tuple[str, ...]) -> str:
    return " ".join(map(shlex.quote, flag))
