"""Presets: the published models, and flags that win over them."""

import pytest

from megatron_terapipe.arguments import parse_arguments
from megatron_terapipe.config import Config, ModelConfig, flops
from megatron_terapipe.config.presets import MODEL_PRESETS, Preset

REST = "--micro-batch-size 1 --train-iters 10 --lr 1e-3 --data-path corpus "


def parse(words: str) -> Config:
    return parse_arguments((REST + words).split())


@pytest.mark.parametrize(("name", "preset"), MODEL_PRESETS.items())
def test_parameters_are_those_published(name: str, preset: Preset) -> None:
    model = ModelConfig(**preset.settings)
    # GPT-3's small models are published with two digits.
    assert flops.model_parameters(model) == pytest.approx(preset.published_parameters, rel=0.02)
    assert parse(f"--model-preset {name}").model == model


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        *(("gpt2", 124_439_808), ("gpt2-xl", 1_557_611_200), ("llama-7b", 6_738_415_616)),
        *(("llama2-70b", 68_976_648_192), ("llama3-1b", 1_235_814_400), ("llama3-8b", 8_030_261_248)),
        *(("llama3-70b", 70_553_706_496), ("gpt-neox-20b", 20_554_567_680), ("pythia-70m", 70_426_624)),
        *(("pythia-1b", 1_011_781_632), ("pythia-12b", 11_846_072_320), ("mistral-7b", 7_241_732_096)),
        *(("qwen2.5-0.5b", 494_032_768), ("qwen2.5-7b", 7_615_616_512), ("qwen2.5-72b", 72_706_203_648)),
        *(("qwen3-0.6b", 596_049_920), ("qwen3-8b", 8_190_735_360), ("gemma2-2b", 2_614_341_888)),
        *(("gemma2-9b", 9_241_705_984), ("gemma2-27b", 27_227_128_320), ("olmo2-7b", 7_298_617_344)),
        *(("mixtral-8x7b", 46_702_792_704), ("mixtral-8x22b", 140_620_634_112), ("olmoe-1b-7b", 6_919_161_856)),
        *(("qwen3-30b-a3b", 30_532_122_624), ("qwen3-235b-a22b", 235_093_634_560)),
        *(("granite3.1-1b-a400m", 1_334_628_352), ("gpt-oss-20b", 20_914_757_184), ("gpt-oss-120b", 116_829_156_672)),
        # Without the biases that experts are chosen with.
        *(("deepseek-v3", 671_026_404_352), ("kimi-k2", 1_026_408_209_408)),
        *(("smollm3-3b", 3_075_098_624), ("gpt2-medium", 354_823_168), ("gpt2-large", 774_030_080)),
    ],
)
def test_parameters_are_those_of_the_released_weights(name: str, parameters: int) -> None:
    model = ModelConfig(**MODEL_PRESETS[name].settings, make_vocab_size_divisible_by=1)
    assert flops.model_parameters(model) == parameters


@pytest.mark.parametrize(
    ("name", "billions"), [("gpt3-1b", 1.209), ("gpt3-13b", 12.586), ("gpt3-44b", 43.494), ("gpt3-175b", 173.962)]
)
def test_layers_are_those_of_terapipes_table(name: str, billions: float) -> None:
    model = ModelConfig(**MODEL_PRESETS[name].settings)
    layers = sum(flops.block_parameters(model, block) for block in model.blocks)
    assert layers / 1e9 == pytest.approx(billions, abs=5e-4)
    assert model.seq_length == 2048


def test_a_run_from_a_preset_is_the_run_from_its_flags() -> None:
    words = "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --vocab-size 50257"
    assert parse("--model-preset gpt2") == parse(words)
