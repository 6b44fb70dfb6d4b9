"""Changes a tokenizer as configured: more tokens, other special tokens, another chat template.

The files change too, so that a run keeps and exports what it was trained with.
"""

from __future__ import annotations

import copy
import functools
import importlib
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from axonlaunch.config.options.tokenizer import TokenizerConfig
from axonlaunch.config.problems.errors import ConfigError, ConfigIssue
from axonlaunch.data.tokenizers.tokenizer import (
    TEMPLATE,
    TEMPLATE_FILES,
    PretrainedTokenizer,
    Tokenizer,
    without_template,
)
from axonlaunch.data.tokenizers.tokenizer_files import foreign_files
from axonlaunch.system.storage.files import FileCopy


def add_tokens(loaded: Tokenizer, config: TokenizerConfig) -> Tokenizer:
    """Return a tokenizer that has the configured tokens, adding those that are missing.

    Raises:
        ConfigError: Tokens are configured for the tokenizer of bytes, or the tokenizer can't be
            changed.
    """
    if not config.new_tokens():
        return loaded
    key = "tokenizer.add_tokens" if config.add_tokens else "tokenizer.special"
    value: Any = config.add_tokens or config.special
    if not isinstance(loaded, PretrainedTokenizer):
        message = "bytes have a fixed vocabulary; use tokenizer.path=FOLDER, or tokenizer=train"
        raise ConfigError([ConfigIssue(key, message, value)])
    chosen = json.dumps([config.add_tokens, config.special])
    try:
        return _with_tokens(loaded, chosen)
    except Exception as error:  # tokenizers of strangers may raise any error
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        message = f"the tokenizer can't be changed: {reason}"
        raise ConfigError([ConfigIssue(key, message, value)]) from None


@functools.lru_cache(maxsize=4)
def _with_tokens(loaded: PretrainedTokenizer, chosen: str) -> PretrainedTokenizer:
    """Return a tokenizer with ``[tokens, {name: special token}]``, which are given as JSON."""
    tokens, special = json.loads(chosen)
    library: Any = importlib.import_module("tokenizers")
    changed = copy.deepcopy(loaded.transformers)
    vocabulary = set(changed.get_vocab())
    changed.add_tokens([library.AddedToken(token, normalized=False) for token in tokens])
    changed.add_special_tokens({f"{name}_token": token for name, token in special.items()})
    with TemporaryDirectory() as folder:
        changed.save_pretrained(folder)
        files = foreign_files(Path(folder))
    wanted = dict.fromkeys((*tokens, *special.values()))
    return PretrainedTokenizer(
        files, changed, loaded.model, added=[token for token in wanted if token not in vocabulary]
    )


def replace_template(loaded: Tokenizer, template: str, chosen: str) -> Tokenizer:
    """Return a tokenizer with another chat template; that of bytes is unchanged.

    Args:
        template: Text of the template.
        chosen: Value of ``data.chat_template``.

    Raises:
        ConfigError: The template does not compile, takes too long or too much memory.
    """
    if not isinstance(loaded, PretrainedTokenizer):
        return loaded
    try:
        return _with_template(loaded, template)
    except ValueError as error:
        raise ConfigError([ConfigIssue("data.chat_template", str(error), chosen)]) from None


@functools.lru_cache(maxsize=4)
def _with_template(loaded: PretrainedTokenizer, template: str) -> PretrainedTokenizer:
    changed = copy.deepcopy(loaded.transformers)
    changed.chat_template = template
    files = {
        name: FileCopy(without_template(name, file.content), file.mode)
        for name, file in loaded.files.items()
        if not name.startswith(TEMPLATE_FILES)
    }
    mode = min(file.mode for file in loaded.files.values())
    files[f"{TEMPLATE}.jinja"] = FileCopy(template.encode(), mode)
    tokenizer_with_template = PretrainedTokenizer(files, changed, loaded.model, added=loaded.added)
    tokenizer_with_template.call_isolated(
        _compile, characters=len(template), what="the chat template"
    )
    return tokenizer_with_template


def _compile(tokenizer: PretrainedTokenizer) -> None:
    """Compile the chat template.

    Raises:
        ValueError: The template has a syntax error.
    """
    from jinja2 import TemplateSyntaxError

    question = [{"role": "user", "content": "?"}]
    try:
        tokenizer.transformers.apply_chat_template(question, tokenize=False)
    except (TemplateSyntaxError, RecursionError, SyntaxError) as error:
        line = getattr(error, "lineno", None)
        line_prefix = "" if line is None else f"line {line}: "
        raise ValueError(f"does not compile: {line_prefix}{error}") from None
    except Exception:  # it compiles, and rejects this message
        return
