"""A conversation with a trained model, in the chat template of its tokenizer.

A tokenizer without a chat template is an error.
"""

from __future__ import annotations

from axonlaunch.config import ConfigError, ConfigIssue
from axonlaunch.data.texts.chats.chat_template import ChatTemplate
from axonlaunch.training.text.sampling import TrainedText
from axonlaunch.training.text.sampling_options import SamplingOptions


class Conversation:
    """A conversation between a user and a model.

    Attributes:
        messages: All messages so far, each with a role and content.
    """

    def __init__(
        self, trained: TrainedText, options: SamplingOptions, *, system: str | None = None
    ) -> None:
        """Begin a conversation.

        Args:
            trained: The trained model.
            options: Number of tokens of an answer, and how each is drawn. Every answer uses the
                same seed.
            system: System message before the first message; None has none.

        Raises:
            ConfigError: The tokenizer has no chat template, or its template accepts no user
                messages.
        """
        self._trained = trained
        self._template = ChatTemplate(trained.tokenizer, marks_assistant=False)
        self._options = options
        self.messages: list[dict[str, str]] = []
        if system is not None:
            self.messages.append({"role": "system", "content": system})
        try:
            self._end = self._template.end_of_turn()
        except ValueError as error:
            raise ConfigError([ConfigIssue("", f"--chat: {error}")]) from None

    def answer(self, text: str) -> str:
        """Return the model's answer to a message.

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
        tokens = self._trained.generate(prompt, self._options, is_over=self._is_over)
        if tokens[-1] == self._trained.tokenizer.end:
            del tokens[-1]
        text = self._trained.tokenizer.decode(tokens, special=True)
        answer = (text.partition(self._end)[0] if self._end else text).strip()
        self.messages.append({"role": "assistant", "content": answer})
        return answer

    def _is_over(self, tokens: list[int]) -> bool:
        """Return whether the model has ended its turn or the text."""
        tokenizer = self._trained.tokenizer
        if tokens[-1] == tokenizer.end:
            return True
        return bool(self._end) and self._end in tokenizer.decode(tokens, special=True)
