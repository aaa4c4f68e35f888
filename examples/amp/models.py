"""AMP's two models as rows of DeepSpeed pipeline layers, with the shapes that its sources give them.

Sources, in github.com/DachengLi1/AMP, DeepSpeed/DeepSpeedExamples/Megatron-LM-v1.1.5-3D_parallelism:
GPT-2 megatron/model/gpt2_model.py (GPT2ModelPipe) with the sizes of examples/ds_pretrain_gpt2_pipe.sh and
src/homogeneous.py; TransGAN's generator megatron/model/trans_gan_gen.py with examples/ds_pretrain_transgan_pipe.sh.
"""

from itertools import chain

from megatron_terapipe.search.price.workload import Attention, Layer, Product, Workload

SEQ_LENGTH = 1024
HIDDEN_SIZE = 1024
NUM_BLOCKS = 24
VOCAB_SIZE = 50304
"""Of the GPT-2 tokenizer (50257), padded to a multiple of 128 by Megatron."""

WORD_EMBEDDING = "word embedding"
MASK_LAYERS = 26
"""Layers 0 to 25 hand on the attention mask of [1, 1, sequence, sequence] with each micro-batch (gpt2_model.py)."""

TRANSGAN_MASK = 100 * 100
"""Entries of the mask that replaces it (trans_gan_gen.py)."""

TRANSGAN_HEADS = 4
BLOCKS_1 = range(3, 15)
"""Transformer blocks of 81 tokens of 1024 numbers: one window of 9 x 9."""

BLOCKS_6 = range(41, 53)
"""Transformer blocks of 288 x 288 tokens of 16 numbers: 256 windows of 18 x 18."""

TRANSGAN_STEPS = (
    # first layer, last layer, tokens and width of the output, parameters of the last one
    ("linear", 0, 0, 1, 82944, 512 * 82944 + 82944),
    ("positions 1", 1, 2, 81, 1024, 81 * 1024),
    ("upsample 1", 15, 15, 81, 1024, 0),
    ("positions 2", 16, 17, 324, 1024, 324 * 1024),
    ("noop", 18, 18, 324, 1024, 0),
    ("positions 3", 19, 20, 1296, 1024, 1296 * 1024),
    ("positions 4", 21, 22, 5184, 256, 5184 * 256),
    ("windows 4", 23, 28, 5184, 256, 0),
    ("positions 5", 29, 30, 20736, 64, 20736 * 64),
    ("windows 5", 31, 35, 20736, 64, 0),
    ("positions 6", 36, 37, 82944, 16, 82944 * 16),
    ("windows 6", 38, 40, 82944, 16, 0),
    ("image", 53, 54, 82944, 16, 0),
    ("convolution", 55, 55, 82944, 3, 16 * 3 + 3),
)


def gpt2() -> Workload:
    """GPT-2 with 24 layers as 30 pipeline layers; a stage partition counts all of them."""
    words = VOCAB_SIZE * HIDDEN_SIZE
    positions = SEQ_LENGTH * HIDDEN_SIZE
    shared = {"shared_weight": WORD_EMBEDDING, "shared_parameters": words}

    def layer(index: int, name: str, kind: str, parameters: int = 0, **more: object) -> Layer:
        mask = SEQ_LENGTH * SEQ_LENGTH if index < MASK_LAYERS else 0
        values = {"hidden_size": HIDDEN_SIZE, "extra_output_elements": mask, **more}
        return Layer(name=f"{index} {name}", kind=kind, tokens=SEQ_LENGTH, parameters=parameters, **values)  # type: ignore[arg-type]

    norm = 2 * HIDDEN_SIZE
    blocks = [
        layer(
            index,
            "block",
            "block",
            12 * HIDDEN_SIZE**2 + 13 * HIDDEN_SIZE,
            # Two norms and the biases after the two reductions.
            unshared_parameters=2 * norm + 2 * HIDDEN_SIZE,
            products=(
                Product(HIDDEN_SIZE, 3 * HIDDEN_SIZE, "column"),
                Product(HIDDEN_SIZE, HIDDEN_SIZE, "row"),
                Product(HIDDEN_SIZE, 4 * HIDDEN_SIZE, "column"),
                Product(4 * HIDDEN_SIZE, HIDDEN_SIZE, "row"),
            ),
            attention=Attention(16, 16, HIDDEN_SIZE // 16),
            num_norms=2,
            activation_width=4 * HIDDEN_SIZE,
        )
        for index in range(2, 2 + NUM_BLOCKS)
    ]
    logits = Product(HIDDEN_SIZE, VOCAB_SIZE, "column")
    layers = (
        layer(0, "embedding", "embedding", words + positions, unshared_parameters=positions, **shared),
        layer(1, "transpose", "other"),
        *blocks,
        layer(26, "transpose", "other"),
        layer(27, "norm", "norm", norm, unshared_parameters=norm, num_norms=1),
        layer(28, "head", "head", words, products=(logits,), **shared),
        layer(29, "cast", "other"),
    )
    return Workload(name="AMP GPT-2", layers=layers, seq_length=SEQ_LENGTH, first_dealt=0, end_dealt=len(layers))


def transgan() -> Workload:
    """The generator of TransGAN as 56 pipeline layers; a stage partition counts all of them."""
    layers = {}
    for name, first, last, tokens, width, parameters in TRANSGAN_STEPS:
        for index in range(first, last + 1):
            count = parameters if index == last else 0
            products = (Product(512, width),) if name == "linear" else ()
            layers[index] = Layer(
                name=f"{index} {name}",
                kind="other",
                tokens=tokens,
                hidden_size=width,
                parameters=count,
                unshared_parameters=count,
                products=products,
                extra_output_elements=TRANSGAN_MASK,
            )
    for index in chain(BLOCKS_1, BLOCKS_6):
        first = index in BLOCKS_1
        layers[index] = _transgan_block(index, 81, 1024, 9) if first else _transgan_block(index, 82944, 16, 18)
    rows = tuple(layers[index] for index in range(len(layers)))
    return Workload(name="AMP TransGAN", layers=rows, seq_length=1, first_dealt=0, end_dealt=len(rows))


def _transgan_block(index: int, tokens: int, width: int, window: int) -> Layer:
    """A block with windows of `window` x `window` tokens.

    Each tensor-parallel rank computes the scores of all heads, from its part of their width: only the matrices are
    divided, which take little of the time where the width is small. There the whole block counts as not divided.
    """
    parallel = ("column", "row") if width >= 1024 else ("none", "none")
    positions = (2 * window - 1) ** 2 * TRANSGAN_HEADS + 1
    return Layer(
        name=f"{index} block of {tokens} tokens",
        kind="block",
        tokens=tokens,
        hidden_size=width,
        parameters=12 * width**2 + positions,
        unshared_parameters=positions,
        products=(
            Product(width, 3 * width, parallel[0]),  # type: ignore[arg-type]
            Product(width, width, parallel[1]),  # type: ignore[arg-type]
            Product(width, 4 * width, parallel[0]),  # type: ignore[arg-type]
            Product(4 * width, width, parallel[1]),  # type: ignore[arg-type]
        ),
        attention=Attention(
            TRANSGAN_HEADS, TRANSGAN_HEADS, width // TRANSGAN_HEADS, causal=False, separate_window=window**2
        ),
        num_norms=2,
        activation_width=4 * width,
        extra_output_elements=TRANSGAN_MASK,
    )
