"""Packaging. Tool settings are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
ELSEWHERE = r"(?!https?://|mailto:)"
"""Begins a pattern of what a link names, unless it is an address."""

DATA = ["sentencepiece>=0.2", "tiktoken>=0.7", "zstandard>=0.22"]
HUGGINGFACE = ["safetensors>=0.5", "transformers>=5"]
DOCS = ["furo>=2025.9.25", "myst-parser>=5", "sphinx>=9"]
LOGGING = ["tensorboard>=2.18", "wandb>=0.18"]


def version() -> str:
    """The version of the project, which `deepspeed_ext/__init__.py` alone states."""
    text = (HERE / "deepspeed_ext" / "__init__.py").read_text(encoding="utf-8")
    return re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)[1]


def description() -> str:
    """The README without its pictures and its links to files: a package index has neither."""
    text = (HERE / "README.md").read_text(encoding="utf-8")
    text = re.sub(rf"^\s*(\[?!\[[^\]]*\]\({ELSEWHERE}.*|</?(picture|source|img|p)\b.*)\n", "", text, flags=re.MULTILINE)
    text = re.sub(rf"\[([^\[\]]*)\]\({ELSEWHERE}[^)]*\)", r"\1", text)
    return f"{text}\nThe files that this page names are in the source archive.\n"


def examples() -> list[tuple[str, list[str]]]:
    """The examples by the folder into which they go, below that of the environment: who has no checkout copies them."""
    found: dict[str, list[str]] = {}
    for path in sorted(HERE.glob("examples/**/*")):
        if path.is_file() and "__pycache__" not in path.parts:
            name = path.relative_to(HERE)
            found.setdefault(f"share/megatron-terapipe/{name.parent}", []).append(str(name))
    return list(found.items())


setup(
    name="megatron-terapipe",
    version=version(),
    description="Pipeline parallelism inside a sequence: token slices for DeepSpeed and Megatron-style GPT training",
    long_description=description(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE", "NOTICE"],
    python_requires=">=3.11",
    packages=find_packages(include=["deepspeed_ext*", "megatron_terapipe*"]),
    package_data={"": ["py.typed", "**/*.css", "**/*.html", "**/*.js", "**/*.toml"]},
    py_modules=["pretrain_gpt"],
    data_files=examples(),
    entry_points={"console_scripts": ["terapipe = megatron_terapipe.command.main:main"]},
    install_requires=[
        "torch>=2.8",
        # The hooks of the engine are those of 0.19.8; see deepspeed_ext/runtime/supported_versions.py.
        "deepspeed>=0.19.8,<0.20",
        "numpy>=2.0",
        # The fast simulator and the solvers.
        "numba>=0.60",
        "packaging>=23",
        # Processes of the launch; DeepSpeed's launcher needs it, too.
        "psutil>=5.9",
        # Input files of the search are read and checked with it; DeepSpeed needs it, too.
        "pydantic>=2.7",
        # Clusters may be described in YAML.
        "pyyaml>=6.0",
        # Tables and progress of the search.
        "rich>=13",
        # Calibration of the search.
        "scipy>=1.13",
        # Scripts of `terapipe completion`.
        "shtab>=1.13",
        # Byte pair encoding of GPT-2 and of Hugging Face.
        "tokenizers>=0.20",
        "tqdm>=4.64",
    ],
    # Named by use; docs/how-to/install.md has them as a table. NVIDIA's apex is not on PyPI: what is called apex there
    # is another package.
    extras_require={
        # SentencePieceTokenizer, TikTokenizer, and text in .zst files.
        "data": DATA,
        # Models of Hugging Face: their files, and models of transformers as pipeline layers.
        "huggingface": HUGGINGFACE,
        # Curves: --tensorboard-dir, --wandb-project.
        "logging": LOGGING,
        # megatron-core's layers in this trainer: megatron_terapipe/megatron_core.py.
        "megatron": ["megatron-core==0.16.1"],
        # Curves of benchmarks/convergence.py, and the tables that benchmarks/kernel_efficiency.py reads.
        "bench": ["matplotlib>=3.9", "pyarrow>=16.1"],
        # The documentation site: make docs.
        "docs": DOCS,
        # To change this project: all that its tests and checks use.
        "dev": [
            *DATA,
            *DOCS,
            *HUGGINGFACE,
            *LOGGING,
            *("hypothesis>=6.100", "jsonschema>=4.18", "pytest>=8", "pytest-xdist>=3.7"),
            *("mypy>=1.13", "pre-commit>=3.5", "ruff>=0.9"),
            # Its layers, and its own readers, to hold our data files against.
            "megatron-core==0.16.1",
        ],
    },
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
)
