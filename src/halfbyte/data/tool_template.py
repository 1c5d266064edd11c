"""Extend a chat template that does not support tools: they become plain text, as `chat.ChatTemplate.adapt_messages`
writes it for training.

The extension is Jinja in front of the template. It rewrites `messages` as `adapt_messages` does, so the saved tokenizer
renders `tools=` as the run was trained. It also moves a system message into the first user turn if the template does
not support the role. It uses dictionaries, lists and namespaces only, which inference servers' Jinja engines support.
"""

from __future__ import annotations

TOOLS_HEADER = "You can call these functions by answering with their name and arguments as JSON:"

# Each block ends with a newline, which `trim_blocks` drops, so the template starts on a line of its own.
_EACH_TURN = """\
{%- set hb = namespace(turns=[], turn=none, text='', merged=false) %}
{%- for turn in messages %}
{%- set hb.turn = turn %}
"""
_CALLS = """\
{%- if turn.tool_calls %}
{%- set hb.text = turn.content or '' %}
{%- for call in turn.tool_calls %}
{%- set function = call.function or call %}
{%- set arguments = function.arguments if function.arguments is string else (function.arguments or {}) | tojson %}
{%- set hb.text = hb.text + ('' if loop.first else '\\n') + '{"name": ' + (function.name | tojson) + ', "arguments": ' \
+ arguments + '}' %}
{%- endfor %}
{%- if turn.reasoning_content %}
{%- set hb.turn = {'role': turn.role, 'content': hb.text, 'reasoning_content': turn.reasoning_content} %}
{%- else %}
{%- set hb.turn = {'role': turn.role, 'content': hb.text} %}
{%- endif %}
{%- endif %}
"""
_RESULTS = """\
{%- if turn.role == 'tool' %}
{%- set hb.turn = {'role': 'user', 'content': turn.content} %}
{%- endif %}
"""
_APPEND = """\
{%- set hb.turns = hb.turns + [hb.turn] %}
"""
_MERGE = """\
{%- if hb.turns and hb.turn.role == 'user' and hb.turns[-1].role == 'user' and (turn.role == 'tool' or hb.merged) %}
{%- set hb.turns = hb.turns[:-1] + [{'role': 'user', 'content': hb.turns[-1].content + '\\n\\n' + hb.turn.content}] %}
{%- else %}
{%- set hb.turns = hb.turns + [hb.turn] %}
{%- set hb.merged = false %}
{%- endif %}
{%- if turn.role == 'tool' %}
{%- set hb.merged = true %}
{%- endif %}
"""
_END_OF_TURN = """\
{%- endfor %}
"""
_TOOLS = """\
{%- if tools and hb.turns %}
{%- set hb.text = 'HEADER' %}
{%- for tool in tools %}
{%- set hb.text = hb.text + '\\n' + ((tool.function or tool) | tojson) %}
{%- endfor %}
{%- if hb.turns[0].role == 'system' %}
{%- set hb.text = hb.turns[0].content + '\\n\\n' + hb.text %}
{%- set hb.turns = hb.turns[1:] %}
{%- endif %}
{%- set hb.turns = [{'role': 'system', 'content': hb.text}] + hb.turns %}
{%- set tools = none %}
{%- endif %}
""".replace("HEADER", TOOLS_HEADER)
_SYSTEM = """\
{%- if hb.turns and hb.turns[0].role == 'system' %}
{%- set hb.text = hb.turns[0].content %}
{%- set hb.turns = hb.turns[1:] %}
{%- if hb.turns and hb.turns[0].role == 'user' %}
{%- set hb.text = hb.text + '\\n\\n' + hb.turns[0].content %}
{%- set hb.turns = hb.turns[1:] %}
{%- endif %}
{%- set hb.turns = [{'role': 'user', 'content': hb.text}] + hb.turns %}
{%- endif %}
"""
_USE = """\
{%- set messages = hb.turns %}
"""


def with_tools(
    template: str, *, tools: bool, tool_calls: bool, tool_results: bool, system: bool, alternating: bool
) -> str:
    """Return the chat template, extended to write unsupported tools, calls, results and system messages as plain text.

    Args:
        tools, tool_calls, tool_results, system: whether the template writes them by itself.
        alternating: whether it refuses two user turns in a row.
    """
    if tools and tool_calls and tool_results:
        return template
    blocks = [
        _EACH_TURN,
        "" if tool_calls else _CALLS,
        "" if tool_results else _RESULTS,
        _MERGE if alternating and not tool_results else _APPEND,
        _END_OF_TURN,
        "" if tools else _TOOLS,
        "" if system else _SYSTEM,
        _USE,
    ]
    return "".join(blocks) + template
