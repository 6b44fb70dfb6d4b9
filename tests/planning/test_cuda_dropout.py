"""Memory of dropout and of attention without a fused kernel, in an estimate for a GPU.

The bytes that CUDA keeps were read in PyTorch's source: see ``cuda_dropout``. Nothing here has run
on a GPU.
"""

from __future__ import annotations

from support.configured import estimate_config

from axonlaunch.config.problems.errors import plain
from axonlaunch.planning.memory.estimate import estimate

LAYERS, HEADS, TOKENS, WIDTH = 2, 4, 256, 64
SCORES = LAYERS * HEADS * TOKENS**2


def activations(attention: str, **dropout: float) -> int:
    """Return the bytes of activations at the peak of a step of a small GPT-2 in bf16."""
    sizes = {"n_layer": LAYERS, "n_head": HEADS, "n_embd": WIDTH, "n_positions": TOKENS}
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **dropout}
    content = {"model_type": "gpt2", "vocab_size": 1024, **sizes, **rates}
    config = estimate_config(
        [
            *("model=hf", "model.init=random", f"model.config={plain(content)}"),
            *(f"model.attention={attention}", "data=synthetic_tokens", "train.precision=bf16"),
            *(f"data.sequence_length={TOKENS}", "train.global_batch_size=1", "strategy=single"),
            *("launch.nproc=1", "hardware=h100_80gb"),
        ]
    )
    [rank] = estimate(config).ranks
    return rank.breakdown["activations"]


def test_cuda_dropout_keeps_a_byte_per_value() -> None:
    # After attention and after the MLP of each layer.
    values = 2 * LAYERS * TOKENS * WIDTH
    assert activations("sdpa", resid_pdrop=0.1) - activations("sdpa") == values


def test_cuda_attention_kernel_keeps_no_dropout_mask() -> None:
    assert activations("sdpa", attn_pdrop=0.1) == activations("sdpa")


def test_eager_attention_keeps_scores_and_dropout_masks() -> None:
    eager = activations("eager")
    # Each score in bf16, in place of the kernel's fp32 number for each query.
    assert eager - activations("sdpa") == 2 * SCORES - 4 * LAYERS * HEADS * TOKENS
    # With dropout, also its mask and its result.
    assert activations("eager", attn_pdrop=0.1) - eager == (1 + 2) * SCORES
