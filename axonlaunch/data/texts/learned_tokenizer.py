"""Learns a tokenizer from a run's text: byte-level BPE with a chat template.

It is learned once for given files, fields and vocabulary size, and cached next to the tokens; a run
keeps a copy. Invalid rows are skipped here and reported when they are tokenized.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from axonlaunch.config.options.documents import ChatConfig, DocumentsConfig, TextRowsConfig
from axonlaunch.config.options.tokenizer import TokenizerConfig
from axonlaunch.config.problems.errors import ConfigError, ConfigIssue
from axonlaunch.data.files.rows import BadRow, Columns, Row, RowReader, UnreadableFileError
from axonlaunch.data.files.sources import SourceFile
from axonlaunch.data.selection.file_selection import FileSelection
from axonlaunch.data.shards import cached_folder, token_cache
from axonlaunch.data.shards.encoding import OnProgress, Tokenizing
from axonlaunch.data.texts.chats.chat_rows import chat_columns, read_chat
from axonlaunch.data.texts.chats.named_templates import chat_template
from axonlaunch.data.texts.chats.prompt_format import PromptFormat
from axonlaunch.data.texts.documents import text_columns
from axonlaunch.data.tokenizers.changed_tokenizer import add_tokens, replace_template
from axonlaunch.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from axonlaunch.system.processes.isolated import Isolated

_FORMAT = 3
_LONGEST_S = 30 * 86400.0
_MAX_CHARACTERS = 1 << 28
"""Maximum number of characters that are learned from, taken from the beginning. More text takes
memory and hardly changes which pairs are most frequent.
"""
_END, _STARTS, _ENDS = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>tools\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}"
    "{% if message['reasoning_content'] %}"
    "{{ '<think>\n' + message['reasoning_content'] + '\n</think>\n' }}{% endif %}"
    "{{ message['content'] or '' }}"
    "{% if message['tool_calls'] %}{{ message['tool_calls'] | tojson }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML with marks around the assistant's text, and JSON for tools and tool calls."""


def load_or_learn(
    tokenizer: TokenizerConfig, data: TextRowsConfig, *, report: OnProgress
) -> Tokenizer:
    """Return the configured tokenizer, with the configured tokens and chat template.

    For ``tokenizer=train`` it is learned from the data.

    Raises:
        ConfigError: The tokenizer can't be read or learned, or its tokens or template can't be
            used.
    """
    is_learned = tokenizer.name == "train"
    loaded = _load_learned(tokenizer, data, report) if is_learned else load_tokenizer(tokenizer)
    loaded = add_tokens(loaded, tokenizer)
    chosen = data.chat_template if isinstance(data, ChatConfig) else None
    return loaded if chosen is None else replace_template(loaded, chat_template(chosen), chosen)


def _load_learned(
    tokenizer: TokenizerConfig, data: TextRowsConfig, report: OnProgress
) -> Tokenizer:
    """Return the tokenizer that is learned from the data, once.

    Raises:
        ConfigError: No tokenizer can be learned from the data.
    """
    if importlib.util.find_spec("transformers") is None:
        message = "needs transformers; pip install 'axonlaunch[hf]'"
        raise ConfigError([ConfigIssue("tokenizer.name", message, "train")])
    configs = [*(data.sources().values() or [data])]
    files = [
        (config, file) for config in configs for file in FileSelection.of_training(config).sources()
    ]
    named = [[*source.identity, *_fields(config)] for config, source in files]
    text = json.dumps([_FORMAT, "tokenizer", tokenizer.vocab_size, named])
    name = hashlib.sha256(text.encode()).hexdigest()[:32]
    complete = token_cache.folder_of(data.cache_dir) / f"tokenizer-{name}"
    try:
        _complete(complete, lambda folder: _learn(files, tokenizer.vocab_size, folder, report))
    except UnreadableFileError as error:
        raise ConfigError([ConfigIssue("data.files", str(error))]) from None
    except OSError as error:
        folder = error.filename or complete.parent
        message = f"{folder} can't be used: {error.strerror or error}; choose another folder"
        raise ConfigError([ConfigIssue("data.cache_dir", message, data.cache_dir)]) from None
    return load_tokenizer(TokenizerConfig(path=str(complete)))


def _complete(complete: Path, write: Callable[[Path], None]) -> None:
    """Write a folder under its final name, by only one of several processes.

    A folder that was changed after it was written is written again.

    Raises:
        OSError: The path is a link, or the folder can't be written.
    """
    partial = complete.with_name(f"{complete.name}.partial")
    while not _is_unchanged(complete):
        with cached_folder.writer_lock(partial, waits=lambda: None) as is_current:
            if is_current and not _is_unchanged(complete):
                if complete.exists():
                    change = cached_folder.find_change(complete)
                    sys.stderr.write(f"data: {complete}: {change}; it is learned again\n")
                    cached_folder.remove(complete)
                write(partial)
                cached_folder.publish(partial, complete)


def _is_unchanged(complete: Path) -> bool:
    cached_folder.refuse_link(complete)
    return complete.is_dir() and cached_folder.find_change(complete) is None


def _learn(
    files: list[tuple[TextRowsConfig, SourceFile]],
    vocab_size: int,
    folder: Path,
    report: OnProgress,
) -> None:
    """Learn a tokenizer and save it as ``save_pretrained`` does, in a copy of this process.

    The library starts its threads in the copy. They would be missing in later copies of this
    process.
    """
    for config, file in files[:1]:
        del config
        report(Tokenizing(file.name, 0.0, learns=True))
    copy = Isolated(files, is_bounded=False)
    try:
        copy.call(_learn_here, vocab_size, folder, seconds=_LONGEST_S)
    finally:
        copy.end()


def _learn_here(
    files: list[tuple[TextRowsConfig, SourceFile]], vocab_size: int, folder: Path
) -> None:
    library: Any = importlib.import_module("tokenizers")
    transformers: Any = importlib.import_module("transformers")
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_END, _STARTS, _ENDS],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(files), trainer)
    learned = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_END)
    learned.chat_template = _CHAT_TEMPLATE
    learned.save_pretrained(folder)


def _texts(files: list[tuple[TextRowsConfig, SourceFile]]) -> Iterator[str]:
    """Yield the texts of rows, up to the limit of characters."""
    left = _MAX_CHARACTERS
    for config, file in files:
        for _, row in RowReader(file, columns=_columns(config)):
            for text in _texts_of(row, config):
                if left <= 0:
                    return
                yield text[:left]
                left -= len(text)


def _texts_of(row: Row | str | BadRow, config: TextRowsConfig) -> Iterator[str]:
    """Yield the texts of a row; none for an invalid row."""
    if isinstance(row, BadRow):
        return
    texts: Sequence[Any]
    if isinstance(config, ChatConfig):
        try:
            texts = _chat_texts(row, config)
        except ValueError:
            return
    else:
        assert isinstance(config, DocumentsConfig)
        texts = [row if isinstance(row, str) else row.get(config.text_field)]
    for text in texts:
        if isinstance(text, str):
            yield text.encode(errors="replace").decode()  # an unpaired surrogate can't be encoded


def _chat_texts(row: Row | str, config: ChatConfig) -> Sequence[Any]:
    """Return the texts in a row of a chat.

    Raises:
        ValueError: The row is not a chat.
    """
    if config.prompt_format is not None:
        return PromptFormat(config.prompt_format, fields=config.fields).write(row)
    chat = read_chat(row, fields=config.fields)
    return [message.get("content") for message in chat.messages]


def _columns(config: TextRowsConfig) -> Columns:
    if isinstance(config, ChatConfig):
        if config.prompt_format is not None:
            return list
        return partial(chat_columns, fields=config.fields)
    assert isinstance(config, DocumentsConfig)
    return partial(text_columns, field=config.text_field)


def _fields(config: TextRowsConfig) -> tuple[object, ...]:
    if isinstance(config, ChatConfig):
        return config.name, config.fields, config.prompt_format
    assert isinstance(config, DocumentsConfig)
    return config.name, config.text_field
