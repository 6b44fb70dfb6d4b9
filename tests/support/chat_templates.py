"""Chat templates in the ways that published models write them."""

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Qwen2.5's, without its default system message."""
MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The same with marks, as SmolLM3's."""
INSTRUCT = (
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ ' ' + message['content'] + eos_token }}{% else %}"
    "{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
"""Mistral's, that asks for an answer by no text of its own and refuses other roles."""
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
"""Qwen3's: the last answer alone has its reasoning, or an empty one."""
SILENT = (
    "{% for message in messages %}{% if message['role'] in ('user', 'assistant') %}"
    "{{ message['role'] + ': ' + message['content'] + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
"""Leaves out roles that it does not know."""
FIRST_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\n' }}{% endif %}"
    + SILENT
)
"""Has a place for one system message; others are lost, though their words may be elsewhere."""
AGENT = REASONING.replace(
    "{{ content.strip()",
    "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}"
    "{% if message.reasoning_content and loop.last %}{{ message.reasoning_content }}{% endif %}"
    "{{ content.strip()",
)
"""As Qwen3's, with calls of tools, and with the reasoning of the last answer alone."""
CHANGING = (
    "{% for message in messages %}{{ message['role'] ~ ' of ' ~ (messages | length > 2) ~ ': ' "
    "~ message['content'] ~ '\n' }}{% endfor %}"
)
"""Writes each message of a longer chat in another way."""
