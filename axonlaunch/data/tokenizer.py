"""What turns text into tokens and back: bytes, or a tokenizer's files.

The files are read by transformers and ``tokenizers``; none is fetched from a network.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import importlib
import importlib.util
import json
import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from axonlaunch.config.data import NUM_BYTES
from axonlaunch.config.errors import ConfigError, ConfigIssue
from axonlaunch.config.model import HuggingFaceConfig
from axonlaunch.config.schema import RunConfig
from axonlaunch.config.tokenizer import TokenizerConfig
from axonlaunch.data.text import decode, encode
from axonlaunch.system.files import (
    LARGEST_MODEL_FILE,
    FileCopy,
    NotRegularError,
    TooLargeError,
    inside_folder,
    open_regular,
    read_copy,
    read_text,
    why_not_read,
    write_copy,
)
from axonlaunch.system.isolated import Isolated, IsolatedCallError
from axonlaunch.system.run_files import TOKENIZER

_Tokens = npt.NDArray[np.uint32]
_Result = TypeVar("_Result")

FOLDER = TOKENIZER
_LEAST_SECONDS, _CHARACTERS_PER_S = 60.0, 20_000
"""Deadline of a call: tokenizers do a million characters a second, those in Python a tenth."""
_BLAMED = "the tokenizer"
_FILE = "tokenizer.json"
_CONFIG_FILE, _TEMPLATE = "tokenizer_config.json", "chat_template"
_FILES = (
    *("tokenizer*.json", "*.model", "*.tiktoken", "vocab.*", "merges.txt", "added_tokens.json"),
    *("special_tokens_map.json", "chat_template.*"),
)
"""What of a model's folder is its tokenizer's."""
_TEMPLATES = "additional_chat_templates"
_ALSO_READ = (*("*.json", "*.txt", "*.jinja", "*.codes", "*.spm", "*.tokenizer"), f"{_TEMPLATES}/*")
"""Other files that transformers may open to read a tokenizer."""
_NOT_READ = "*.index.json"
_MODEL_FILE = "config.json"
_MODEL_KEYS = ("model_type", "tokenizer_class", "model_name")
"""What transformers chooses the class of a tokenizer by, beside the tokenizer's own files."""


class Tokenizer(Protocol):
    """Turns text into tokens and back.

    Attributes:
        vocab_size: One more than the largest token.
        fingerprint: Of all that decides what tokens a text has.
        end: The token that ends a document; None: there is none.
    """

    vocab_size: int
    fingerprint: str
    end: int | None

    def documents(self, texts: Sequence[str]) -> list[_Tokens]:
        """Turn each text into the tokens of a document: what it begins with, and its end."""

    def encode(self, text: str) -> list[int]:
        """Turn a text that is to be continued into tokens."""

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Turn tokens into text; special ones have none, unless that is asked for."""

    def keep(self, folder: Path) -> list[str]:
        """Copy the files into a folder; return their names, [] where there are none."""

    def cancel(self) -> None:
        """End the call that another thread waits for."""


class ByteTokenizer:
    """A token a byte of UTF-8; documents have no end of their own."""

    vocab_size = NUM_BYTES
    fingerprint = "bytes"
    end: int | None = None

    def documents(self, texts: Sequence[str]) -> list[_Tokens]:
        """Turn each text into its bytes."""
        contents = (text.encode(errors="surrogateescape") for text in texts)
        return [np.frombuffer(content, np.uint8).astype(np.uint32) for content in contents]

    def encode(self, text: str) -> list[int]:
        """Turn text into bytes."""
        return encode(text)

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Turn bytes into text; what is no UTF-8 becomes the replacement character."""
        del special  # there are none
        return decode([token for token in tokens if token < NUM_BYTES])

    def keep(self, folder: Path) -> list[str]:
        """There are no files."""
        del folder
        return []

    def cancel(self) -> None:
        """Bytes take no time."""


class PretrainedTokenizer:
    """The tokenizer of a folder, as transformers reads it.

    Attributes:
        transformers: What transformers makes of it: chat templates are its.
        model: What the configuration beside it says of its model, by which its class was chosen.
        template_fingerprint: Of the chat template, which decides nothing of a text's tokens.
    """

    def __init__(
        self, files: Mapping[str, FileCopy], loaded: Any, model: Mapping[str, str]
    ) -> None:
        """Take over a tokenizer, its model, and the files that it was read from, by name."""
        self.transformers, self.model = loaded, dict(model)
        self._files = dict(sorted(files.items()))
        self.vocab_size = max(len(loaded), 1 + max(loaded.get_vocab().values(), default=0))
        self.end: int | None = loaded.eos_token_id
        digest = hashlib.sha256()
        for name, file in self._files.items():
            if not name.startswith(_TEMPLATE):
                digest.update(name.encode() + b"\0" + _without_template(name, file.content))
        self.fingerprint = digest.hexdigest()
        template = json.dumps(getattr(loaded, "chat_template", None), sort_keys=True)
        self.template_fingerprint = hashlib.sha256(template.encode()).hexdigest()
        fast: Any = getattr(loaded, "backend_tokenizer", None)
        if fast is not None:  # a file may say otherwise, and no document is cut unasked
            fast.no_truncation()
            fast.no_padding()
        self._copy = Isolated(self)

    def call_isolated(
        self, function: Callable[..., _Result], *args: Any, characters: int, what: str
    ) -> _Result:
        """Return ``function(self, *args)``, called in a copy of this process with a deadline.

        Args:
            function: One of a module.
            args: Its further arguments.
            characters: Of the text that it works on.
            what: What may be to blame, for the message.

        Raises:
            IsolatedCallError: It took too long, too much memory, or ended its process.
        """
        seconds = _LEAST_SECONDS + characters / _CHARACTERS_PER_S
        try:
            return self._copy.call(function, *args, seconds=seconds)
        except IsolatedCallError as error:
            raise IsolatedCallError(f"{what} {error}") from None

    def cancel(self) -> None:
        """End the call that another thread waits for."""
        self._copy.end()

    def documents(self, texts: Sequence[str]) -> list[_Tokens]:
        """Turn each text into what the tokenizer makes of it, and its end where that is missing."""
        size = sum(map(len, texts))
        return self.call_isolated(_documents, list(texts), characters=size, what=_BLAMED)

    def encode(self, text: str) -> list[int]:
        """Turn text into tokens, without the end that some tokenizers add."""
        tokens = self.call_isolated(_encode, text, characters=len(text), what=_BLAMED)
        return tokens[:-1] if len(tokens) > 1 and tokens[-1] == self.end else tokens

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Turn tokens into text, without those that a padded head made up."""
        known = [token for token in tokens if token < self.vocab_size]
        return self.call_isolated(_decode, known, special, characters=len(known), what=_BLAMED)

    def keep(self, folder: Path) -> list[str]:
        """Copy the files into a folder, and what its class was chosen by."""
        folder.mkdir(parents=True, exist_ok=True)
        files = _with_model(self._files, self.model)
        for name, file in files.items():
            write_copy(folder / name, file)
        return [*files]


def _documents(tokenizer: PretrainedTokenizer, texts: list[str]) -> list[_Tokens]:
    fast, end = getattr(tokenizer.transformers, "backend_tokenizer", None), tokenizer.end
    if fast is not None:
        rows = [encoding.ids for encoding in fast.encode_batch_fast(texts)]
    else:
        rows = tokenizer.transformers(texts)["input_ids"] if texts else []
    whole = [row if end is None or row[-1:] == [end] else [*row, end] for row in rows]
    return [np.array(row, dtype=np.uint32) for row in whole]


def _encode(tokenizer: PretrainedTokenizer, text: str) -> list[int]:
    tokens: list[int] = tokenizer.transformers(text)["input_ids"]
    return tokens


def _decode(tokenizer: PretrainedTokenizer, tokens: list[int], special: bool) -> str:
    text: str = tokenizer.transformers.decode(tokens, skip_special_tokens=not special)
    return text


def _without_template(name: str, content: bytes) -> bytes:
    """Return a tokenizer's file without the chat template that it may hold."""
    with suppress(ValueError, RecursionError):
        about = json.loads(content) if name == _CONFIG_FILE else None
        if isinstance(about, dict):
            return json.dumps({**about, _TEMPLATE: None}, sort_keys=True).encode()
    return content


def token_texts(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """Return what each token adds to the text; a character has all its bytes with the last one."""
    texts, before = [], ""
    for end in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:end], special=True)
        if text.endswith("\ufffd") and end < len(tokens):
            texts.append("")
        else:
            texts.append(text[len(before) :])
            before = text
    return texts


def tokenizer_of(config: RunConfig) -> TokenizerConfig:
    """Return the tokenizer of a run, by its path: that of a model of transformers by default."""
    own = config.tokenizer
    if own.name != "auto" or own.path or not isinstance(config.model, HuggingFaceConfig):
        return own
    return replace(own, path=config.model.path)


def load_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Return what a configuration names; bytes where it names nothing.

    Raises:
        ConfigError: There is no such tokenizer, or it can't be read.
    """
    return ByteTokenizer() if config.path is None else _load(config.path, _stamp(config.path))


def load_kept(run_dir: Path) -> PretrainedTokenizer | None:
    """Return the tokenizer that a run has kept in its folder, or was exported; None: it has none.

    Raises:
        ConfigError: It can't be read.
    """
    folder = run_dir / FOLDER
    return read_foreign(folder, model=model_of_folder(folder))


def foreign_files(folder: Path, *, key: str = "", path: str | None = None) -> dict[str, FileCopy]:
    """Return a tokenizer's files in a folder that others may have prepared, by name.

    Args:
        folder: The folder.
        key: Key of the configuration that named it; empty for none.
        path: The key's value.

    Raises:
        ConfigError: One is no regular file, leads out of the folder, or is too large.
    """
    contents = {}
    for file in tokenizer_files(folder):
        with _refusing(file, key, path):
            contents[file.name] = read_copy(inside_folder(file), at_most=LARGEST_MODEL_FILE)
    return contents


@contextmanager
def _refusing(file: Path, key: str, path: str | None) -> Iterator[None]:
    """Raise ConfigError for a file that cannot be read."""
    try:
        yield
    except OSError as error:
        message = f"{file}: can't be read: {why_not_read(file, error)}"
        raise ConfigError([ConfigIssue(key, message, ... if path is None else path)]) from None


def _refuse_links_outside(folder: Path, path: str) -> None:
    """Refuse a folder in which transformers would read something else than its regular files.

    Raises:
        ConfigError: One is no regular file, leads out of the folder, or is too large.
    """
    for pattern in _ALSO_READ:
        for file in sorted(folder.glob(pattern)):
            if file.match(_NOT_READ) or file.is_dir():
                continue
            with _refusing(file, "tokenizer.path", path):
                depth = len(file.relative_to(folder).parts) - 1
                if depth and file.parent.is_symlink():
                    raise NotRegularError(errno.EINVAL, "is in a folder that is a link")
                with open_regular(inside_folder(file, depth=depth)) as stream:
                    size = os.fstat(stream.fileno()).st_size
                if size > LARGEST_MODEL_FILE:
                    raise TooLargeError(errno.EFBIG, f"is larger than {LARGEST_MODEL_FILE} bytes")


def model_of_folder(folder: Path) -> dict[str, str]:
    """Return what a folder's configuration says of a model, by which a tokenizer's class is chosen.

    Where it can't be read it says nothing, as to transformers.
    """
    try:
        file = inside_folder(folder / _MODEL_FILE)
        content = json.loads(read_text(file, at_most=LARGEST_MODEL_FILE))
    except (OSError, ValueError, RecursionError):
        return {}
    found = content if isinstance(content, dict) else {}
    return {key: found[key] for key in _MODEL_KEYS if isinstance(found.get(key), str)}


def read_foreign(folder: Path, *, model: Mapping[str, str]) -> PretrainedTokenizer | None:
    """Read a tokenizer of a folder that others may have prepared; None: it has none.

    Args:
        folder: Where its files are.
        model: What its class is chosen by.

    Raises:
        ConfigError: It can't be read.
    """
    if not (contents := foreign_files(folder)):
        return None
    with TemporaryDirectory() as own:
        for name, file in _with_model(contents, model).items():
            Path(own, name).write_bytes(file.content)
        return _read(Path(own), contents, path=str(folder))


def _with_model(contents: Mapping[str, FileCopy], model: Mapping[str, str]) -> dict[str, FileCopy]:
    """Return a tokenizer's files, and one that says what its class is chosen by."""
    if not model:
        return {**contents}
    mode = functools.reduce(operator.and_, (file.mode for file in contents.values()), 0o666)
    return {**contents, _MODEL_FILE: FileCopy(json.dumps(model).encode(), mode)}


def tokenizer_files(folder: Path) -> list[Path]:
    """Return a tokenizer's files in a folder, by name, and what else has such a name."""
    found = {file for pattern in _FILES for file in folder.glob(pattern)}
    return sorted(file for file in found if not file.is_dir())


def _read(folder: Path, contents: Mapping[str, FileCopy], *, path: str) -> PretrainedTokenizer:
    """Read a tokenizer from a folder.

    Args:
        folder: Where its files are.
        contents: Of its files, by name.
        path: What the user wrote.

    Raises:
        ConfigError: transformers is not installed, or can't read them.
    """
    if importlib.util.find_spec("transformers") is None:
        raise _refusal("needs transformers; pip install 'axonlaunch[hf]'", path)
    transformers: Any = importlib.import_module("transformers")
    transformers.utils.logging.set_verbosity_error()
    try:
        loaded = transformers.AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
        return PretrainedTokenizer(contents, loaded, model_of_folder(folder))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # parsers of others; a panic of Rust is no Exception
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise _refusal(f"can't be read: {reason}", path) from None


@functools.lru_cache(maxsize=4)
def _load(path: str, stamp: object) -> PretrainedTokenizer:
    del stamp  # of files that may be others than before
    folder = _files(path)[0].parent
    contents = foreign_files(folder, key="tokenizer.path", path=path)
    _refuse_links_outside(folder, path)
    return _read(folder, contents, path=path)


def _stamp(path: str) -> object:
    """Return what changes with a tokenizer's files."""
    files = (inside_folder(file) for file in _files(path))
    return tuple((str(file), file.lstat().st_mtime_ns) for file in files if file.exists())


def _files(path: str) -> list[Path]:
    """Return the files of the tokenizer that a path names.

    Raises:
        ConfigError: There are none.
    """
    here = Path(path).expanduser()
    if here.is_file():
        if here.name != _FILE:
            raise _refusal(f"is a file; give the folder it is in, or a {_FILE}", path)
        return tokenizer_files(here.parent)
    folder = here if here.is_dir() else _cached_folder(path)
    if not (files := tokenizer_files(folder)):
        message = f"has no {_FILE} or other file of a tokenizer; give a folder that has, or null"
        raise _refusal(message, path)
    return files


def _cached_folder(path: str) -> Path:
    """Return the folder of a model id in the Hub's cache.

    Raises:
        ConfigError: It is not there.
    """
    if importlib.util.find_spec("huggingface_hub") is not None:
        hub: Any = importlib.import_module("huggingface_hub")
        try:
            return Path(hub.snapshot_download(path, local_files_only=True))
        except Exception:  # whatever is wrong with the name, it is nothing that is here
            pass
    message = f"there is no such folder, seen from {Path.cwd()}"
    if not path.startswith((".", "/", "~")):  # it may be a model id
        message += f"; of a model id, run hf download {path} first"
    raise _refusal(message, path)


def _refusal(message: str, path: str) -> ConfigError:
    return ConfigError([ConfigIssue("tokenizer.path", message, path)])
