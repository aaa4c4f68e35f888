"""Patterns over layers as Megatron writes them, and the layers of a model that follow from them."""

import pytest

from megatron_terapipe.config.layers import layers_of_pattern, window_of_megatron
from megatron_terapipe.errors import ConfigError
from tests.model.configs import model_config


@pytest.mark.parametrize(
    ("pattern", "named"),
    [
        ("1", "1111"),
        ("2", "0101"),
        ("4", "0001"),
        ("5", "0000"),
        ("[0,1,1,0]", "0110"),
        ("[1]*4", "1111"),
        ("2*[0,1]", "0101"),
        (" ([0]*3+[1])*1 ", "0001"),
        ("[1]+[0]*2+[1]", "1001"),
    ],
)
def test_a_number_names_every_nth_layer_and_a_list_each(pattern: str, named: str) -> None:
    assert layers_of_pattern(pattern, 4, "--no-rope-freq") == tuple(each == "1" for each in named)


@pytest.mark.parametrize(
    "pattern",
    ["0", "-1", "x", "[2]*4", "[[1]]*4", "", "1+1", "[1]*-1", "[1]**4", "True", "[1]*10**9", "f()", "[1.0]*4"],
)
def test_what_is_no_pattern_is_told_in_one_line(pattern: str) -> None:
    with pytest.raises(ConfigError) as caught:
        layers_of_pattern(pattern, 4, "--no-rope-freq")
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"--no-rope-freq {pattern} ")


def test_a_list_of_another_length() -> None:
    with pytest.raises(ConfigError, match=r"^--no-rope-freq \[1\]\*5 lists 5 layers, but --num-layers is 4: list each"):
        layers_of_pattern("[1]*5", 4, "--no-rope-freq")


def test_megatrons_window_does_not_count_the_token_itself() -> None:
    assert [window_of_megatron(text) for text in ("128,0", "(127, 0)")] == [129, 128]
    for text in ("128", "128,1", "-1,0", "0,128", "a,b"):
        with pytest.raises(ValueError, match="is not N,0"):
            window_of_megatron(text)


def test_layers_without_a_window_are_a_number_or_the_zeros_of_a_list() -> None:
    def windows(skipped: str | None) -> list[int | None]:
        model = model_config(num_layers=4, sliding_window=8, window_attn_skip_freq=skipped)
        return [block.window for block in model.blocks]

    assert windows(None) == [8, 8, 8, 8]
    assert windows("2") == [8, None, 8, None]
    assert windows("[1,0,0,1]") == [8, None, None, 8]


def test_every_nth_layer_does_not_turn() -> None:
    model = model_config(num_layers=4, position_embedding_type="rope", no_rope_freq="4")
    assert [block.rotated for block in model.blocks] == [True, True, True, False]
