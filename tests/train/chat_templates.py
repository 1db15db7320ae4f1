"""Chat templates with the branches of those in use: each with ``{% generation %}`` around an assistant's whole turn."""

import re

SPECIAL = [
    "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<|eom_id|>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<bos>",
    "<start_of_turn>", "<end_of_turn>",
]  # fmt: skip

CHATML = """
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' %}
    {%- generation %}{{- m.content + '<|im_end|>\\n' }}{%- endgeneration %}
{%- else %}
    {{- m.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

QWEN = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n<tools>' }}{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
        {%- if m.content %}{{- m.content }}{%- endif %}
        {%- for call in m.tool_calls or [] %}
            {%- set call = call.function if call.function else call %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}{{- call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
        {%- endgeneration %}
    {%- elif m.role == 'tool' %}
        {%- if loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

LLAMA = """
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + ('Tools: ipython\\n' if tools else '') }}
{{- system + '<|eot_id|>' }}
{%- if tools %}
    {%- set first = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\nAnswer by a call of:\\n' }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) + '\\n\\n' }}{%- endfor %}
    {{- first + '<|eot_id|>' }}
{%- endif %}
{%- for m in messages %}
    {%- if 'tool_calls' in m %}
        {%- if m.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {%- generation %}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- '}<|eot_id|>' }}
        {%- endgeneration %}
    {%- elif m.role in ('tool', 'ipython') %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {{- m.content if m.content is string else m.content | tojson }}{{- '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' }}
        {%- if m.role == 'assistant' %}
            {%- generation %}{{- m['content'] | trim + '<|eot_id|>' }}{%- endgeneration %}
        {%- else %}
            {{- m['content'] | trim + '<|eot_id|>' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

MISTRAL = """
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set rest = messages %}
{%- endif %}
{{- bos_token }}
{%- for m in rest %}
    {%- if m.role == 'user' %}
        {%- if WHERE and system is defined %}
            {{- '[INST] ' + system + '\\n\\n' + m.content + '[/INST]' }}
        {%- else %}
            {{- '[INST] ' + m.content + '[/INST]' }}
        {%- endif %}
    {%- elif m.tool_calls is defined and m.tool_calls is not none %}
        {%- generation %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in m.tool_calls %}{{- call.function | tojson }}{{- ', ' if not loop.last else ']' }}{%- endfor %}
        {{- eos_token }}
        {%- endgeneration %}
    {%- elif m.role == 'assistant' %}
        {%- generation %}{{- ' ' + m.content | trim + eos_token }}{%- endgeneration %}
    {%- elif m.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' }}{{- m.content | tojson }}{{- '}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}"""
MISTRAL_LAST = MISTRAL.replace("WHERE", "loop.last")
"""Writes the system prompt into the last message, if that is the user's: before an answer, and never after it."""
MISTRAL = MISTRAL.replace("WHERE", "loop.first")

GEMMA = """
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}{{- raise_exception('no system role') }}{%- endif %}
{%- for m in messages %}
    {%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}
    {{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}
    {%- if m.role == 'assistant' %}
        {%- generation %}{{- m['content'] | trim + '<end_of_turn>\\n' }}{%- endgeneration %}
    {%- else %}
        {{- m['content'] | trim + '<end_of_turn>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"""

THINKING = """
{%- set seen = namespace(last=0) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set seen.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.role == 'assistant' %}
        {%- generation %}
        {%- if loop.index0 > seen.last %}
            {{- '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- m.content + '<|im_end|>\\n' }}
        {%- endgeneration %}
    {%- else %}
        {{- m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
"""Leaves the thinking out of the turns before the last user's message."""


def bare(template: str) -> str:
    """The same text, without ``{% generation %}``."""
    return re.sub(
        r"\{%(-?) (end)?generation (-?)%\}",
        lambda tag: f"{{%{tag[1]} {'endif' if tag[2] else 'if true'} {tag[3]}%}}",
        template,
    )
