"""A conversation with a trained model, by the chat template of its tokenizer.

It holds what was said; a model without a template is refused.
"""

from __future__ import annotations

from typing import Any

from axonlaunch.config import ConfigError, ConfigIssue
from axonlaunch.data.chat_template import ChatTemplate
from axonlaunch.training.sampling import TrainedText


class Conversation:
    """What a user and a model say to each other.

    Attributes:
        messages: All of it, each with a role and content.
    """

    def __init__(
        self,
        trained: TrainedText,
        *,
        tokens: int,
        temperature: float = 0.8,
        top_k: int | None = None,
        seed: int = 0,
    ) -> None:
        """Begin.

        Args:
            trained: The model.
            tokens: Tokens of an answer at most.
            temperature: Divides the logits; 0 takes the likeliest token.
            top_k: Draw among so many likeliest tokens; None: among all.
            seed: Random seed, of each answer.

        Raises:
            ConfigError: The tokenizer has no chat template, or one that takes no questions.
        """
        self._trained = trained
        self._template = ChatTemplate(trained.tokenizer, marks_assistant=False)
        self._how: dict[str, Any] = {
            "max_new_tokens": tokens,
            "temperature": temperature,
            "top_k": top_k,
            "seed": seed,
        }
        self.messages: list[dict[str, str]] = []
        try:
            self._end = self._template.end_of_turn()
        except ValueError as error:
            raise ConfigError([ConfigIssue("", f"--chat: {error}")]) from None

    def answer(self, text: str) -> str:
        """Return what the model says to a message.

        Raises:
            ConfigError: The message is empty.
        """
        if not text:
            raise ConfigError([ConfigIssue("", "--prompt: it is empty; give at least one word")])
        self.messages.append({"role": "user", "content": text})
        try:
            prompt = self._template.prompt(self.messages)
        except ValueError as error:
            raise ConfigError([ConfigIssue("", f"--chat: {error}")]) from None
        tokens = self._trained.generate(prompt, is_over=self._is_over, **self._how)
        if tokens[-1] == self._trained.tokenizer.end:
            del tokens[-1]
        written = self._trained.tokenizer.decode(tokens, special=True)
        said = written.partition(self._end)[0] if self._end else written
        self.messages.append({"role": "assistant", "content": said.strip()})
        return said.strip()

    def _is_over(self, tokens: list[int]) -> bool:
        """Say whether the model has ended its turn, or the text."""
        tokenizer = self._trained.tokenizer
        if tokens[-1] == tokenizer.end:
            return True
        return bool(self._end) and self._end in tokenizer.decode(tokens, special=True)
