"""Weights into a model with all its layers; generation on cached keys and values, against reading all again."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.state.sequence_state import SequenceState
from megatron_terapipe.errors import CheckpointError
from megatron_terapipe.inference import WholeModel, generate
from tests.inference.checkpoints import MODEL, write_checkpoint
from tests.model.configs import HYBRID, OF_FAMILIES, model_config

DAMAGE: dict[str, Callable[[Path], object]] = {
    "removed": Path.unlink,
    "emptied": lambda path: path.write_bytes(b""),
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:200]),
    "scribbled": lambda path: path.write_bytes(b"this was never a layer\n" * 20),
    "of another layer": lambda path: torch.save({"weight": torch.zeros(3)}, path),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_layer_is_named(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    directory = write_checkpoint(tmp_path)
    path = directory / "layer_03-model_00-model_states.pt"
    damage(path)
    with pytest.raises(CheckpointError, match=f"cannot load layer 3 from {path} .*: save it again") as caught:
        WholeModel(MODEL).load(directory)
    assert "\n" not in str(caught.value)


PROMPT = list(b"the quick brown")
LIMITS = {"max_positions": MODEL.max_position_embeddings, "vocab_size": 257}


@pytest.fixture(scope="module")
def model() -> Iterator[WholeModel]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for thousands of tiny products, threads only wait for each other
    yield WholeModel(MODEL).double()
    torch.set_num_threads(threads)


@torch.no_grad()
def logits_after(model: WholeModel, text: list[int]) -> torch.Tensor:
    """Logits of the next token, over the tokenizer's vocabulary, from the whole text in one piece."""
    return model(torch.tensor([text]), SequenceState(TokenSlices((len(text),))))[0, -1, :257]


def read_again_for_every_token(model: WholeModel, prompt: list[int], count: int) -> list[int]:
    text = list(prompt)
    for _ in range(count):
        text.append(int(logits_after(model, text).argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:1]], ids=["text", "one_token"])
def test_greedy_equals_reading_the_whole_text_again(model: WholeModel, prompt: list[int]) -> None:
    count = MODEL.max_position_embeddings - len(prompt)
    found = list(generate(model, prompt, count, temperature=0, **LIMITS))
    assert found == read_again_for_every_token(model, prompt, count)
    assert len(set(found)) > 5  # a model that repeats itself would hide a wrong position or a stale key


def test_it_stops_before_the_end_of_the_document(model: WholeModel) -> None:
    whole = list(generate(model, PROMPT, 20, temperature=0, **LIMITS))
    eod = whole[7]
    assert list(generate(model, PROMPT, 20, temperature=0, eod=eod, **LIMITS)) == whole[: whole.index(eod)]


def test_seeds_and_top_1(model: WholeModel) -> None:
    first, again, other = (list(generate(model, PROMPT, 20, seed=seed, **LIMITS)) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    greedy = list(generate(model, PROMPT, 20, temperature=0, **LIMITS))
    assert list(generate(model, PROMPT, 20, top_k=1, **LIMITS)) == greedy


def test_top_k_draws_from_the_k_likeliest(model: WholeModel) -> None:
    likeliest = logits_after(model, PROMPT).topk(3).indices.tolist()
    drawn = {next(generate(model, PROMPT, 1, top_k=3, temperature=2.0, seed=seed, **LIMITS)) for seed in range(30)}
    assert drawn == set(likeliest)


@pytest.mark.parametrize("top_p", [0.05, 0.3, 0.9])
def test_top_p_draws_from_the_fewest_that_add_up_to_it(model: WholeModel, top_p: float) -> None:
    chances = (logits_after(model, PROMPT) / 2.0).softmax(-1)
    descending = chances.sort(descending=True)
    nucleus = set(descending.indices[: int((descending.values.cumsum(-1) < top_p).sum()) + 1].tolist())
    options = {"top_p": top_p, "temperature": 2.0}
    drawn = {next(generate(model, PROMPT, 1, seed=seed, **options, **LIMITS)) for seed in range(60)}
    assert drawn <= nucleus
    assert len(drawn) >= min(len(nucleus), 3)


@pytest.mark.parametrize("family", [*OF_FAMILIES, "hybrid"])
def test_families_equal_reading_the_whole_text_again(family: str) -> None:
    """Rotations and windows follow the position, that of the token slice of one token; states are carried."""
    given = {"max_position_embeddings": MODEL.max_position_embeddings, "init_method_std": 0.5}
    given["untie_embeddings_and_output_weights"] = True
    model = WholeModel(model_config(**{**OF_FAMILIES, "hybrid": HYBRID}[family] | given)).double()
    found = list(generate(model, PROMPT, 20, temperature=0, **LIMITS))
    assert found == read_again_for_every_token(model, PROMPT, 20)
    assert len(set(found)) > 5


def test_temperature_divides_the_logits(model: WholeModel) -> None:
    """Counted over many draws: the likeliest token has the share of the softmax, at either temperature."""
    logits = logits_after(model, PROMPT)
    for temperature in (0.5, 2.0):
        chance = (logits / temperature).softmax(-1).max().item()
        tokens = [next(generate(model, PROMPT, 1, temperature=temperature, seed=seed, **LIMITS)) for seed in range(100)]
        share = tokens.count(int(logits.argmax())) / len(tokens)
        assert share == pytest.approx(chance, abs=4 * (chance * (1 - chance) / len(tokens)) ** 0.5)


def test_the_padding_of_the_vocabulary_is_never_drawn(model: WholeModel) -> None:
    padded = MODEL.padded_vocab_size()
    drawn = {next(generate(model, PROMPT, 1, temperature=100.0, seed=seed, **LIMITS)) for seed in range(60)}
    assert max(drawn) < 257 < padded
    assert len(drawn) > 40
