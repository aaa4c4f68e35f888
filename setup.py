"""Packaging. Tool settings are in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

# psutil is what DeepSpeed needs, too.
TEST = ["hypothesis>=6.100", "jsonschema>=4.18", "psutil>=5.9", "pytest>=8", "pytest-xdist>=3.7"]

setup(
    name="megatron-terapipe",
    version="0.1.0",
    description="Pipeline parallelism inside a sequence: token slices for DeepSpeed and Megatron-style GPT training",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["deepspeed_ext*", "megatron_terapipe*"]),
    package_data={
        "deepspeed_ext": ["py.typed", "plan/render/page/*"],
        "megatron_terapipe": ["py.typed", "page/report.css"],
    },
    py_modules=["pretrain_gpt"],
    entry_points={"console_scripts": ["terapipe = megatron_terapipe.command.main:main"]},
    install_requires=[
        "torch>=2.8",
        # The hooks of the engine are those of 0.19.8; see deepspeed_ext/runtime/initialize.py.
        "deepspeed>=0.19.8,<0.20",
        "numpy>=1.26",
        # The fast simulator and the solvers; 0.60 is the first that takes numpy 2.
        "numba>=0.60",
        "packaging>=23",
        # Processes of the launch; DeepSpeed's launcher needs it, too.
        "psutil>=5.9",
        # Input files of the search are read and checked with it; DeepSpeed needs it, too.
        "pydantic>=2.7",
        # Clusters may be described in YAML.
        "pyyaml>=6.0",
        "regex>=2023.12",
        # Tables and progress of the search.
        "rich>=13",
        # Calibration of the search.
        "scipy>=1.11",
        # Byte pair encoding of GPT-2 and of Hugging Face.
        "tokenizers>=0.20",
        "tqdm>=4.64",
    ],
    extras_require={
        # NVIDIA apex is not on PyPI: what is called apex there is another package.
        "test": TEST,
        "dev": [
            *TEST,
            *("mypy>=1.13", "pre-commit>=3.5", "ruff>=0.9"),
            *("sentencepiece>=0.2", "tensorboard>=2.15", "tiktoken>=0.7", "wandb>=0.17", "zstandard>=0.22"),
            # Hugging Face's own models, to hold converted ones against.
            *("safetensors>=0.5", "transformers>=5"),
        ],
        # Models of transformers as pipeline layers.
        "transformers": ["transformers>=5"],
        # Tokenizers of SentencePiece; TikTokenizer.
        "tokenizers": ["sentencepiece>=0.2"],
        "tiktoken": ["tiktoken>=0.7"],
        # Curves: --tensorboard-dir, --wandb-project.
        "tensorboard": ["tensorboard>=2.15"],
        "wandb": ["wandb>=0.17"],
        # To convert models to and from the files of Hugging Face.
        "huggingface": ["safetensors>=0.5"],
        # To preprocess .zst files.
        "zstandard": ["zstandard>=0.22"],
        # The fault suite (make faults): inputs that reach new code. Without it they are made by chance alone.
        "faults": ["atheris>=3"],
        # Curves of benchmarks/convergence.py, and the tables that benchmarks/kernel_efficiency.py reads.
        "bench": ["matplotlib>=3.8", "pyarrow>=14"],
        # Megatron's own readers, to hold our data files against.
        "interchange": ["megatron-core==0.16.1"],
    },
    classifiers=["License :: OSI Approved :: Apache Software License", "Programming Language :: Python :: 3"],
)
