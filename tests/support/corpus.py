"""Builds rows of real text, and a tokenizer that is trained on them."""

from __future__ import annotations

import ast
import functools
import itertools
import json
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_MODULES = (
    *("argparse", "ast", "calendar", "csv", "datetime", "difflib", "fractions", "heapq"),
    *("inspect", "ipaddress", "locale", "mailbox", "optparse", "pathlib", "pickle", "random"),
    *("statistics", "string", "subprocess", "tarfile", "textwrap", "threading", "typing"),
)
END = "<|end|>"


@functools.cache
def functions(count: int = 200) -> list[dict[str, str]]:
    """Return up to 1,000 functions of Python's library, with ``name``, ``doc`` and ``text``."""
    return list(itertools.islice(_functions(), count))


def _functions() -> Iterator[dict[str, str]]:
    for module in _MODULES:
        source = Path(sysconfig.get_path("stdlib"), f"{module}.py").read_text()
        lines = source.splitlines(keepends=True)
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and (doc := ast.get_docstring(node)):
                text = textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno]))
                yield {"name": node.name, "doc": doc, "text": text}


def write_parquet_with_a_broken_column(file: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows with an additional first column ``image`` that can't be read."""
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist([{"image": "x" * 999, **row} for row in rows])
    pyarrow.parquet.write_table(table, file, write_page_checksum=True, use_dictionary=False)
    image = pyarrow.parquet.ParquetFile(file).metadata.row_group(0).column(0)
    content = bytearray(file.read_bytes())
    content[image.data_page_offset + image.total_compressed_size - 9] ^= 1
    file.write_bytes(bytes(content))
    return file


def write_jsonl(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@functools.cache
def _learned() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=[END, "<|user|>", "<|assistant|>", "<|system|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([row["text"] for row in functions()], trainer)
    return tokenizer.to_str()


def save_tokenizer(folder: Path, *, chat_template: str | None = None) -> Path:
    """Save a tokenizer of 512 tokens as ``save_pretrained`` does."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_learned()), eos_token=END
    )
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    return folder
