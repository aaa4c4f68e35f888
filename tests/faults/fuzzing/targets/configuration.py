"""The command line of the trainer, and the files of other projects in its place."""

from pathlib import Path

from megatron_terapipe.arguments import read_arguments
from megatron_terapipe.config.data import read_data_arguments_by_part, read_split, read_weighted_prefixes
from megatron_terapipe.config.layers import canonical_layers, layers_of_pattern
from megatron_terapipe.config.model import ModelConfig
from megatron_terapipe.huggingface.families.registry import FAMILIES
from megatron_terapipe.huggingface.families.settings import SettingsFile
from megatron_terapipe.neox.convert import convert, read_settings
from megatron_terapipe.search.price.workload_files import read_workload
from tests.faults.fuzzing.target import Target, as_json, in_file
from tests.faults.fuzzing.targets.search import STRATEGY
from tests.huggingface.files import least_settings

SMALL = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --micro-batch-size 1 --lr 1e-3"
RUN = f"{SMALL} --train-iters 10 --mock-data"
OF_FILE = "--seq-length 32 --micro-batch-size 1 --lr 1e-3 --train-iters 10 --mock-data"
PRESET = "--model-preset llama2-7b --seq-length 128 --micro-batch-size 1 --lr 1e-3 --train-iters 10 --mock-data"


def _words(data: bytes) -> list[str]:
    # A system passes bytes that are no text on as halves of characters, which is what a program then sees.
    return [word for word in data.decode("utf-8", "surrogateescape").split() if word not in ("--help", "-h")]


def _read_flags(data: bytes, folder: Path) -> None:
    read_arguments(_words(data))


def _read_with(*words: str) -> object:
    return read_arguments([*RUN.split(), *words])


def _read_theirs(path: str) -> None:
    read_arguments(["--model-preset", path, *OF_FILE.split()])
    read_workload(path)


def _read_layers(data: bytes, folder: Path) -> None:
    text = canonical_layers("{" + data.decode("utf-8", "surrogateescape"))
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "seq_length": 128}
    ModelConfig(num_layers=2, heterogeneous_layers_config_path=text, **sizes)  # type: ignore[arg-type]


def _read_prefixes(data: bytes, folder: Path) -> None:
    text = data.decode("utf-8", "surrogateescape")
    read_weighted_prefixes("--data-path", tuple(text.split()))
    read_split(text)


def _read_pattern(data: bytes, folder: Path) -> None:
    layers_of_pattern(data.decode("utf-8", "surrogateescape"), 4, "--no-rope-freq")


def _read_neox(path: str) -> None:
    conversion = convert(read_settings([path]), 8)
    conversion.command()


LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
}
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": 1000}
GEMMA = {
    **{"model_type": "gemma2", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000, "max_position_embeddings": 256},
    **{"sliding_window": 64, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
}
DEEPSPEED = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 50000000},
    "fp16": {"enabled": False},
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8}},
}
NEOX = b"""pipe_parallel_size: 1
model_parallel_size: 1
num-layers: 12
hidden-size: 768
num-attention-heads: 12
seq_length: 2048
max_position_embeddings: 2048
pos_emb: rotary
optimizer: {type: Adam, params: {lr: 0.0006, betas: [0.9, 0.95], eps: 1.0e-8}}
min_lr: 0.00006
zero_optimization: {stage: 1, reduce_bucket_size: 500000000}
train_micro_batch_size_per_gpu: 4
data_path: data/enwik8_text_document
split: 969,30,1
train_iters: 320000
lr_decay_iters: 320000
lr_decay_style: cosine
warmup: 0.01
fp16: {enabled: true, loss_scale: 0, loss_scale_window: 1000, hysteresis: 2, min_loss_scale: 1}
"""
BLOCKS = {"block_configs": [{"attention": {"num_query_groups": 2}, "mlp": {"ffn_mult": 2.5}}, {"mlp": {"no_op": True}}]}
PARTS = {"train": "0.3 wiki 0.7 books", "valid": ["news"], "test": None}


def _of_families() -> list[bytes]:
    """Return a file of each family, with its default sizes."""
    return [
        as_json(each.write(each.read(SettingsFile(least_settings(each.name), each.name)))) for each in FAMILIES.values()
    ]


TARGETS = (
    Target(
        name="flags",
        read=_read_flags,
        seeds=(
            RUN.encode(),
            f"{RUN} --num-token-slices 4 --token-slices balanced --pipeline-model-parallel-size 2 --bf16".encode(),
            f"{RUN} --rampup-batch-size 2 2 100 --global-batch-size 8 --lr-decay-style cosine".encode(),
            f"{SMALL} --train-samples 100 --data-path corpus --step-batch-size-schedule 0:4,1.5K:8".encode(),
            f"{SMALL} --train-samples 100 --data-path 0.3 a 0.7 b --split 9,1,0 --swiglu".encode(),
            f"{PRESET} --no-rope-freq ([0]*3+[1])*8 --window-size 64,0".encode(),
        ),
        found=(
            f"{RUN} --num-layers 10000000000000".encode(),
            f"{RUN} --num-token-slices 1000000000 --seq-length 1000000000".encode(),
            f"{RUN} --rampup-batch-size 1 1 10000000000000 --global-batch-size 1000000000".encode(),
            f"{RUN} --seed ".encode() + b"9" * 5000,
            f"{RUN} --save ".encode() + b"\xff\xfe",
        ),
    ),
    Target(
        name="DeepSpeed's file",
        read=in_file("ds.json", lambda path: _read_with("--deepspeed_config", path)),
        seeds=(as_json(DEEPSPEED), as_json({"train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": True}})),
    ),
    Target(
        name="strategy file",
        read=in_file("s.json", lambda path: _read_with("--strategy", path)),
        seeds=(as_json(STRATEGY), as_json({"strategy": {"num_token_slices": 2, "token_slices": [80, 48]}})),
        found=(as_json({"data_parallel_size": 20_000_000}), b"NaN"),
    ),
    Target(
        name="config.json of Hugging Face",
        read=in_file("config.json", _read_theirs),
        seeds=(as_json(LLAMA), as_json(GPT2), as_json(GEMMA), *_of_families()),
        found=(
            as_json(LLAMA | {"num_hidden_layers": 10**9}),
            as_json(LLAMA | {"hidden_size": 1e30}),
            as_json(GEMMA | {"num_hidden_layers": 10**12}),
            as_json({"model_type": "granite", "logits_scaling": 5e-324}),
        ),
    ),
    Target(
        name="layers that differ",
        read=_read_layers,
        seeds=(as_json(BLOCKS)[1:],),
        found=(b"[" * 3000, b'"a": NaN}', b'"block_configs": [{"mlp": {"ffn_hidden_size": 1' + b"0" * 30 + b"}}, {}]}"),
    ),
    Target(
        name="patterns of layers",
        read=_read_pattern,
        seeds=(b"([0]*3+[1])*1", b"2", b"[1, 0, 0, 1]"),
        found=(b"[]*1" + b"0" * 40,),
    ),
    Target(
        name="weighted prefixes, split", read=_read_prefixes, seeds=(b"969,30,1",), words=(b"0.3 a 0.7 b", b"1e400 x")
    ),
    Target(
        name="data paths by part",
        read=in_file("parts.json", read_data_arguments_by_part),
        seeds=(as_json(PARTS),),
    ),
    Target(
        name="YAML of GPT-NeoX",
        read=in_file("neox.yml", _read_neox),
        seeds=(NEOX,),
        found=(
            NEOX.replace(b"data_path: data/enwik8_text_document", b"train_data_paths: 0"),
            NEOX.replace(b"loss_scale: 0", b"loss_scale: 1" + b"0" * 400),
            NEOX.replace(b"min_loss_scale: 1", b"min_loss_scale: 1e308"),
            NEOX + b"launcher: 2024-13-45\n",
            NEOX.replace(b"hidden-size: 768", b"hidden-size: -1"),
            NEOX.replace(b"num-layers: 12", b"num-layers: 11000000000"),
            NEOX.replace(b"pos_emb: rotary", b"pos_emb: [[]]"),
            NEOX.replace(b"{stage: 1,", b"{2: 1,"),
            NEOX + b"attention_config: [[[global], 10000000000000000000000]]\n",
        ),
    ),
)
