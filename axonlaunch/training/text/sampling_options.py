"""The numbers that decide which tokens are generated."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Number of new tokens, and how each is drawn.

    Attributes:
        tokens: Maximum number of new tokens.
        temperature: Divisor of the logits; 0, or a value close to 0, always selects the most likely
            token.
        top_k: Number of most likely tokens to sample from; None samples from all tokens.
        top_p: Sample from the fewest most likely tokens that together have this probability
            (nucleus sampling, https://arxiv.org/abs/1904.09751); None samples from all tokens.
        seed: Random seed.

    Raises:
        ValueError: A number is out of range.
    """

    tokens: int
    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:  # also refuses NaN
            raise ValueError(f"temperature={self.temperature}: must be 0 or more; 0 is greedy")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k}: must be at least 1, or None for all tokens")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: must be above 0 and at most 1")
