"""Typed configurations of text datasets; each row of a file is a document or a chat.

``axonlaunch.data`` reads the files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Any, Literal

from axonlaunch.config.problems.did_you_mean import unknown
from axonlaunch.config.values.hub_reference import parse_hub_reference
from axonlaunch.config.values.split_text import parse_splits

_LIMIT = "data.limit takes the first rows of any file"
_NOT_OF_HUB = "applies only to data sets of the Hub, and"
_OF_HUB_DATA = ("subset", "split", "validation_split")
FIELDS = (
    *("messages", "role", "content", "prompt", "completion", "instruction", "input", "output"),
    *("system", "tools", "user", "assistant", "tool"),
)
"""Names that ``data.fields`` of chats gives columns and keys for."""
_FORMS = (
    ("messages", "role", "content", "user", "assistant", "tool"),
    ("prompt", "completion"),
    FIELDS[5:8],
)
"""Names of ``FIELDS`` that belong to one form of a row."""
_OF_THE_MIX = {"of_all_groups": True}
"""Metadata of keys that have the same value for all sources of a mix."""
_HELD_OUT = 0.01


def _schema_of(options: dict[str, Any], schema: type) -> type:
    """Return the dataclass of a source, selected by its key ``data``, else that of the mix."""
    kinds = {"documents": DocumentsConfig, "chat": ChatConfig}
    return kinds.get(str(options.get("data")), schema)


def _split_problems(splits: Mapping[str, str | None]) -> Iterator[tuple[str, str]]:
    """Yield ``(field, message)`` for each text that names no split."""
    for name, text in splits.items():
        try:
            parse_splits("train" if text is None else text)
        except ValueError as reason:
            yield name, str(reason)


def _is_day(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def _has_hub_data(files: Sequence[str]) -> bool:
    return any(parse_hub_reference(file) is not None for file in files)


@dataclass(frozen=True, kw_only=True)
class SourceShare:
    """Kind and share of one source of a mix."""

    data: Literal["documents", "chat"] | None = None
    """kind of the rows, read like data=documents or data=chat; null: the kind of the mix"""
    weight: float | None = field(default=None, metadata={"above": 0})
    """share of the rows, relative to the weights of the other sources; one pass over the mix is
    long enough to see each row once
    """
    epochs: float | None = field(default=None, metadata={"above": 0})
    """number of times that one pass over the mix sees each row, instead of weight; null: 1"""


@dataclass(frozen=True, kw_only=True)
class HeldOutConfig:
    """Files whose rows are held out for evaluation, read like the training files."""

    files: list[str] = field(default_factory=list)
    """paths, globs, URLs and data sets of the Hugging Face Hub, as in data.files"""
    subset: str | None = None
    """subset of the data sets of the Hub; null: the default subset"""
    split: str | None = None
    """splits of the data sets of the Hub, as in data.split; null: train, or the only split"""
    limit: int | None = field(default=None, metadata={"min": 1})
    """number of rows, from the first one; null: all"""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield ``(field, message)`` for each invalid combination of values."""
        if not self.files:
            yield "files", "names no file; write data.held_out.files=[eval.jsonl]"
        yield from _split_problems({"split": self.split})
        if self.files and not _has_hub_data(self.files):
            for name in ("split", "subset"):
                if getattr(self, name) is not None:
                    yield name, f"{_NOT_OF_HUB} data.held_out.files names none; {_LIMIT}"


@dataclass(frozen=True, kw_only=True)
class TextRowsConfig:
    """Keys that documents and chats have in common."""

    name: str
    """name of the dataset"""
    files: list[str] = field(default_factory=list)
    """paths, globs or fsspec URLs of .jsonl, .json, .csv, .tsv, .parquet, .arrow and .txt files;
    text files may be compressed (.gz, .bz2, .xz, .zst); also folders written by save_to_disk of the
    package datasets, and data sets of the Hugging Face Hub, ORG/NAME or ORG/NAME@REVISION
    """
    subset: str | None = None
    """subset (configuration) of the data sets of the Hub; null: the default subset"""
    split: str | None = None
    """splits of the data sets of the Hub that are trained on: train, train[:1000], train[10%:20%],
    train+test; null: train, or the only split
    """
    validation_split: str | None = None
    """splits of the same data sets of the Hub that are held out for evaluation, instead of held_out
    """
    limit: int | None = field(default=None, metadata={"min": 1})
    """number of rows of files that are used, from the first one; null: all"""
    mix: dict[str, dict[str, Any]] = field(
        default_factory=dict,
        metadata={
            "groups": SourceShare,
            "schema_of": _schema_of,
            "allowed": "{NAME: {files: [...], weight: ..., ...}}",
        },
    )
    """sources by name, instead of files: each has files, optionally weight or epochs, data (the
    kind of its rows), and keys of data that differ from those of the mix
    """
    sequence_length: int = field(default=1024, metadata={"min": 1, **_OF_THE_MIX})
    """tokens per row"""
    packing: Literal["auto", "concat", "best_fit", "none"] = field(
        default="concat", metadata=_OF_THE_MIX
    )
    """how documents are put into rows. concat: one after another, cut at the end of a row;
    best_fit: whole documents, each in the fullest row with enough room; none: one document per row;
    auto: best_fit, but a small number of documents is spread over 64 rows, and none if the model
    cannot separate documents. Documents never attend to each other
    """
    shuffle: Literal["all", "shards", "none"] = field(default="all", metadata=_OF_THE_MIX)
    """order of rows. all: shuffled over all files, which are tokenized before the run starts;
    shards: shuffled within parts of about 16 MB, file after file; the run starts when the first
    part is tokenized, and the others are tokenized during training; none: the order of the files in
    every epoch
    """
    too_long: Literal["truncate", "drop", "error"] = "truncate"
    """treatment of documents longer than a row, with best_fit and none"""
    min_tokens: int = field(default=1, metadata={"min": 1})
    """tokens of the shortest documents that are used; shorter ones are left out"""
    on_bad_row: Literal["error", "skip"] = "error"
    """treatment of invalid rows; skip leaves them out and reports their number"""
    held_out: int | float | list[str] | HeldOutConfig = field(
        default=_HELD_OUT,
        metadata={
            "min": 0,
            "allowed": "a fraction below 1, a number of documents, or {files: [...]}",
        },
    )
    """data held out for evaluation: a fraction of the documents (below 1), a number of documents,
    or files, {files: [...], subset: ..., split: ..., limit: ...}, of which a list names only files
    """
    cache_dir: str | None = field(default=None, metadata=_OF_THE_MIX)
    """folder of the token cache; null: axonlaunch/tokens in the user's cache folder"""

    def problems(self) -> list[tuple[str, str]]:
        """Return ``(field, message)`` for each invalid combination of values."""
        problems = []
        if not self.files and not self.mix:
            problems.append(("files", "names no file; write data.files=['corpus/*.jsonl']"))
        if self.files and self.mix:
            problems.append(("files", "data.mix names the files of each source; use one of them"))
        if self.mix and self.shuffle != "all":
            message = "data.mix is shuffled over all its sources; use all, or data.files"
            problems.append(("shuffle", message))
        if self.shuffle == "none" and self.packing in ("auto", "best_fit"):
            message = f"packing={self.packing} puts long documents first; use data.packing=none"
            problems.append(("shuffle", f"data.{message} or concat"))
        inheriting = [name for name, options in self.mix.items() if "held_out" not in options]
        if len(inheriting) > 1 and self.held_out_files.files:
            message = (
                "each source of data.mix would evaluate these files; use 0, and "
                f"data.mix.{inheriting[0]}.held_out for the source that reads such rows"
            )
            problems.append(("held_out", message))
        shares = self.shares()
        weighted = [name for name, share in shares.items() if share.weight is not None]
        if weighted and len(weighted) < len(shares):
            other = next(name for name in shares if name not in weighted)
            problems.append((f"mix.{other}", f"has no weight, and {weighted[0]} has; give it one"))
        if weighted and any(share.epochs is not None for share in shares.values()):
            message = "has weights and epochs, which follow from each other; use one of them"
            problems.append(("mix", message))
        for name, source in self.sources().items():
            for key, message in source.problems():
                if key in self.mix[name] or key not in _OF_HUB_DATA:  # else inherited
                    problems.append((f"mix.{name}.{key}", message))
        if isinstance(self.held_out, float) and self.held_out >= 1:
            message = "a fraction must be below 1; write a whole number for a number of documents"
            problems.append(("held_out", message))
        return [*problems, *self._hub_problems()]

    def _hub_problems(self) -> Iterator[tuple[str, str]]:
        """Yield ``(field, message)`` for keys of data sets of the Hub with invalid values."""
        splits = {"split": self.split, "validation_split": self.validation_split}
        yield from _split_problems(splits)
        if self.validation_split is not None and self.held_out not in (0, _HELD_OUT):
            yield "validation_split", "contradicts data.held_out, which holds out other rows"
        files = [file for source in self.mix.values() for file in source.get("files", ())]
        if not _has_hub_data([*self.files, *files]):
            for name, value in {**splits, "subset": self.subset}.items():
                if value is not None:
                    yield name, f"{_NOT_OF_HUB} data.files names none; {_LIMIT}"

    @property
    def held_out_files(self) -> HeldOutConfig:
        """Files that are held out; no files if rows of the training files are held out."""
        if isinstance(self.held_out, HeldOutConfig):
            return self.held_out
        return HeldOutConfig(files=self.held_out if isinstance(self.held_out, list) else [])

    def sources(self) -> dict[str, TextRowsConfig]:
        """Return the configuration of each source of a mix as a separate dataset."""
        return {name: self._source(options) for name, options in self.mix.items()}

    def _source(self, options: dict[str, Any]) -> TextRowsConfig:
        schema = _schema_of(options, type(self))
        shares = {share.name for share in dataclasses.fields(SourceShare)}
        changed = {name: value for name, value in options.items() if name not in shares}
        common = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(schema)
            if field.name != "name" and hasattr(self, field.name)
        }
        source: TextRowsConfig = schema(**{**common, "mix": {}, "files": [], **changed})
        return source

    def shares(self) -> dict[str, SourceShare]:
        """Return the share of each source of a mix."""
        return {
            name: SourceShare(weight=options.get("weight"), epochs=options.get("epochs"))
            for name, options in self.mix.items()
        }


@dataclass(frozen=True, kw_only=True)
class DocumentsConfig(TextRowsConfig):
    """Documents: a text field in rows of files, tokenized once."""

    name: str = "documents"
    """name of the dataset"""
    text_field: str = "text"
    """field or column that contains the text"""


@dataclass(frozen=True, kw_only=True)
class ChatConfig(TextRowsConfig):
    """Chats: messages in rows of files, formatted by the tokenizer's chat template."""

    name: str = "chat"
    """name of the dataset"""
    fields: dict[str, str] = field(
        default_factory=dict, metadata={"allowed": f"{{NAME: COLUMN}} with {', '.join(FIELDS)}"}
    )
    """names of columns, {prompt: question, completion: answer}, of the keys of a message,
    {messages: talk, role: from, content: value}, and of roles, {user: customer, assistant: agent}.
    What is not named is recognized: messages (role,
    content), conversations (from, value), prompt and completion, or instruction, input and output.
    A value with {{ }} is Jinja that computes a field, {completion: "{{ answers.text[0] }}"}
    """
    prompt_format: str | None = None
    """writes the prompt of a row from its columns, and its completion without a chat template:
    alpaca, dolly, question, a file, or text with {COLUMN} or in Jinja; null: messages are rendered
    by the chat template
    """
    chat_template: str | None = field(default=None, metadata=_OF_THE_MIX)
    """chat template instead of the tokenizer's, which is kept and exported with it: chatml, llama3,
    gemma, phi3, zephyr, alpaca, a file, or text in Jinja; null: that of the tokenizer
    """
    template_date: str | None = None
    """day, 2026-11-29, that a chat template with a date writes, as Llama 3.2's does; null: that on
    which the run starts, also when it resumes
    """
    train_on: Literal["assistant", "all"] = "assistant"
    """tokens that count in the loss. assistant: tokens of the assistant, found by the generation
    marks of the template or by the text that each turn adds; all: every token except the first
    """
    packing: Literal["auto", "concat", "best_fit", "none"] = field(
        default="auto", metadata=_OF_THE_MIX
    )
    """how chats are put into rows. concat: one after another, cut at the end of a row; best_fit:
    whole chats, each in the fullest row with enough room; none: one chat per row; auto: best_fit,
    but a small number of chats is spread over 64 rows so that there is more than one batch, and
    none if the model cannot separate chats. Chats never attend to each other
    """

    def problems(self) -> list[tuple[str, str]]:
        """Return ``(field, message)`` for each invalid combination of values."""
        problems = super().problems()
        for name, column in self.fields.items():
            if name not in FIELDS and self.prompt_format is None:
                message = unknown("field", name, [*FIELDS])
                problems.append((f"fields.{name}", message))
            elif not column:
                problems.append((f"fields.{name}", "is empty; write the name of a column"))
            elif name in _FORMS[0] and "{" in column:
                message = "is the name of a column or key; Jinja is for prompt, completion, system"
                problems.append((f"fields.{name}", message))
        used = [form for form in _FORMS if {*form} & self.fields.keys()]
        if len(used) > 1 and self.prompt_format is None:
            both = [next(name for name in form if name in self.fields) for form in used]
            message = f"{both[0]} and {both[1]} are of different forms of a row; name one form"
            problems.append(("fields", message))
        if self.prompt_format is not None and {*_FORMS[0]} & self.fields.keys():
            message = "data.prompt_format takes columns of text, not messages; use one of them"
            problems.append(("fields", message))
        if self.prompt_format is not None and self.chat_template is not None:
            message = "data.prompt_format writes rows without a chat template; use one of them"
            problems.append(("chat_template", message))
        if self.template_date is not None and not _is_day(self.template_date):
            problems.append(("template_date", "is not a day; write it as 2026-11-29"))
        problems += [
            (name, "is empty; write a name, a file or a text, or null")
            for name in ("prompt_format", "chat_template")
            if getattr(self, name) == ""
        ]
        return problems
