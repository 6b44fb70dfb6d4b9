"""Sets the sources, the chat template and the tokens of the data."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from axonlaunch.config.options.tokenizer import SPECIAL
from axonlaunch.config.validation.other_tools.translation import Translation


def set_sources(translation: Translation, sources: Sequence[Mapping[str, Any]], key: str) -> None:
    """Set the data by its sources; several are mixed, each row once in an epoch.

    Args:
        sources: Keys of ``data`` for each source; ``data`` among them is the kind of its rows.
        key: Key that lists the sources.
    """
    kinds = {source["data"] for source in sources}
    kind = "chat" if kinds != {"documents"} else "documents"
    translation.option("data", kind, key)
    if len(sources) == 1:
        for name, value in sources[0].items():
            if name not in ("data", "epochs"):
                translation.set(f"data.{name}", value, key)
        if sources[0].get("epochs", 1) != 1:
            text = "is a share of the rows; data.limit sets a number of rows"
            translation.leave_out(key, text)
        return
    names: list[str] = []
    for source in sources:
        name = _name_of(source, names)
        names.append(name)
        shown = {k: v for k, v in source.items() if k != "data" or v != kind}
        for option, value in shown.items():
            translation.set(f"data.mix.{name}.{option}", value, key)


def set_held_out_files(translation: Translation, held_out: Mapping[str, Any], key: str) -> None:
    """Hold out the rows of files, which in a mix are read like the rows of its first source.

    Args:
        translation: Translation with the sources of the data.
        held_out: Keys of ``data.held_out``.
        key: Key that lists the files.
    """
    of_mix = next((name for name in translation.settings if name.startswith("data.mix.")), None)
    if of_mix is None:
        translation.set("data.held_out", held_out, key)
        return
    first = of_mix.rpartition(".")[0]
    translation.set("data.held_out", 0, key)
    translation.set(f"{first}.held_out", held_out, key, note="read like the rows of this source")


def _name_of(source: Mapping[str, Any], taken: list[str]) -> str:
    files = source.get("files") or ["source"]
    last = str(files[0]).rstrip("/").rsplit("/", 1)[-1].split("@")[0].split(".")[0]
    name = "".join(c if c.isalnum() else "_" for c in last).strip("_") or "source"
    number, chosen = 1, name
    while chosen in taken:
        number += 1
        chosen = f"{name}_{number}"
    return chosen


def set_in_order(translation: Translation, key: str) -> None:
    """Keep the order of the rows, after the data and its packing are set.

    Args:
        key: Key that says so.
    """
    if any(name.startswith("data.mix.") for name in translation.settings):
        translation.leave_out(key, "data.mix is shuffled over all its sources")
        return
    translation.set("data.shuffle", "none", key)
    packing = translation.settings.get("data.packing")
    if packing is not None and packing.value == "best_fit":
        translation.set("data.packing", "concat", *packing.keys)
        text = "rows are filled in the order of the files, so one chat may be in two of them"
        translation.note(key, text)


def set_template(translation: Translation, key: str, model: str) -> None:
    """Set the chat template by the name that another tool has for it.

    A name of the model's family stands for the template in the model's tokenizer.

    Args:
        key: Key with the name, or with a template in Jinja.
        model: Path or id of the model.
    """
    written = str(translation.get(key))
    if "{{" in written or "{%" in written:
        translation.set("data.chat_template", written, key)
    elif written in _TEMPLATES:
        translation.set("data.chat_template", _TEMPLATES[written], key)
    elif re.fullmatch(r"qwen3.*_nothink", written):
        translation.set("data.chat_template", "chatml", key)
    elif _is_of_family(written, model):
        translation.not_needed.append(key)
    else:
        text = "the tokenizer's template is used; data.chat_template takes a file with another one"
        translation.leave_out(key, text)


def translate_special_tokens(translation: Translation, prefix: str = "") -> None:
    """Set the special tokens by keys such as ``eos_token``.

    Args:
        prefix: Beginning of the keys, ``special_tokens.``.
    """
    keys = {name: f"{prefix}{name}_token" for name in SPECIAL}
    tokens = {name: str(translation.get(key)) for name, key in keys.items() if translation.has(key)}
    if tokens:
        translation.set("tokenizer.special", tokens, *(keys[name] for name in tokens))


ALPACA = (
    "Below is an instruction that describes a task{% if input is defined and input %}, paired with "
    "an input that provides further context{% endif %}. Write a response that appropriately "
    "completes the request.\n\n### Instruction:\n{{ instruction }}"
    "{% if input is defined and input %}\n\n### Input:\n{{ input }}{% endif %}\n\n### Response:\n"
)
"""Prompt of a row of Alpaca, in Jinja."""

_TEMPLATES = {
    **{name: name for name in ("chatml", "llama3", "gemma", "zephyr", "alpaca")},
    **dict.fromkeys(("phi_3", "phi_35", "phi3", "phi"), "phi3"),
}


def _is_of_family(template: str, model: str) -> bool:
    """Return whether a template is for a family of models: ``deepseek3`` for ``DeepSeek-V3``.

    A family whose version follows its name has to have the template's version.
    """
    name, letters = _letters(template.split("_")[0]), _letters(model)
    family = name.rstrip("0123456789")
    if name in letters or not family:
        return name in letters
    _, found, after = letters.rpartition(family)
    return bool(found) and not after[:1].isdigit()


def _letters(text: str) -> str:
    return "".join(c for c in text.lower() if c.isalnum())
