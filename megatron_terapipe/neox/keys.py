"""NeoX's settings that are handled one by one: a flag each, or a reason why none is needed.

The defaults are those of NeoX's classes of arguments; two that have changed are in `defaults.py`.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any


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
