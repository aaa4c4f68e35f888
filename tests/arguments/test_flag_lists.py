"""Flags of other trainers: each is ours, accepted for a reason, or refused with one."""

import re
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_terapipe.arguments import flags, parse_arguments, read_arguments
from megatron_terapipe.arguments.foreign_flags import (
    ACCEPTED_FLAGS,
    FAMILIES,
    IDLE_FLAGS,
    NEUTRAL_FLAGS,
    OTHER_NAMES,
    REFUSED_FLAGS,
    UNSUPPORTED_FLAGS,
)
from megatron_terapipe.arguments.parser import spellings
from megatron_terapipe.config import Config
from megatron_terapipe.config.options import flag
from megatron_terapipe.errors import MODEL_CANNOT_BE_TRAINED as MODEL
from megatron_terapipe.errors import TRAINING_CANNOT_BE_RUN as TRAINING
from megatron_terapipe.errors import ConfigError
from pretrain_gpt import main

REQUIRED = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --micro-batch-size 2 --train-iters 10 "
    "--lr 1e-3 --data-path corpus "
)
OWN = {spelling for each in flags() for names, _ in spellings(each) for spelling in names}

# Megatron-DeepSpeed's arguments by its own groups, and the aliases of Seq1F1B and bigscience.
MUST_WORK = """
    tensor-model-parallel-size pipeline-model-parallel-size no-pipeline-parallel local_rank local-rank
    deepspeed deepspeed_config zero-stage deepspeed-activation-checkpointing
    num-layers hidden-size num-attention-heads seq-length max-position-embeddings make-vocab-size-divisible-by
    micro-batch-size global-batch-size rampup-batch-size train-iters seed
    lr min-lr weight-decay clip-grad adam-beta1 adam-beta2
    fp16 bf16
    data-path split vocab-file merge-file tokenizer-type
    save load save-interval
    eval-interval eval-iters log-interval tensorboard-dir
"""
KNOWN = """
    num-layers-per-virtual-pipeline-stage sequence-parallel ds-sequence-parallel-size enable-zbh1-pipeline
    distributed-backend distributed-timeout-minutes use-distributed-optimizer standalone-embedding-stage DDP-impl
    overlap-p2p-communication model-parallel-size pipe-parallel-size pp-partition-method pipe-sp-splits pipe-sp-strategy
    partition-activations contigious-checkpointing checkpoint-in-cpu synchronize-each-layer profile-backward
    zero-reduce-scatter zero-contigious-gradients zero-reduce-bucket-size zero-allgather-bucket-size remote-device
    use-pin-memory cpu-optimizer cpu_torch_adam ds_fused_adam
    ffn-hidden-size num-key-value-heads kv-channels use-rotary-position-embeddings rotary-position-embeddings-theta
    rotary-percent no-position-embedding normalization layernorm-epsilon swiglu squared-relu openai-gelu
    untie-embeddings-and-output-weights disable-bias-linear init-method-std attention-dropout hidden-dropout
    use-flash-attn use-flash-attn-v2 apply-residual-connection-post-layernorm
    train-samples train-tokens exit-interval exit-duration-in-mins exit-signal-handler optimizer recompute-granularity
    recompute-method recompute-num-layers recompute-activations checkpoint-activations checkpoint-num-layers
    dataloader-type num-workers
    lr-decay-style lr-decay-iters lr-decay-samples lr-decay-tokens lr-warmup-iters lr-warmup-samples
    lr-warmup-fraction lr-warmup-tokens override-opt_param-scheduler use-checkpoint-opt_param-scheduler
    start-weight-decay end-weight-decay weight-decay-incr-style adam-eps sgd-momentum
    loss-scale initial-loss-scale min-loss-scale loss-scale-window hysteresis accumulate-allreduce-grads-in-fp32
    fp32-residual-connection attention-softmax-in-fp32 no-query-key-layer-scaling fp16-lm-cross-entropy
    train-data-path valid-data-path test-data-path data-cache-path tokenizer-model vocab-size data-impl
    reset-position-ids reset-attention-mask eod-mask-loss mmap-warmup train-data-exact-num-epochs
    load-tag finetune no-save-optim no-save-rng no-load-optim no-load-rng no-load-lr-state universal-checkpoint
    use-checkpoint-args exit-on-missing-checkpoint
    skip-train tensorboard-log-interval tensorboard-queue-size log-timers-to-tensorboard
    log-batch-size-to-tensorboard log-validation-ppl-to-tensorboard log-memory-to-tensorboard
    log-world-size-to-tensorboard log-optimizer-states-to-tensorboard log-params-norm log-num-zeros-in-grad
    timing-log-level timing-log-option wandb-project wandb-exp-name wandb-save-dir
    pipeline-model-parallel-split-rank
"""
OUT_OF_SCOPE = """
    retro-workdir retro-add-retriever bert-load mask-prob vision-pretraining num-experts moe-loss-coeff kd
    num-layers-teacher curriculum-learning-legacy
"""
# Of Megatron-LM as it is now, by its own groups.
MODERN = """
    position-embedding-type rotary-base norm-epsilon num-query-groups group-query-attention use-mcore-models
    transformer-impl no-gradient-accumulation-fusion no-masked-softmax-fusion attention-backend add-bias-linear
    apply-layernorm-1p heterogeneous-layers-config-path overlap-grad-reduce overlap-param-gather qk-layernorm
    rotary-interleaved use-rope-scaling add-qkv-bias context-parallel-size tp-comm-overlap
    encoder-num-layers decoder-num-layers softmax-type window-size window-attn-skip-freq relative-attention-num-buckets
    relative-attention-max-distance rope-scaling-factor no-rope-freq mrope-section quick-geglu
    activation-func-clamp-value glu-linear-offset onnx-safe multi-latent-attention mtp-num-layers
    mtp-loss-scaling-factor
    log-straggler disable-straggler-on-startup straggler-ctrlr-port straggler-minmax-count
    run-workload-inspector-server inprocess-restart inprocess-max-iterations inprocess-granularity no-one-logger
    one-logger-project one-logger-run-name one-logger-async app-tag-run-name app-tag-run-version enable-ft-package
    calc-ft-timeouts config-logger-dir log-throughput log-progress log-energy no-barrier-with-level-1-timing
    wandb-entity logging-level
    muon-momentum muon-no-split-qkv muon-use-nesterov perform-rl-step grpo-group-size rl-prompts-per-eval
    decrease-batch-size-if-needed no-check-for-nan-in-loss-and-grad check-for-spiky-loss check-for-large-grads
    distribute-saved-activations recompute-modules cpu-offloading-num-layers no-clone-scatter-output-in-embedding
    iterations-to-skip result-rejected-tracker-filename disable-gloo-process-groups use-pytorch-profiler
    record-memory-history memory-snapshot-path tp-comm-overlap-cfg disable-tp-comm-overlap-ag
    tp-comm-bootstrap-backend use-cpu-initialization empty-unused-memory-level deterministic-mode
    check-weight-hash-across-dp-replicas-interval calculate-per-token-loss train-sync-interval
    use-fused-weighted-squared-relu rope-type cross-entropy-loss-fusion optimizer-cpu-offload
    optimizer-offload-fraction dump-param-to-param-group-map no-pin-cpu-grads use-legacy-models manual-gc
    manual-gc-interval no-manual-gc-eval pipeline-model-parallel-comm-backend high-priority-stream-groups
    use-te-activation-func error-injection-rate error-injection-type rerun-mode data-parallel-random-init
    embedding-init-method-std init-method-xavier-uniform decoupled-lr decoupled-min-lr
    save-retain-interval load-main-params-from-ckpt no-strict-fsdp-dtensor-load non-persistent-save-interval
    non-persistent-ckpt-type pretrained-checkpoint ckpt-step no-initialization use-mp-args-from-checkpoint-args
    no-use-tokenizer-model-from-checkpoint-args use-dist-ckpt use-persistent-ckpt-worker auto-detect-ckpt-format
    dist-ckpt-format ckpt-format ckpt-convert-format ckpt-convert-save ckpt-fully-parallel-save
    no-ckpt-fully-parallel-save async-save ckpt-fully-parallel-load ckpt-assume-constant-structure
    dist-ckpt-strictness dist-ckpt-save-pre-mcore-014 dist-ckpt-optim-fully-reshardable
    distrib-optim-fully-reshardable-mem-efficient grad-reduce-in-bf16 apply-query-key-layer-scaling
    disable-bf16-reduced-precision-matmul reuse-grad-buf-for-mxfp8-param-ag pipeline-model-parallel-layout
    microbatch-group-size-per-virtual-pipeline-stage overlap-p2p-communication-warmup-flush
    distributed-timeout-seconds-after-init defer-embedding-wgrad-compute wgrad-deferral-limit no-align-grad-reduce
    ddp-num-buckets ddp-bucket-size ddp-average-in-collective overlap-param-gather-with-optimizer-step
    no-align-param-gather use-ring-exchange-p2p account-for-embedding-in-pipeline-split
    account-for-loss-in-pipeline-split use-nccl-ub use-sharp use-megatron-fsdp data-parallel-sharding-strategy
    num-distributed-optimizer-instances use-torch-fsdp2 cp-comm-type hierarchical-context-parallel-sizes
    nccl-communicator-config-path use-tp-pp-dp-mapping replication replication-jump full-validation
    multiple-validation-sets test-mode padded-vocab-size tokenizer-metadata tiktoken-pattern
    tiktoken-num-special-tokens tiktoken-special-tokens legacy-tokenizer trust-remote-code data-args-path
    per-split-data-args-path no-mmap-bin-files num-dataset-builder-threads object-storage-cache-path
    mid-level-dataset-surplus allow-ambiguous-pad-tokens adlr-autoresume retriever-seq-length qk-l2-norm
    expert-model-parallel-size expert-tensor-parallel-size moe-layer-freq moe-ffn-hidden-size moe-grouped-gemm
    moe-router-topk moe-router-load-balancing-type moe-aux-loss-coeff moe-token-dispatcher-type moe-permute-fusion
    overlap-moe-expert-parallel-comm delay-wgrad-compute q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim
    v-head-dim mscale mscale-all-dim enable-experimental spec hybrid-attention-ratio hybrid-override-pattern
    mamba-state-dim is-hybrid-model yaml-cfg use-precision-aware-optimizer main-grads-dtype exp-avg-dtype disable-msc
    kitchen-config-file sft fim-data fp8-format fp8-recipe fp4-format te-rng-tracker enable-cuda-graph
    cuda-graph-impl cuda-graph-scope cuda-graph-warmup-steps inference-max-requests flash-decode
"""
MODEL_AND_PARALLEL = """
    sequence-parallel use-rotary-position-embeddings rotary-position-embeddings-theta rotary-percent rotary-base
    position-embedding-type no-position-embedding normalization norm-epsilon layernorm-epsilon swiglu squared-relu
    openai-gelu disable-bias-linear untie-embeddings-and-output-weights attention-dropout hidden-dropout vocab-size
    heterogeneous-layers-config-path num-query-groups num-key-value-heads kv-channels ffn-hidden-size init-method-std
    zero-reduce-scatter zero-reduce-bucket-size zero-allgather-bucket-size
"""


def parse(words: str = "") -> Config:
    return parse_arguments((REQUIRED + words).split())


def refusal(words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(words)
    line = str(caught.value)
    assert "\n" not in line
    return line


def each_of(*lists: str) -> list[str]:
    return [f"--{name}".replace("_", "-") for names in lists for name in names.split()]


def test_what_must_work_is_ours() -> None:
    assert not set(each_of(MUST_WORK, MODEL_AND_PARALLEL)) - OWN


TABLES = (OWN, set(ACCEPTED_FLAGS), set(IDLE_FLAGS), set(NEUTRAL_FLAGS), set(REFUSED_FLAGS))


def test_no_flag_is_unheard_of() -> None:
    assert not set(each_of(MUST_WORK, KNOWN, OUT_OF_SCOPE, MODERN)) - set().union(*TABLES)
    assert not set(each_of(OUT_OF_SCOPE)) & (OWN | ACCEPTED_FLAGS.keys())


def test_no_flag_is_two_things() -> None:
    for first, second in combinations(TABLES, 2):
        assert not first & second


def test_refused_flags_end_in_a_remedy_that_exists() -> None:
    for name, line in REFUSED_FLAGS.items():
        assert re.fullmatch(r"--[a-zA-Z0-9-]+", name), name
        assert re.search(r": (drop it|use) ?[^:]*$", line) or line.endswith((MODEL, TRAINING)), line
        assert set(re.findall(r"--[a-z0-9-]+", line)) <= OWN | {"--launcher"}, line
        assert refusal(name) == f"{name}: {line}"


def test_what_defines_the_model_is_never_to_be_dropped() -> None:
    others = (neutral.otherwise for neutral in NEUTRAL_FLAGS.values())
    assert not [line for line in (*UNSUPPORTED_FLAGS.values(), *FAMILIES.values(), *others) if "drop" in line]


@pytest.mark.parametrize("name", ["--moe-of-tomorrow", "--mtp-x", "--rl-y", "--fp8-z", "--export-w"])
def test_newer_flags_of_a_known_group_get_no_hint(name: str) -> None:
    assert re.fullmatch(rf"{name}: .*: this (model cannot be trained|training cannot be run) here", refusal(name))


def test_a_group_holds_no_flag_of_ours() -> None:
    assert not [name for name in OWN if name.startswith(tuple(FAMILIES))]


def words_of_idle(name: str) -> str:
    return name + {0: "", 1: " 1", "*": " a 2"}[IDLE_FLAGS[name].values]


def test_flags_without_effect_are_listed_in_one_line() -> None:
    arguments = read_arguments((REQUIRED + " ".join(map(words_of_idle, IDLE_FLAGS))).split())
    assert arguments.config == parse()
    (line,) = [line for line in arguments.notices if "no effect" in line]
    assert line == f"These flags concern operation only and have no effect here: {', '.join(IDLE_FLAGS)}"


def test_no_line_without_such_flags() -> None:
    assert not [line for line in read_arguments(REQUIRED.split()).notices if "no effect" in line]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--ckpt-format", "--ckpt-format expected one argument: give it one"),
        ("--async-save yes", "no flag takes the value yes: drop it"),
        ("--async-save=yes", "--async-save ignored explicit argument 'yes': drop the value"),
        ("--manual-gc-interval 1 2", "no flag takes the value 2: drop it"),
    ],
)
def test_flags_without_effect_take_as_many_values_as_in_megatron(words: str, line: str) -> None:
    assert refusal(words) == line


def test_without_the_flag_that_gives_them_effect_is_another_flag_of_the_tables() -> None:
    owners = {idle.beside.split()[0] for idle in IDLE_FLAGS.values() if idle.beside}
    assert owners <= OWN | NEUTRAL_FLAGS.keys() | REFUSED_FLAGS.keys()


def test_neutral_values_change_nothing() -> None:
    for name, neutral in NEUTRAL_FLAGS.items():
        for value in neutral.neutral:
            assert parse(f"{name} {value}") == parse(f"{name}={value}") == parse(), name
        assert refusal(f"{name} 2") == f"{name} 2: {neutral.otherwise}"
        assert neutral.otherwise.endswith((MODEL, TRAINING)) or re.search(r": use [^:]*$", neutral.otherwise)


def test_every_one_of_several_values_has_to_be_neutral() -> None:
    assert parse("--num-experts 1 1") == parse()
    assert refusal("--num-experts 1 4").startswith("--num-experts 1 4: mixtures of experts are not in this trainer")


def test_every_flag_that_is_refused_has_its_reason() -> None:
    assert refusal("--remote_device cpu --num-experts 8") == (
        "--remote-device cpu: weights stay on the accelerator: use none; "
        "--num-experts 8: mixtures of experts are not in this trainer: this model cannot be trained here"
    )


def test_context_parallelism_is_another_name_for_sequence_parallel_ranks() -> None:
    for name in ("--context-parallel-size", "--context_parallel_size", "--ds-sequence-parallel-size"):
        assert (
            parse(f"{name} 2 --cp-comm-type p2p a2a --force-ds-sequence-parallel").parallel
            == parse("--ds-sequence-parallel-size=2").parallel
        )


def words_of(name: str) -> str:
    """A flag that is accepted, and what it needs beside it."""
    accepted = ACCEPTED_FLAGS[name]
    value = f" {accepted.values[0]}" if accepted.values else ""
    return f"{name}{value}" + (f" {flag(accepted.needs)} 2" if accepted.needs else "")


def test_accepted_flags_change_nothing() -> None:
    for name, accepted in ACCEPTED_FLAGS.items():
        without = parse(f"{flag(accepted.needs)} 2" if accepted.needs else "")
        assert parse(words_of(name)) == without, name


@settings(max_examples=20, deadline=None)
@given(st.permutations(sorted(ACCEPTED_FLAGS)))
def test_accepted_flags_change_nothing_together(names: list[str]) -> None:
    assert parse(" ".join(map(words_of, names))) == parse("--num-key-value-heads 2")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--transformer-impl cuda", "--transformer-impl cuda is not known: choose local or transformer_engine"),
        ("--use-flash-attn=2", "--use-flash-attn ignored explicit argument '2': drop the value"),
        ("--attention-backend", "--attention-backend expected one argument: give it one"),
        ("--group-query-attention", "--group-query-attention does not say how many: add --num-key-value-heads"),
        ("--add-bias-linear --disable-bias-linear", "--add-bias-linear contradicts --disable-bias-linear: drop one of"),
        (
            "--use-distributed-optimizer --zero-stage 0",
            "--use-distributed-optimizer contradicts --zero-stage 0: drop one of them",
        ),
    ],
)
def test_accepted_flags_that_would_not_be_true(words: str, line: str) -> None:
    assert refusal(words).startswith(line)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--swiglu --squared-relu", "--squared-relu contradicts --swiglu: drop one of them"),
        ("--activation relu --swiglu", "--swiglu contradicts --activation: drop one of them"),
        ("--num-query-groups 2 --num-key-value-heads 4", "--num-key-value-heads contradicts --num-query-groups: drop"),
        (
            "--position-embedding-type learned_absolute --no-position-embedding",
            "--no-position-embedding contradicts --position-embedding-type learned_absolute: drop one of them",
        ),
    ],
)
def test_flags_that_contradict_each_other(words: str, line: str) -> None:
    assert refusal(words).startswith(line)


@pytest.mark.parametrize(
    ("words", "positions"),
    [
        ("", "learned_absolute"),
        ("--no-position-embedding", "none"),
        ("--use-rotary-position-embeddings --no-position-embedding", "rope"),
        ("--no-position-embedding --use-rotary-position-embeddings", "rope"),
        ("--no-position-embedding --position-embedding-type rope", "rope"),
    ],
)
def test_no_position_embedding_speaks_of_the_learned_ones(words: str, positions: str) -> None:
    assert parse(words).model.position_embedding_type == positions


def test_a_flag_may_be_repeated_and_the_last_counts() -> None:
    config = parse("--lr 1 --lr 2 --swiglu --activation swiglu --num-query-groups 2 --num-key-value-heads 2")
    assert (config.optimizer.lr, config.model.activation, config.model.num_key_value_heads) == (2.0, "swiglu", 2)


def test_a_llama_script_of_megatron_deepspeed() -> None:
    config = parse(
        "--use-rotary-position-embeddings --untie-embeddings-and-output-weights --swiglu --normalization rmsnorm "
        "--disable-bias-linear --num-key-value-heads 2 --ffn-hidden-size 172 --no-query-key-layer-scaling "
        "--attention-dropout 0 --hidden-dropout 0 --use-flash-attn-v2 --deepspeed --zero-stage 1 --bf16 "
        "--no-pipeline-parallel --DDP-impl local --no-masked-softmax-fusion --no-bias-gelu-fusion"
    )
    model = config.model
    assert (model.position_embedding_type, model.normalization, model.activation) == ("rope", "rmsnorm", "swiglu")
    assert model.disable_bias_linear and model.untie_embeddings_and_output_weights
    assert model.num_key_value_heads == 2


def test_a_llama_script_of_megatron_lm() -> None:
    config = parse(
        "--use-mcore-models --position-embedding-type rope --rotary-base 500000 --rotary-percent 1.0 --swiglu "
        "--group-query-attention --num-query-groups 2 --normalization RMSNorm --norm-epsilon 1e-6 "
        "--disable-bias-linear --untie-embeddings-and-output-weights --transformer-impl transformer_engine "
        "--attention-backend flash --use-distributed-optimizer --attention-softmax-in-fp32"
    )
    model = config.model
    assert (model.rotary_base, model.layernorm_epsilon, model.normalization) == (500000.0, 1e-6, "rmsnorm")


@pytest.mark.parametrize(
    "words",
    [
        "--num-experts 8",
        "--context-parallel-size 3",
        "--add-bias-linear --disable-bias-linear",
        "--swiglu --squared-relu",
        "--transformer-impl cuda",
        "--model-preset gpt5",
        "--zero-reduce-bucket-size 0",
    ],
)
def test_the_trainer_ends_with_one_line_and_exit_code_2(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main((REQUIRED + words).split()) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("error: --") and err.count("\n") == 1


def test_names_that_others_have_lead_to_flags_of_ours() -> None:
    """A name that is known is never refused, so that it cannot stand in this list."""
    assert set(OTHER_NAMES.values()) <= OWN
    known = OWN | set(ACCEPTED_FLAGS) | set(IDLE_FLAGS) | set(NEUTRAL_FLAGS) | set(REFUSED_FLAGS)
    assert not known & set(OTHER_NAMES)
    with pytest.raises(ConfigError, match=r"^--tp is not a flag: did you mean --tensor-model-parallel-size\?$"):
        read_arguments(["--tp", "2"])
