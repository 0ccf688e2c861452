# SPDX-License-Identifier: Apache-2.0
"""What tests of chats share: records, their rows in ChatML, and fixtures that look at what `prepare` says.

`role: text` is a message, `role! text` one with loss on its text and its end.
"""

import pytest

# Writes schemas of tools, every key of a message that it does not know, and a thought if it is told to.
CURIOUS = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }};{% endfor %}<|im_end|>
{% endif -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.role == 'assistant' and mood is defined %}({{ mood }}) {% endif -%}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}<call>{{ call.function.name }} {{ call.function.arguments }}</call>{% endfor -%}
{%- if message.stance %} [{{ message.stance }}]{% endif -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if mood is defined %}({{ mood }}) {% endif %}{% endif -%}
"""

ASKS = {"role": "user", "content": "How deep is the lake?"}
TELLS = {"role": "assistant", "content": "Nine metres."}


def chatml(*turns):
    texts = []
    for turn in turns:
        role = turn[: min(turn.index(mark) for mark in ":!" if mark in turn)]
        text = turn[len(role) + 2 :] + "<|im_end|>"
        texts.append(f"<|im_start|>{role}\n" + (f"«{text}»" if turn[len(role)] == "!" else text))
    return "\n".join(texts)


PLAIN = chatml("user: How deep is the lake?", "assistant! Nine metres.")


def asks(*messages, **fields):
    """A record whose messages begin with the question."""
    return {"messages": [ASKS, *messages], **fields}


def call(name="dive", arguments='{"metres": 9}', **more):
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}, **more}


def schema(name, **properties):
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


@pytest.fixture
def refused(prepare, capsys):
    """Runs `prepare`, which has to refuse the record with these words."""

    def run(record, *words, model="native"):
        assert prepare(model, [record]) == (1, None)
        error = capsys.readouterr().err
        for word in ("chats.jsonl:1: ", *words):
            assert word in error.splitlines()[-1]

    return run


@pytest.fixture
def notes(capsys):
    """The lines of standard error since the last look that say more than every run does."""

    def run():
        lines = [line.removeprefix("prepare: ") for line in capsys.readouterr().err.splitlines()]
        return [
            line
            for line in lines
            if not line.startswith(("tool calls: ", "tool results: ", "wrote ")) and " flat tokens, " not in line
        ]

    return run
