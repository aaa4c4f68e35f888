"""Every number of the command line has bounds, and what is beyond them ends the run in one line."""

import pytest

from megatron_terapipe.arguments import Flag, flags
from megatron_terapipe.arguments.build import build_config
from megatron_terapipe.errors import ConfigError

SMALL = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 8, "micro_batch_size": 1}
GIVEN = SMALL | {"train_iters": 1, "lr": 1e-3, "mock_data": True}
NUMBERS = [each for each in flags() if each.kind in (int, float) and not each.choices]


@pytest.mark.parametrize("each", NUMBERS, ids=lambda each: each.name)
def test_a_number_beyond_all_sense_is_refused(each: Flag) -> None:
    for number in (10**30, 10**400) if each.kind is int else (1e300, float("inf"), float("nan")):
        with pytest.raises(ConfigError) as caught:
            build_config(GIVEN | {each.name: (number,) if each.repeated else number})
        line = str(caught.value)
        assert line.startswith(f"--{each.name.replace('_', '-')} ") and ": give " in line


def test_help_and_the_list_of_flags_state_the_bounds() -> None:
    texts = {each.name: each.help for each in NUMBERS}
    assert texts["num_layers"].endswith("Transformer layers. 1 to 10,000.")
    assert texts["lr"].endswith(" Above 0, up to 100.")
    assert texts["hidden_dropout"].endswith(" 0 or more, below 1.")
    assert all(each.option.bounds for each in NUMBERS)
