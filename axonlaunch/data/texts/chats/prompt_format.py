"""Writes the prompt of a row by a format, and encodes it with the completion that follows.

A format with ``{{`` or ``{%`` is in Jinja and runs in its sandbox; any other is plain text with
``{COLUMN}``. The text is tokenized without a chat template: a prompt, its completion and the end.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import chain
from string import Formatter
from typing import Any

import numpy as np

from axonlaunch.config.problems.errors import ConfigError, ConfigIssue
from axonlaunch.data.files.rows import BadRow, Row
from axonlaunch.data.files.tables import LARGEST_ROW
from axonlaunch.data.shards.encoding import Encoded
from axonlaunch.data.texts.chats.chat_encoder import join_documents
from axonlaunch.data.texts.chats.chat_rows import (
    fields_of,
    refuse_other_losses,
    refuse_surrogates,
    text_of,
)
from axonlaunch.data.texts.chats.chat_template import Written
from axonlaunch.data.texts.chats.computed_fields import (
    check_jinja,
    compile_fields,
    jinja,
    with_computed,
)
from axonlaunch.data.texts.chats.named_templates import (
    ignored_columns,
    is_jinja,
    prompt_format,
)
from axonlaunch.data.tokenizers.tokenizer import PretrainedTokenizer, Tokenizer

_FORMAT = "prompts 2"
"""Changed whenever prompts are encoded or refused differently; cached tokens are then invalid."""
_COMPLETIONS = ("completion", "output", "response", "answer")
"""Columns with the completion: the first that ``fields`` names, or that a row has."""
_PROMPT, _BLAMED = "the prompt format", "the prompt format, or the tokenizer,"


class PromptFormat:
    """Format that turns a row with any columns into a prompt and a completion.

    Attributes:
        text: Text of the format: Jinja, or plain text with ``{COLUMN}``.
    """

    def __init__(self, chosen: str, *, fields: Mapping[str, str]) -> None:
        """Read and compile the format.

        Args:
            chosen: Name of an included format, path of a file with one, or its text.
            fields: Maps each name in the format to the column that has its value.

        Raises:
            ConfigError: There is no such file, or the text does not compile.
        """
        self.text = prompt_format(chosen)
        self._fields = dict(fields)
        self._ignored = ignored_columns(chosen, fields)
        try:
            self._pieces = None if is_jinja(self.text) else _plain_pieces(self.text)
            if self._pieces is None:
                check_jinja(self.text)
        except ValueError as error:
            message = f"does not compile: {error}"
            raise ConfigError([ConfigIssue("data.prompt_format", message, chosen)]) from None
        compile_fields(fields)

    def columns(self, names: list[str]) -> list[str]:
        """Return the columns to read: all, because a format may use any."""
        return names

    def write(self, row: Row | str) -> tuple[str, str]:
        """Return the prompt and the completion of a row; only in a copy of this process.

        Raises:
            ValueError: The row lacks a column, or the format rejects it.
        """
        if isinstance(row, str):
            raise ValueError("is text; a row is an object with columns for the prompt format")
        refuse_other_losses(row, self._fields)
        row = with_computed(row, self._fields)
        for column in self._fields.values():
            if column not in row:
                raise ValueError(f"has no field {column}; it has {fields_of(row)}")
        prompt = self._prompt(row)
        if len(prompt) > LARGEST_ROW:
            raise ValueError(f"{_PROMPT} writes {len(prompt):,} characters for it")
        completion = text_of(row, self._completion(row))
        refuse_surrogates(prompt, _PROMPT)
        refuse_surrogates(completion, "its completion")
        return prompt, completion

    def _prompt(self, row: Row) -> str:
        values = {name: value for name, value in row.items() if name not in self._ignored}
        values |= {name: row[column] for name, column in self._fields.items()}
        values = {str(name): value for name, value in values.items() if value is not None}
        try:
            if self._pieces is None:
                return str(jinja(self.text).render(values))
            return "".join(
                literal if name is None else literal + _plain(values, name, row)
                for literal, name in self._pieces
            )
        except ValueError:
            raise
        except Exception as error:  # a format may raise any error
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise ValueError(f"{_PROMPT} rejects it: {reason}; it has {fields_of(row)}") from None

    def _completion(self, row: Row) -> str:
        named = (self._fields[name] for name in _COMPLETIONS if name in self._fields)
        column = next(chain(named, (name for name in _COMPLETIONS if name in row)), None)
        if column is None:
            raise ValueError(
                f"has no {', '.join(_COMPLETIONS[:-1])} or {_COMPLETIONS[-1]}; it has "
                f"{fields_of(row)}; data.fields={{completion: NAME}} sets another name"
            )
        return column


def _plain_pieces(text: str) -> list[tuple[str, str | None]]:
    """Return the text before each column, and the column's name.

    Raises:
        ValueError: A name has more than the column, or a brace is not closed.
    """
    pieces = []
    for literal, name, spec, conversion in Formatter().parse(text):
        if name is not None and (spec or conversion or not name or set(name) & set(".[]")):
            raise ValueError(
                f"{{{name}}} is not the name of a column; use Jinja for more than that"
            )
        pieces.append((literal, name))
    return pieces


def _plain(values: Mapping[str, Any], name: str, row: Row) -> str:
    if name not in values:
        raise ValueError(f"has no field {name}; it has {fields_of(row)}")
    if not isinstance(value := values[name], str | int | float):
        raise ValueError(f"{name} is {type(value).__name__}, not text")
    return str(value)


class PromptEncoder:
    """Encodes each row's prompt and completion as a document.

    Attributes:
        fingerprint: Hash of the tokenizer, the format and the choice of counted tokens.
        vocab_size: Vocabulary size of the tokenizer.
        masks: Whether only the completion's tokens count as targets.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        chosen: str,
        *,
        fields: Mapping[str, str],
        assistant_only: bool,
    ) -> None:
        """Compile the format.

        Args:
            tokenizer: Tokenizer of the text.
            chosen: Name, file or text of the format.
            fields: Names of columns by the names that the format has for them.
            assistant_only: Whether only the completion's tokens count as targets.

        Raises:
            ConfigError: The format can't be read or compiled, or the tokenizer is that of bytes.
        """
        if not isinstance(tokenizer, PretrainedTokenizer):
            message = "null selects bytes, which have no end of a text; use a folder that has one"
            raise ConfigError([ConfigIssue("tokenizer.path", f"{message}, or tokenizer=train")])
        self._format = PromptFormat(chosen, fields=fields)
        self._tokenizer = tokenizer
        text = json.dumps(
            [_FORMAT, tokenizer.fingerprint, self._format.text, {**fields}, assistant_only]
        )
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()
        self.vocab_size = tokenizer.vocab_size
        self.masks = assistant_only

    def columns(self, names: list[str]) -> list[str]:
        """Return the columns to read: all, because a format may use any."""
        return self._format.columns(names)

    def cancel(self) -> None:
        """End the call that another thread waits for."""
        self._tokenizer.cancel()

    def encode(self, rows: Sequence[Row | str]) -> Encoded:
        """Return a document for each row."""
        size = sum(len(str(row)) for row in rows)
        written = self._tokenizer.call_isolated(
            _write, self._format, list(rows), characters=size, what=_BLAMED
        )
        return join_documents(enumerate(written), masks=self.masks)


def _write(
    tokenizer: PretrainedTokenizer, chosen: PromptFormat, rows: list[Row | str]
) -> list[Written | BadRow]:
    return [_encode(tokenizer, chosen, row) for row in rows]


def _encode(
    tokenizer: PretrainedTokenizer, chosen: PromptFormat, row: Row | str
) -> Written | BadRow:
    """Return a row's tokens, of which the completion's and the end count."""
    try:
        prompt, completion = chosen.write(row)
    except ValueError as error:
        return BadRow(str(error))
    earlier_tokens, tokens = (
        tokenizer.transformers(text)["input_ids"] for text in (prompt, prompt + completion)
    )
    if tokenizer.end is not None and tokens[-1:] != [tokenizer.end]:
        tokens = [*tokens, tokenizer.end]
    # A token that holds the end of the prompt and the begin of the completion is of the completion.
    pairs = enumerate(zip(earlier_tokens, tokens, strict=False))
    start = next((number for number, (one, other) in pairs if one != other), len(earlier_tokens))
    counted = np.arange(len(tokens)) >= start
    if not counted[1:].any():
        return BadRow("no token counts: its completion is empty")
    return np.array(tokens, dtype=np.uint32), counted.astype(np.uint8)
