"""The last part of the output of a node, at positions from its beginning."""

from __future__ import annotations

from dataclasses import dataclass

KEPT_BYTES = 1 << 20


@dataclass(frozen=True)
class NodeOutput:
    """Most recent output of a node.

    Attributes:
        text: The last ``KEPT_BYTES`` bytes.
        start: Position of ``text`` in the whole output.
    """

    text: bytes = b""
    start: int = 0

    def with_text(self, added: bytes) -> NodeOutput:
        """Return the output with more text at its end."""
        text = self.text + added
        dropped = max(0, len(text) - KEPT_BYTES)
        return NodeOutput(text[dropped:], self.start + dropped)

    def read(self, position: int) -> tuple[int, bytes]:
        """Return the position of the end, and the text from a position as far as it is kept."""
        return self.start + len(self.text), self.text[max(0, position - self.start) :]
