"""Chat templates and prompt formats by name, by file or as text.

The templates are written for training: marks say what the assistant writes. Each is what the named
models expect; their tokens, such as ``<|im_end|>``, are single tokens only if the tokenizer has
them.
"""

from __future__ import annotations

from collections.abc import Mapping

from axonlaunch.config.problems.errors import ConfigError, ConfigIssue, one_of
from axonlaunch.system.storage.files import read_text
from axonlaunch.system.storage.home import expand_home

_LARGEST = 1 << 20
_JINJA = ("{{", "{%")


def _turns(
    start: str,
    end: str,
    *,
    names: dict[str, str] | None = None,
    after: str = "",
    trims: bool = False,
) -> str:
    """Return a template that writes each message as ``start``, its content and ``end``.

    Args:
        start: Text before the content; ROLE stands for the role.
        end: Text after the content, as an expression of Jinja.
        names: Names of roles in the text, where they differ.
        after: Text between turns, which does not count.
        trims: Whether white space around the content is left out.
    """
    shown = "message['role']"
    if names is not None:
        shown = f"{names!r}[message['role']]"
    prefix, _, behind = start.partition("ROLE")
    content = f"message['content']{' | trim' if trims else ''}"
    opened = f"{{{{ {prefix!r} + {shown} + {behind!r} }}}}"
    assistant = (names or {}).get("assistant", "assistant")
    return (
        f"{{% for message in messages %}}{opened}"
        "{% if message['role'] == 'assistant' %}"
        f"{{% generation %}}{{{{ {content} + {end} }}}}{{% endgeneration %}}"
        f"{{% else %}}{{{{ {content} + {end} }}}}{{% endif %}}{{{{ {after!r} }}}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{{{{ {prefix + assistant + behind!r} }}}}{{% endif %}}"
    )


def _instructions(question: str, answer: str) -> str:
    """Return a template with an optional system text, and headings for questions and answers.

    Args:
        question: Text of a question; {content} stands for the message.
        answer: Text before an answer.
    """
    prefix, after = question.split("{content}")
    return (
        "{% for message in messages %}"
        "{% if message['role'] == 'system' and loop.first %}"
        "{{ message['content'] + '\n\n' }}"
        "{% elif message['role'] == 'user' %}"
        f"{{{{ {prefix!r} + message['content'] + {after!r} }}}}"
        "{% elif message['role'] == 'assistant' %}"
        f"{{{{ {answer!r} }}}}{{% generation %}}"
        "{{ message['content'] + eos_token }}{% endgeneration %}{{ '\n\n' }}"
        "{% else %}{{ raise_exception('it has no turn for the role ' + message['role']) }}"
        "{% endif %}{% endfor %}"
        f"{{% if add_generation_prompt %}}{{{{ {answer!r} }}}}{{% endif %}}"
    )


_BOS = "{{ bos_token }}"
TEMPLATES = {
    "chatml": _turns("<|im_start|>ROLE\n", "'<|im_end|>'", after="\n"),
    "llama3": _BOS
    + _turns("<|start_header_id|>ROLE<|end_header_id|>\n\n", "'<|eot_id|>'", trims=True),
    "gemma": _BOS
    + _turns(
        "<start_of_turn>ROLE\n",
        "'<end_of_turn>'",
        names={"user": "user", "assistant": "model"},
        after="\n",
        trims=True,
    ),
    "phi3": _turns("<|ROLE|>\n", "'<|end|>'", after="\n"),
    "zephyr": _turns("<|ROLE|>\n", "eos_token", after="\n"),
    "alpaca": _BOS + _instructions("### Instruction:\n{content}\n\n", "### Response:\n"),
}
"""Chat templates by name, in Jinja."""

_BELOW = (
    "Below is an instruction that describes a task{% if input is defined and input %}, paired with "
    "an input that provides further context{% endif %}. Write a response that appropriately "
    "completes the request."
)
_ASKED = "{{ instruction if instruction is defined else prompt }}"
PROMPT_FORMATS = {
    "alpaca": (
        "{% if system is defined and system %}{{ system }}{% else %}" + _BELOW + "{% endif %}"
        f"\n\n### Instruction:\n{_ASKED}"
        "{% if input is defined and input %}\n\n### Input:\n{{ input }}{% endif %}"
        "\n\n### Response:\n"
    ),
    "dolly": (
        _ASKED + "{% if context is defined and context %}\n\nContext: {{ context }}{% endif %}"
        "\n\nAnswer:\n"
    ),
    "question": "Question: {{ question if question is defined else prompt }}\n\nAnswer:\n",
}
"""Prompt formats by name, in Jinja."""


def chat_template(value: str) -> str:
    """Return the template that ``data.chat_template`` names.

    Raises:
        ConfigError: There is no such name and no such file.
    """
    if value in TEMPLATES:
        return TEMPLATES[value]
    if is_jinja(value):
        return value
    return _read(value, "data.chat_template", [*TEMPLATES])


def prompt_format(value: str) -> str:
    """Return the text that ``data.prompt_format`` names.

    Raises:
        ConfigError: There is no such name and no such file.
    """
    if value in PROMPT_FORMATS:
        return PROMPT_FORMATS[value]
    if "{" in value:
        return value
    return _read(value, "data.prompt_format", [*PROMPT_FORMATS])


def ignored_columns(value: str, fields: Mapping[str, str]) -> frozenset[str]:
    """Return the columns that an included format would prefer to ``data.fields={prompt: NAME}``."""
    if value not in PROMPT_FORMATS or "prompt" not in fields:
        return frozenset()
    return frozenset({"instruction", "question"} - fields.keys())


def is_jinja(text: str) -> bool:
    """Return whether a text is in Jinja's syntax."""
    return any(mark in text for mark in _JINJA)


def _read(value: str, key: str, names: list[str]) -> str:
    path = expand_home(value)
    try:
        return read_text(path, at_most=_LARGEST)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        message = f"can't be read as a file: {reason}; use {one_of([*names, 'a file or a text'])}"
        raise ConfigError([ConfigIssue(key, message, value)]) from None
