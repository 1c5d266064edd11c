"""Extension of a chat template without tools: tools, calls and results become the text that training writes for them.

`chat.ChatTemplate.adapt_messages` rewrites rows for such a template, and system messages for a template without these.
The extension does the same in Jinja, before the template's own text, so that the saved tokenizer renders `tools=` as
the run was trained. Only dictionaries, lists and
namespaces are used, which the Jinja engines of inference servers have, too.
"""

from __future__ import annotations

TOOLS_HEADER = "You can call these functions by answering with their name and arguments as JSON:"

# Each block ends with a newline, which `trim_blocks` drops: the template behind it begins on a line of its own.
_EACH = """\
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
_END_EACH = """\
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
    """Return the chat template with what it lacks written as plain text.

    Args:
        tools, tool_calls, tool_results, system: whether the template writes them by itself.
        alternating: whether it refuses two user turns in a row.
    """
    if tools and tool_calls and tool_results:
        return template
    each = [_EACH, "" if tool_calls else _CALLS, "" if tool_results else _RESULTS]
    each += [_MERGE if alternating and not tool_results else _APPEND, _END_EACH]
    first = ["" if tools else _TOOLS, "" if system else _SYSTEM]
    return "".join([*each, *first, _USE, template])
