"""Datasets of axolotl's configurations."""

from __future__ import annotations

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


def _with_or_without_input(text: str, without: str) -> str:
    chosen = f"{_in_jinja(text)}{{% else %}}{_in_jinja(without)}"
    return f"{{% if {_HAS_INPUT} %}}{chosen}{{% endif %}}"


def _in_jinja(text: str) -> str:
    for name in ("instruction", "input", "system"):
        text = text.replace(f"{{{name}}}", f"{{{{ {name} }}}}")
    return text


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
_USUAL_ROLES = ("user", "human", "assistant", "gpt", "tool")
_FILE_KINDS = ("json", "jsonl", "csv", "parquet", "arrow", "text")
_KNOWN = {
    *("path", "type", "name", "split", "data_files", "ds_type", "shards", "train_on_split"),
    *("field", "text_column", "field_messages", "message_property_mappings", "revision"),
    *("message_field_role", "message_field_content", "roles", "roles_to_train", "conversation"),
    *("message_field_training", "message_field_training_detail", "trust_remote_code", "skip"),
    *("train_on_eos", "train_on_eot", "chat_template", "field_tools", "field_system"),
    *("field_thinking", "template_thinking_key", "drop_system_message", "field_human"),
}
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
        translation.set("data.packing", "best_fit", "sample_packing")
    elif key == "pretraining_dataset":
        translation.set("data.packing", "concat", key)
    else:
        translation.set("data.packing", "none", "sample_packing")
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
        translation.set("data.held_out", held_out, "test_datasets")
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
    translation: Translation, place: str, key: str, entry: dict[str, Any]
) -> dict[str, Any]:
    """Return the keys of ``data`` for one entry of ``datasets``."""
    entry = {name: value for name, value in entry.items() if value is not None}
    for name in entry:
        if name in _PREFERENCES:
            translation.leave_out(f"{place}.{name}", reasons.NO_PREFERENCES)
        elif name not in _KNOWN:
            translation.report_unknown(f"{place}.{name}")
    roles = entry.get("roles_to_train", ["assistant"])
    if roles not in (["assistant"], ["gpt"], ["assistant", "gpt"], ["gpt", "assistant"]):
        text = "answers of the assistant count, or with data.train_on=all every token"
        translation.leave_out(f"{place}.roles_to_train", text)
    if entry.get("drop_system_message") is True:
        translation.leave_out(f"{place}.drop_system_message", "remove them from the rows")
    path, files = str(entry.get("path")), entry.get("data_files")
    source: dict[str, Any] = {"data": "chat", "files": [path]}
    if files and path in _FILE_KINDS:
        source["files"] = files if isinstance(files, list) else [str(files)]
    elif files:
        named = files if isinstance(files, list) else [files]
        source["files"] = [f"hf://datasets/{path}/{file}" for file in named]
    if entry.get("revision") and not files:
        source["files"] = [f"{path}@{entry['revision']}"]
    is_hub_id = source["files"] == [path] and path.count("/") == 1 and not path.startswith(".")
    for theirs, ours in (("name", "subset"), ("split", "split")):
        if theirs in entry and (is_hub_id or entry[theirs] != "train"):
            source[ours] = str(entry[theirs])
    if "shards" in entry:
        translation.leave_out(f"{place}.shards", "is a part of the rows; set data.limit")
    _set_type(translation, place, key, entry, source)
    return source


def _set_type(
    translation: Translation,
    place: str,
    key: str,
    entry: dict[str, Any],
    source: dict[str, Any],
) -> None:
    kind = entry.get("type", "pretrain" if key == "pretraining_dataset" else "chat_template")
    if isinstance(kind, Mapping):
        source.update(_custom_prompt(kind))
    elif kind in _CHATS:
        if fields := _message_fields(entry):
            source["fields"] = fields
    elif kind in _DOCUMENTS:
        source["data"] = "documents"
        source["text_field"] = str(entry.get("field", entry.get("text_column", "text")))
    elif kind in _PROMPTS:
        source.update(_PROMPTS[kind])
    elif not translation.flag("rl"):  # which is reported
        text = "has no counterpart; write the prompt in data.prompt_format, or name data.fields"
        translation.leave_out(f"{place}.type", text)


def _message_fields(entry: Mapping[str, Any]) -> dict[str, str]:
    mapping = entry.get("message_property_mappings", {})
    mapping = mapping if isinstance(mapping, Mapping) else {}
    named = {
        "messages": entry.get("field_messages"),
        "role": mapping.get("role", entry.get("message_field_role")),
        "content": mapping.get("content", entry.get("message_field_content")),
        "tools": entry.get("field_tools"),
    }
    return {name: str(column) for name, column in {**named, **_roles(entry)}.items() if column}


def _roles(entry: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of roles in rows that differ from the usual ones."""
    roles = entry.get("roles", {})
    other: dict[str, str] = {}
    for role, names in roles.items() if isinstance(roles, Mapping) else ():
        for name in names if isinstance(names, list) else [names]:
            if role in ("user", "assistant", "tool") and name not in _USUAL_ROLES:
                other[role] = str(name)
    return other


def _custom_prompt(kind: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of ``data`` for a prompt that the file writes out."""
    text = str(kind.get("format", "{instruction}"))
    names = {
        "instruction": kind.get("field_instruction"),
        "input": kind.get("field_input"),
        "completion": kind.get("field_output"),
        "system": kind.get("field_system"),
    }
    if "no_input_format" in kind:
        text = _with_or_without_input(text, str(kind["no_input_format"]))
    fields = {name: str(column) for name, column in names.items() if column}
    return {"prompt_format": text, "fields": fields} if fields else {"prompt_format": text}
