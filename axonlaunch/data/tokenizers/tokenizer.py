"""Tokenizers: bytes, or a tokenizer in a folder.

Folders are read by transformers and ``tokenizers``. Nothing is downloaded.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from axonlaunch.config.options.data import NUM_BYTES
from axonlaunch.config.options.tokenizer import TokenizerConfig
from axonlaunch.data.tokenizers.tokenizer_files import (
    folder_at,
    foreign_files,
    model_of_folder,
    path_error,
    refuse_links_outside,
    stamp_of,
    with_model,
)
from axonlaunch.system.processes.isolated import Isolated, IsolatedCallError
from axonlaunch.system.storage.files import FileCopy, write_copy
from axonlaunch.system.storage.run_files import TOKENIZER

_Tokens = npt.NDArray[np.uint32]
_Result = TypeVar("_Result")

FOLDER = TOKENIZER
_LEAST_SECONDS, _CHARACTERS_PER_S = 60.0, 20_000
"""Deadline of a call. Tokenizers process a million characters per second, those in Python a
tenth."""
_BLAMED = "the tokenizer"
_CONFIG_FILE, TEMPLATE = "tokenizer_config.json", "chat_template"
TEMPLATE_FILES = (TEMPLATE, "additional_chat_templates/")
"""Prefixes of files that contain only chat templates."""


class Tokenizer(Protocol):
    """Converts text to tokens and back.

    Attributes:
        vocab_size: One more than the largest token.
        fingerprint: Hash of everything that decides the tokens of a text.
        end: Token at the end of a document; None if there is none.
        added: Tokens that the configuration adds to those of its folder.
        template_fingerprint: Hash of the chat template, which does not affect the tokens of a text;
            empty without a template.
    """

    vocab_size: int
    fingerprint: str
    end: int | None
    added: tuple[str, ...]
    template_fingerprint: str

    def documents(self, texts: Sequence[str]) -> list[_Tokens]:
        """Convert each text to the tokens of a document, including start and end tokens."""

    def encode(self, text: str) -> list[int]:
        """Convert a prompt to tokens."""

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Convert tokens to text.

        Args:
            special: Whether the text contains special tokens.
        """

    def keep(self, folder: Path) -> list[str]:
        """Copy the files to a folder; return their names."""

    def cancel(self) -> None:
        """End the call that another thread waits for."""


class ByteTokenizer:
    """One token per byte of UTF-8; documents have no end token."""

    vocab_size = NUM_BYTES
    fingerprint = "bytes"
    end: int | None = None
    added: tuple[str, ...] = ()
    template_fingerprint = ""

    def documents(self, texts: Sequence[str]) -> list[_Tokens]:
        """Convert each text to its bytes."""
        contents = (text.encode(errors="surrogateescape") for text in texts)
        return [np.frombuffer(content, np.uint8).astype(np.uint32) for content in contents]

    def encode(self, text: str) -> list[int]:
        """Convert text to bytes."""
        return list(text.encode(errors="surrogateescape"))

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Convert bytes to text, with the replacement character for invalid UTF-8.

        Tokens above 255 are left out; a model with a larger vocabulary may generate them.
        """
        del special  # there are no special tokens
        return bytes(token for token in tokens if token < NUM_BYTES).decode(errors="replace")

    def keep(self, folder: Path) -> list[str]:
        """Return no files."""
        del folder
        return []

    def cancel(self) -> None:
        """Do nothing, because conversion of bytes takes no time."""


class PretrainedTokenizer:
    """A tokenizer in a folder, as loaded by transformers.

    Attributes:
        transformers: The tokenizer object of transformers, which has the chat template.
        files: Files of the tokenizer, by their path in its folder.
        model: Facts about the model, from the configuration in the folder, by which transformers
            selected the class.
    """

    def __init__(
        self,
        files: Mapping[str, FileCopy],
        loaded: Any,
        model: Mapping[str, str],
        *,
        added: Sequence[str] = (),
    ) -> None:
        """Store a loaded tokenizer.

        Args:
            files: Files of the tokenizer, by their path in its folder.
            loaded: The tokenizer object of transformers.
            model: Facts about the model that select the class.
            added: Tokens that the configuration adds to those of the folder.
        """
        self.transformers, self.model, self.added = loaded, dict(model), tuple(added)
        self.files = dict(sorted(files.items()))
        self.vocab_size = max(len(loaded), 1 + max(loaded.get_vocab().values(), default=0))
        self.end: int | None = loaded.eos_token_id
        digest = hashlib.sha256()
        for name, file in self.files.items():
            if not name.startswith(TEMPLATE_FILES):
                digest.update(name.encode() + b"\0" + without_template(name, file.content))
        self.fingerprint = digest.hexdigest()
        template = json.dumps(getattr(loaded, "chat_template", None), sort_keys=True)
        self.template_fingerprint = hashlib.sha256(template.encode()).hexdigest()
        fast: Any = getattr(loaded, "backend_tokenizer", None)
        if fast is not None:  # overrides truncation and padding that a file may request
            fast.no_truncation()
            fast.no_padding()
        self._copy = Isolated(self)

    def call_isolated(
        self, function: Callable[..., _Result], *args: Any, characters: int, what: str
    ) -> _Result:
        """Return ``function(self, *args)``, called in a copy of this process with a deadline.

        Args:
            function: A function at the top level of a module.
            characters: Number of characters to process, which decides the deadline.
            what: Possible cause of a failure, named in the message.

        Raises:
            IsolatedCallError: The function took too long or too much memory, or ended its process.
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
        """Convert each text to tokens, and add the end token if it is missing."""
        size = sum(map(len, texts))
        return self.call_isolated(_documents, list(texts), characters=size, what=_BLAMED)

    def encode(self, text: str) -> list[int]:
        """Convert text to tokens, without the end token that some tokenizers add."""
        tokens = self.call_isolated(_encode, text, characters=len(text), what=_BLAMED)
        return tokens[:-1] if len(tokens) > 1 and tokens[-1] == self.end else tokens

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Convert tokens to text.

        Numbers beyond the vocabulary are skipped: a head that is padded can produce them.
        """
        valid = [token for token in tokens if token < self.vocab_size]
        return self.call_isolated(_decode, valid, special, characters=len(valid), what=_BLAMED)

    def keep(self, folder: Path) -> list[str]:
        """Copy the files to a folder, with a ``config.json`` that selects the class."""
        folder.mkdir(parents=True, exist_ok=True)
        files = with_model(self.files, self.model)
        for name, file in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            write_copy(folder / name, file)
        return [*files]


def _documents(tokenizer: PretrainedTokenizer, texts: list[str]) -> list[_Tokens]:
    fast, end = getattr(tokenizer.transformers, "backend_tokenizer", None), tokenizer.end
    if fast is not None:
        rows = [encoding.ids for encoding in fast.encode_batch_fast(texts)]
    else:
        rows = tokenizer.transformers(texts)["input_ids"] if texts else []
    complete = [row if end is None or row[-1:] == [end] else [*row, end] for row in rows]
    return [np.array(row, dtype=np.uint32) for row in complete]


def _encode(tokenizer: PretrainedTokenizer, text: str) -> list[int]:
    tokens: list[int] = tokenizer.transformers(text)["input_ids"]
    return tokens


def _decode(tokenizer: PretrainedTokenizer, tokens: list[int], special: bool) -> str:
    text: str = tokenizer.transformers.decode(tokens, skip_special_tokens=not special)
    return text


def without_template(name: str, content: bytes) -> bytes:
    """Return a tokenizer's file without a chat template in it."""
    with suppress(ValueError, RecursionError):
        config = json.loads(content) if name == _CONFIG_FILE else None
        if isinstance(config, dict):
            config.pop(TEMPLATE, None)
            return json.dumps(config, sort_keys=True).encode()
    return content


def token_texts(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """Return the text that each token adds; a character belongs to the token of its last byte."""
    texts, previous = [], ""
    for end in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:end], special=True)
        if text.endswith("\ufffd") and end < len(tokens):
            texts.append("")
        else:
            texts.append(text[len(previous) :])
            previous = text
    return texts


def load_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Return the configured tokenizer; bytes by default.

    Raises:
        ConfigError: There is no such tokenizer, or it can't be read.
    """
    return ByteTokenizer() if config.path is None else _load(config.path, stamp_of(config.path))


def load_kept(run_dir: Path) -> PretrainedTokenizer | None:
    """Return the tokenizer in the folder of a run or an export; None if it has no tokenizer.

    Raises:
        ConfigError: The tokenizer can't be read.
    """
    folder = run_dir / FOLDER
    return read_foreign(folder, model=model_of_folder(folder))


def read_foreign(folder: Path, *, model: Mapping[str, str]) -> PretrainedTokenizer | None:
    """Read a tokenizer from a folder that may not be trusted; None if it has no tokenizer.

    Args:
        folder: Folder of the tokenizer's files.
        model: Facts about the model that select the class.

    Raises:
        ConfigError: The tokenizer can't be read.
    """
    if not (contents := foreign_files(folder)):
        return None
    with TemporaryDirectory() as temporary:
        for name, file in with_model(contents, model).items():
            copy = Path(temporary, name)
            copy.parent.mkdir(exist_ok=True)
            copy.write_bytes(file.content)
        return _read(Path(temporary), contents, path=str(folder))


def _read(folder: Path, contents: Mapping[str, FileCopy], *, path: str) -> PretrainedTokenizer:
    """Read a tokenizer from a folder.

    Args:
        folder: Folder of the tokenizer's files.
        contents: The tokenizer's files, by their path in the folder.
        path: Path as written by the user.

    Raises:
        ConfigError: transformers is not installed, or can't read them.
    """
    if importlib.util.find_spec("transformers") is None:
        raise path_error("needs transformers; pip install 'axonlaunch[hf]'", path)
    transformers: Any = importlib.import_module("transformers")
    transformers.utils.logging.set_verbosity_error()
    try:
        loaded = transformers.AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
        if loaded.get_vocab().keys() - {*loaded.all_special_tokens}:
            return PretrainedTokenizer(contents, loaded, model_of_folder(folder))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # third-party parsers; a panic in Rust is not an Exception
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise path_error(f"can't be read: {reason}", path) from None
    # transformers makes an empty tokenizer if the files of the vocabulary are missing.
    raise path_error("its tokenizer has only special tokens; add its tokenizer.json", path)


@functools.lru_cache(maxsize=4)
def _load(path: str, stamp: object) -> PretrainedTokenizer:
    del stamp  # part of the cache's key, because files may change
    folder = folder_at(path)
    contents = foreign_files(folder, key="tokenizer.path", path=path)
    refuse_links_outside(folder, path)
    return _read(folder, contents, path=path)
