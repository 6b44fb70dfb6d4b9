"""Chat templates in the ways that published models write them."""

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Qwen2.5's template, without its default system message."""
MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The same template with generation marks, as in SmolLM3."""
INSTRUCT = (
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ ' ' + message['content'] + eos_token }}{% else %}"
    "{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
"""Mistral's template: it has no generation prompt and refuses other roles."""
REASONING = (
    "{% set last = namespace(user=-1) %}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}{% set content = message['content'].split('</think>')[-1] %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and loop.index0 > last.user %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ content.strip() + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Qwen3's template: only the last answer has its reasoning, or an empty reasoning block."""
SILENT = (
    "{% for message in messages %}{% if message['role'] in ('user', 'assistant') %}"
    "{{ message['role'] + ': ' + message['content'] + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
"""Leaves out messages with unknown roles."""
FIRST_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\n' }}{% endif %}"
    + SILENT
)
"""Renders at most one system message. Others are lost, although their words may occur elsewhere."""
AGENT = REASONING.replace(
    "{{ content.strip()",
    "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}"
    "{% if message.reasoning_content and loop.last %}{{ message.reasoning_content }}{% endif %}"
    "{{ content.strip()",
)
"""Like Qwen3's template, with tool calls and only the last answer's reasoning."""
CHANGING = (
    "{% for message in messages %}{{ message['role'] ~ ' of ' ~ (messages | length > 2) ~ ': ' "
    "~ message['content'] ~ '\n' }}{% endfor %}"
)
"""Renders each message of a longer chat in a different way."""
