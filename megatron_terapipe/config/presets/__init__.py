"""Published models by name: what `--model-preset` stands for.

A preset says what the model is, and how long the sequences are that it was published with; nothing of the training.
Dropout is not part of it. Sources:

    TeraPipe   Li et al., arXiv 2102.07988 table 1; its blocks alone are timed there, here they get GPT-3's ends
    GPT-2      Radford et al., Language Models are Unsupervised Multitask Learners, table 2; sizes as released
    GPT-3      Brown et al., arXiv 2005.14165 table 2.1
    Llama      Touvron et al., arXiv 2302.13971 table 2
    Llama 2    Touvron et al., arXiv 2307.09288 table 1 and appendix A.2
    Llama 3    Grattafiori et al., arXiv 2407.21783 table 3; sizes below 8 B as released with Llama 3.2
    GPT-NeoX   Black et al., arXiv 2204.06745
    Pythia     Biderman et al., arXiv 2304.01373 table 1
    Mistral    Jiang et al., arXiv 2310.06825 table 1
    Qwen2.5    Qwen team, arXiv 2412.15115 table 1
    Qwen3      Qwen team, arXiv 2505.09388 table 1
    Gemma 2    Gemma team, arXiv 2408.00118 table 1
    OLMo 2     OLMo team, arXiv 2501.00656 table 1
    SmolLM3    Hugging Face, SmolLM3: smol, multilingual, long-context reasoner (2025)

What a paper leaves out, such as epsilons and rows of the vocabulary, is as in `config.json` of the released weights.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType

from megatron_terapipe.config.presets.gemma import GEMMAS
from megatron_terapipe.config.presets.gpt import GPTS
from megatron_terapipe.config.presets.llama import LLAMAS
from megatron_terapipe.config.presets.preset import Preset
from megatron_terapipe.errors import ConfigError

__all__ = ["MODEL_PRESETS", "Preset", "find_preset"]

MODEL_PRESETS: Mapping[str, Preset] = MappingProxyType({**GPTS, **LLAMAS, **GEMMAS})
"""Every preset by its name."""


def find_preset(name: str) -> Preset:
    """Return a preset by its name.

    Raises:
        ConfigError: if there is none of that name.
    """
    if name in MODEL_PRESETS:
        return MODEL_PRESETS[name]
    nearest = get_close_matches(name, MODEL_PRESETS, n=1)
    remedy = f"did you mean {nearest[0]}?" if nearest else f"choose among {', '.join(MODEL_PRESETS)}"
    raise ConfigError(f"--model-preset {name} is not known: {remedy}")
