"""Datasets of axolotl's configurations."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from axonlaunch.config.validation.other_tools import data_rules, reasons
from axonlaunch.config.validation.other_tools.rules import missing, not_needed, to, with_others
from axonlaunch.config.validation.other_tools.translation import Table, Translation

DATA_KEYS: Table = {
    "chat_template": with_others(),
    "chat_template_jinja": with_others(),
    "dataloader_*": not_needed(reasons.READING),
    "dataset_exact_deduplication": missing("rows are not compared; remove equal rows before"),
    "dataset_keep_in_memory": not_needed(reasons.READING),
    "dataset_prepared_path": not_needed(reasons.READING),
    "dataset_processes": not_needed(reasons.READING),
    "chat_template_kwargs.*": missing("write the value into data.chat_template", off=()),
    "datasets": with_others(),
    "default_system_message": missing("add a system message to the rows"),
    "eot_tokens": not_needed("what the template ends a turn with counts"),
    "eval_sample_packing": not_needed("held-out rows are packed like training rows"),
    "excess_length_strategy": with_others(),
    "max_packed_sequence_len": not_needed("sample_packing says it"),
    "min_sample_len": to("data.min_tokens", int),
    "multipack_real_batches": not_needed(reasons.READING),
    "pad_to_sequence_len": not_needed("padding is masked"),
    "preprocess_iterable": not_needed(reasons.READING),
    "pretrain_multipack_attn": not_needed("documents never attend to each other"),
    "pretrain_multipack_buffer_size": not_needed(reasons.READING),
    "pretraining_dataset": with_others(),
    "roles_to_train": with_others(),
    "sample_packing": with_others(),
    "sample_packing_*": not_needed(reasons.READING),
    "sequence_len": with_others(),
    "shuffle_merged_datasets": not_needed("rows are in random order"),
    "skip_prepare_dataset": not_needed(reasons.READING),
    "streaming": not_needed("data.shuffle=shards starts before all rows are read"),
    "streaming_multipack_buffer_size": not_needed(reasons.READING),
    "test_datasets": with_others(),
    "total_num_tokens": not_needed(reasons.READING),
    "train_on_inputs": with_others(),
    "val_set_size": with_others(),
}

_CHATS = ("chat_template", "chat_template.default", "sharegpt", "chat_template.argilla")
_DOCUMENTS = ("completion", "pretrain", "")
_TEXTS = ("instruction", "input", "system")
"""Names of columns in prompts."""
_HAS_INPUT = "input is defined and input"
_TASK = "Below is an instruction that describes a task"
_INPUT = ", paired with an input that provides further context"
_ANSWER = "Write a response that appropriately completes the request."


def _prompt_in_style(system: str, turn: str, without_input: str) -> dict[str, Any]:
    """Return the prompt format of alpaca's rows in another style.

    Args:
        system: Text of the system message, with {system}.
        turn: Text of the question, with {instruction} and {input}.
        without_input: Text of the question for rows without input, with {instruction}.
    """
    head = system.replace(
        "{system}", f"{_TASK}{{% if {_HAS_INPUT} %}}{_INPUT}{{% endif %}}. {_ANSWER}"
    )
    return {"prompt_format": head + _with_or_without_input(turn, without_input)}


def _with_or_without_input(
    text: str, without: str, columns: Mapping[str, str] | None = None
) -> str:
    columns = columns or {}
    return _either("input", _in_jinja(text, columns), _in_jinja(without, columns), columns)


def _either(name: str, text: str, otherwise: str, columns: Mapping[str, str]) -> str:
    """Return Jinja that writes a text in rows with a value, and another one in other rows."""
    column = _variable(name, columns)
    return f"{{% if {column} is defined and {column} %}}{text}{{% else %}}{otherwise}{{% endif %}}"


def _in_jinja(text: str, columns: Mapping[str, str]) -> str:
    for name in _TEXTS:
        text = text.replace(f"{{{name}}}", f"{{{{ {_variable(name, columns)} }}}}")
    return text


def _variable(name: str, columns: Mapping[str, str]) -> str:
    """Return the name of a column in Jinja; ``data.fields`` maps those that are no names there."""
    column = columns.get(name, name)
    return column if column.isidentifier() else name


_PROMPTS: dict[str, dict[str, Any]] = {
    "alpaca": {"prompt_format": "alpaca"},
    "alpaca:chat": _prompt_in_style(
        "SYSTEM: {system}\n",
        "USER: {instruction}\n{input}\nASSISTANT:",
        "USER: {instruction}\nASSISTANT:",
    ),
    "alpaca:chatml": _prompt_in_style(
        "<|im_start|>system\n{system}<|im_end|>\n",
        "<|im_start|>user\n{instruction}\n{input}<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>user\n{instruction}<|im_end|>\n<|im_start|>assistant\n",
    ),
    "alpaca:phi": _prompt_in_style(
        "<|system|>\n{system}<|end|>\n",
        "<|user|>\n{instruction}<|end|>{input}<|assistant|>",
        "<|user|>\n{instruction}<|end|>\n<|assistant|>\n",
    ),
    "gpteacher": {"prompt_format": "alpaca", "fields": {"completion": "response"}},
}
_ROLES = {"user": ("human",), "assistant": ("gpt",), "tool": ()}
"""Roles that may have one other name in the rows, and their recognized names."""
_FILE_KINDS = ("json", "jsonl", "csv", "parquet", "arrow", "text")
_KNOWN = {
    *("path", "type", "name", "split", "data_files", "ds_type", "shards", "train_on_split"),
    *("field", "text_column", "field_messages", "message_property_mappings", "revision"),
    *("message_field_role", "message_field_content", "roles", "roles_to_train", "conversation"),
    *("message_field_training", "message_field_training_detail", "trust_remote_code", "skip"),
    *("train_on_eos", "train_on_eot", "chat_template", "field_tools", "field_system"),
    *("field_thinking", "template_thinking_key", "drop_system_message", "field_human"),
    *("split_thinking", "preprocess_shards", "input_transform", "field_model", "shards_idx"),
}
_FLAGS = ("training", "train", "loss", "weight", "loss_weight")
"""Keys of messages that are read as flags by themselves."""
_THINKING = "reasoning_content"
_LONG_DOCUMENTS = (
    "a document is cut off at sequence_len, which axolotl divides into rows; data.packing=concat "
    "keeps the rest"
)
_CHANGES: dict[str, tuple[tuple[Any, ...], str]] = {
    "drop_system_message": ((False,), "remove them from the rows"),
    "input_transform": ((), "is code; write the rows as they are read"),
    "message_field_training": (_FLAGS, "name it training in the rows"),
    "message_field_training_detail": ((), "a whole message counts, or none of it"),
    "shards": ((), "is a part of the rows; set data.limit"),
    "skip": ((0,), "rows are read from the first one"),
    "split_thinking": ((False,), "the template sees the reasoning as a part of the content"),
    "train_on_eos": (("turn",), "the end of a turn counts if the turn does"),
    "train_on_eot": (("turn",), "the end of a turn counts if the turn does"),
}
"""Keys of a dataset with the values that change nothing here, and what else to do."""
_PREFERENCES = ("field_chosen", "field_rejected", "step_separator", "max_completion_length")


def set_data(translation: Translation) -> bool:
    """Set the dataset; return whether rows are held out for evaluation."""
    key = "datasets" if translation.get("datasets") else "pretraining_dataset"
    sources = _sources(translation, key)
    if not sources:
        translation.leave_out(key, "the file names no dataset; set data.files")
    data_rules.set_sources(translation, sources or [{"data": "chat"}], key)
    has_chats = not sources or any(source["data"] == "chat" for source in sources)
    length = int(translation.number("sequence_len"))
    translation.set("data.sequence_length", length, "sequence_len")
    if translation.flag("sample_packing"):
        packing = "best_fit" if has_chats else "concat"  # axolotl divides long documents
        translation.set("data.packing", packing, "sample_packing")
    elif key == "pretraining_dataset":
        translation.set("data.packing", "concat", key)
    else:
        translation.set("data.packing", "none", "sample_packing")
        if not has_chats:
            translation.note(key, _LONG_DOCUMENTS)
    longer = translation.get("excess_length_strategy", "drop")
    if has_chats:
        chosen = {"drop": "drop", "truncate": "truncate"}.get(str(longer), "error")
        translation.set("data.too_long", chosen, "excess_length_strategy")
        if translation.flag("train_on_inputs"):
            translation.set("data.train_on", "all", "train_on_inputs")
        _set_template(translation, sources)
    return _set_held_out(translation)


def _set_held_out(translation: Translation) -> bool:
    tests = _sources(translation, "test_datasets")
    if tests:
        held_out: dict[str, Any] = {
            name: tests[0][name] for name in ("subset", "split") if name in tests[0]
        }
        held_out["files"] = [file for source in tests for file in source["files"]]
        data_rules.set_held_out_files(translation, held_out, "test_datasets")
        return True
    size = translation.number("val_set_size")
    if size:
        share = int(size) if size >= 1 else float(size)
        translation.set("data.held_out", share, "val_set_size")
    return bool(size)


def _set_template(translation: Translation, sources: list[dict[str, Any]]) -> None:
    if any("prompt_format" in source for source in sources):
        if translation.get("chat_template") not in (None, "tokenizer_default"):
            text = "is not used by datasets of prompts"
            translation.note("chat_template", text)
        return
    jinja = translation.get("chat_template_jinja")
    if jinja:
        translation.set("data.chat_template", str(jinja), "chat_template_jinja")
    elif translation.has("chat_template") and (
        not str(translation.get("chat_template")).startswith("tokenizer_default")
    ):
        model = str(translation.get("base_model"))
        data_rules.set_template(translation, "chat_template", model)


def _sources(translation: Translation, key: str) -> list[dict[str, Any]]:
    sources = []
    for index, each in enumerate(translation.items(key)):
        entry = {"path": each} if isinstance(each, str) else each
        if isinstance(entry, Mapping):
            sources.append(_source(translation, f"{key}.{index}", key, dict(entry)))
    return sources


def _source(
    translation: Translation, key_prefix: str, key: str, entry: dict[str, Any]
) -> dict[str, Any]:
    """Return the keys of ``data`` for one entry of ``datasets``."""
    entry = {name: value for name, value in entry.items() if value is not None}
    for name in entry:
        if name in _PREFERENCES:
            translation.leave_out(f"{key_prefix}.{name}", reasons.NO_PREFERENCES)
        elif name not in _KNOWN:
            translation.report_unknown(f"{key_prefix}.{name}")
    roles = entry.get("roles_to_train", ["assistant"])
    if roles not in (["assistant"], ["gpt"], ["assistant", "gpt"], ["gpt", "assistant"]):
        text = "answers of the assistant count, or with data.train_on=all every token"
        translation.leave_out(f"{key_prefix}.roles_to_train", text)
    for name in [name for name in entry if name in _CHANGES]:
        same, text = _CHANGES[name]
        if entry[name] not in same:
            translation.leave_out(f"{key_prefix}.{name}", text)
    path, files = str(entry.get("path")), entry.get("data_files")
    source: dict[str, Any] = {"data": "chat", "files": [path]}
    if files and path in _FILE_KINDS:
        source["files"] = files if isinstance(files, list) else [str(files)]
    elif files:
        named = files if isinstance(files, list) else [files]
        source["files"] = [f"hf://datasets/{path}/{file}" for file in named]
    if entry.get("revision") and not files:
        source["files"] = [f"{path}@{entry['revision']}"]
    is_old_id = source["files"] == [path] and re.fullmatch(r"[\w-]+", path) is not None
    if is_old_id and not (translation.folder / path).exists():
        text = "names no account of the Hub; write ORG/NAME in data.files, and data.subset"
        translation.leave_out(f"{key_prefix}.path", text)
        source["files"] = []
        entry = {name: value for name, value in entry.items() if name not in ("name", "split")}
    is_hub_id = source["files"] == [path] and path.count("/") == 1 and not path.startswith(".")
    for entry_key, ours in (("name", "subset"), ("split", "split")):
        if entry_key in entry and (is_hub_id or entry[entry_key] != "train"):
            source[ours] = str(entry[entry_key])
    _set_type(translation, key_prefix, key, entry, source)
    return source


def _set_type(
    translation: Translation,
    key_prefix: str,
    key: str,
    entry: dict[str, Any],
    source: dict[str, Any],
) -> None:
    kind = entry.get("type", "pretrain" if key == "pretraining_dataset" else "chat_template")
    if isinstance(kind, Mapping):
        source.update(_custom_prompt(kind))
    elif kind in _CHATS:
        if fields := _message_fields(translation, key_prefix, entry):
            source["fields"] = fields
    elif kind in _DOCUMENTS:
        source["data"] = "documents"
        source["text_field"] = str(entry.get("field", entry.get("text_column", "text")))
    elif kind in _PROMPTS:
        source.update(_PROMPTS[kind])
    elif not translation.flag("rl"):  # which is reported
        text = "has no counterpart; write the prompt in data.prompt_format, or name data.fields"
        translation.leave_out(f"{key_prefix}.type", text)


def _message_fields(
    translation: Translation, key_prefix: str, entry: Mapping[str, Any]
) -> dict[str, str]:
    """Return the names of columns, of keys of messages and of roles that differ from the usual."""
    mapping = entry.get("message_property_mappings", {})
    mapping = dict(mapping) if isinstance(mapping, Mapping) else {}
    named = {
        "messages": entry.get("field_messages"),
        "role": mapping.pop("role", entry.get("message_field_role")),
        "content": mapping.pop("content", entry.get("message_field_content")),
        "tools": entry.get("field_tools"),
    }
    thinking = entry.get("template_thinking_key", _THINKING)
    mapping[thinking] = entry.get("field_thinking", mapping.get(thinking, thinking))
    if other := [f"{key}: {name}" for key, name in mapping.items() if key != name]:
        text = f"name the key in the rows as the template does ({', '.join(other)})"
        translation.leave_out(f"{key_prefix}.message_property_mappings", text)
    roles = _roles(translation, key_prefix, entry)
    return {name: str(column) for name, column in {**named, **roles}.items() if column}


def _roles(translation: Translation, key_prefix: str, entry: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of roles in rows that differ from the usual ones; each role has one."""
    roles = entry.get("roles", {})
    other: dict[str, str] = {}
    for role, names in roles.items() if isinstance(roles, Mapping) else ():
        every = [str(name) for name in (names if isinstance(names, list) else [names])]
        unusual = [name for name in every if name not in (role, *_ROLES.get(role, ()))]
        if len(unusual) > 1 or (unusual and role not in _ROLES):
            text = f"rename them to {role} in the rows ({', '.join(unusual)})"
            translation.leave_out(f"{key_prefix}.roles", text)
        elif unusual:
            other[role] = unusual[0]
    return other


def _custom_prompt(kind: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of ``data`` for a prompt that the file writes out.

    Rows may lack the columns of the input and of the system text.
    """
    columns = {name: str(kind.get(f"field_{name}") or name) for name in _TEXTS}
    text = str(kind.get("format", "{instruction}"))
    if "no_input_format" in kind:
        text = _with_or_without_input(text, str(kind["no_input_format"]), columns)
    else:
        text = _in_jinja(text, columns)
    source: dict[str, Any] = {"prompt_format": _system_text(kind, columns) + text}
    fields = {name: column for name, column in columns.items() if not column.isidentifier()}
    if kind.get("field_output"):
        fields["completion"] = str(kind["field_output"])
    return {**source, "fields": fields} if fields else source


def _system_text(kind: Mapping[str, Any], columns: Mapping[str, str]) -> str:
    """Return the beginning of a prompt: the system text of the row, else that of the file."""
    default = str(kind.get("system_prompt") or "")
    if not default and not kind.get("field_system"):
        return ""
    written = str(kind.get("system_format") or "{system}")
    otherwise = written.replace("{system}", default) if default else ""
    return _either("system", _in_jinja(written, columns), otherwise, columns)
