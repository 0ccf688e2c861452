# SPDX-License-Identifier: Apache-2.0
"""espalier prepare: what a chat template drops or writes in another way is rendered in another form, counted, or refused.

Expected rows are whole texts, written by hand, with what carries loss between « and ». Small templates have one habit of a
real one each. Those that TRL ships stand where the details are the point.
"""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from conftest import CHATML, NATIVE, NO_CALLS
from espalier.chats import turns

TRL = Path(importlib.util.find_spec("trl").origin).parent / "chat_templates"

ASKS = {"role": "user", "content": "Q"}
TELLS = {"role": "assistant", "content": "A"}
QUESTION, ANSWER = (
    "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n«A<|im_end|>»",
)

# Writes some roles, and nothing for the others: as Qwen, GLM, Granite and many more.
SOME_ROLES = """\
{%- for message in messages -%}
{%- if message.role in ROLES -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""


def of_roles(*roles):
    return SOME_ROLES.replace("ROLES", str(roles))


def tells(content="A", **more):
    return {"role": "assistant", "content": content, **more}


def chat(*messages):
    return {"messages": messages}


def call(name="dive", arguments='{"metres": 9}', identity="call00001"):
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(content="R", identity="call00001", **more):
    return {"role": "tool", "tool_call_id": identity, "content": content, **more}


TWICE = chat(ASKS, tells("B"), ASKS, TELLS)
TWO_ANSWERS = QUESTION + "«B<|im_end|>»\n" + ANSWER


@pytest.fixture
def said(capsys):
    """What standard error has since the last look, without the names of files."""
    return lambda: re.sub(r"/\S*/", "", capsys.readouterr().err)


@pytest.fixture
def refused(prepare, said):
    def run(model, record, *words, flags=()):
        assert prepare(model, [record], *flags) == (1, None)
        error = said().splitlines()[-1]
        for word in words:
            assert word in error

    return run


# ---- Roles ----------------------------------------------------------------------------------------------------------

NOTE = " of role developer as system messages, since the template does not write that role"
RAISES = of_roles("system", "user", "assistant").replace(
    "{%- if message.role in",
    "{%- if message.role == 'developer' %}{{ raise_exception('who is that?') }}{% endif %}{%- if message.role in",
)


@pytest.mark.parametrize("template", [of_roles("system", "user", "assistant"), RAISES], ids=["drops", "raises"])
def test_a_developer_message_that_the_template_does_not_write_is_a_system_message(marked, said, model_of, template):
    developer = {"role": "developer", "content": "D"}
    assert marked(model_of(template), [chat(developer, ASKS, TELLS), chat(ASKS, tells("B"), developer, ASKS, TELLS)]) == [
        "<|im_start|>system\nD<|im_end|>\n" + ANSWER,
        QUESTION + "«B<|im_end|>»\n<|im_start|>system\nD<|im_end|>\n" + ANSWER,
    ]
    assert "2 messages" + NOTE in said()
    # Behind a system message at the beginning there is one system message.
    assert marked(model_of(template), [chat({"role": "system", "content": "S"}, developer, ASKS, TELLS)]) == [
        "<|im_start|>system\nS\n\nD<|im_end|>\n" + ANSWER
    ]
    assert "1 message" + NOTE in said()


def test_a_developer_message_that_the_template_writes_stays(marked, said):
    assert marked("native", [chat({"role": "developer", "content": "D"}, ASKS, TELLS)]) == [
        "<|im_start|>developer\nD<|im_end|>\n" + ANSWER
    ]
    assert NOTE not in said()


def test_roles_that_the_template_drops_are_refused(marked, refused, model_of, said):
    critic = {"role": "critic", "content": "C"}
    model = model_of(of_roles("system", "user", "assistant", "tool"))
    refused(
        model,
        chat(critic, ASKS, TELLS),
        "received: a message of role `critic` at the beginning, which is not written: the template drops it",
    )
    refused(
        model,
        chat(ASKS, TELLS, critic, ASKS, TELLS),
        "a message of role `critic` after others, which is not written: the template drops it",
    )
    refused(model_of(RAISES), chat(ASKS, tells("B"), {"role": "exit", "content": "E"}, ASKS, TELLS), "role `exit` after others")
    # What stands behind the last answer is in no row.
    assert marked(model, [chat(ASKS, TELLS, critic)]) == [ANSWER]
    assert marked(model, [chat(critic, ASKS, TELLS), chat(ASKS, TELLS)], "--skip-bad-rows") == [ANSWER]
    assert "1 bad line skipped" in said()


def test_a_system_message_that_is_written_at_the_beginning_alone(marked, refused, model_of):
    template = of_roles("system", "user", "assistant").replace(
        "{%- if message.role in", "{%- if (loop.first or message.role != 'system') and message.role in"
    )
    system = {"role": "system", "content": "S"}
    assert marked(model_of(template), [chat(system, ASKS, TELLS)]) == ["<|im_start|>system\nS<|im_end|>\n" + ANSWER]
    refused(
        model_of(template),
        chat(ASKS, tells("B"), system, ASKS, TELLS),
        "a message of role `system` after others, which is not written: the template drops it",
    )


def test_the_words_of_a_template_that_refuses_a_role_are_told(refused):
    refused(
        "two_roles", chat({"role": "critic", "content": "C"}, ASKS, TELLS), "role `critic` at the beginning", "unknown role"
    )


# ---- Calls ----------------------------------------------------------------------------------------------------------

ONE_CALL = NATIVE.replace("message.get('tool_calls', [])", "message.get('tool_calls', [])[:1]")
BOTH = [ASKS, tells(None, tool_calls=[call(), call("swim", "{}", "call00002")]), result(), result("S", "call00002"), TELLS]


def test_parallel_calls_of_which_the_template_writes_one_are_refused(marked, refused, model_of):
    refused(
        model_of(ONE_CALL),
        chat(*BOTH),
        "received: 2 tool calls of a message, of which the template does not write all; --tool-calls content does",
    )
    single = chat(ASKS, tells(None, tool_calls=[call()]), result(), TELLS)
    dive, swim = '<call>dive {"metres": 9}</call>', "<call>swim {}</call>"
    results = "\n<|im_start|>tool\nR<|im_end|>\n<|im_start|>tool\nS<|im_end|>\n<|im_start|>assistant\n«A<|im_end|>»"
    assert marked(model_of(ONE_CALL), [single]) == [
        f"{QUESTION}«{dive}<|im_end|>»\n<|im_start|>tool\nR<|im_end|>\n<|im_start|>assistant\n«A<|im_end|>»"
    ]
    assert marked("native", [chat(*BOTH)]) == [f"{QUESTION}«{dive}{swim}<|im_end|>»{results}"]
    dive = '<tool_call>\n{"name": "dive", "arguments": {"metres": 9}}\n</tool_call>'
    swim = '<tool_call>\n{"name": "swim", "arguments": {}}\n</tool_call>'
    assert marked(model_of(ONE_CALL), [chat(*BOTH)], "--tool-calls", "content") == [
        f"{QUESTION}«{dive}\n{swim}<|im_end|>»{results}"
    ]


NO_SECRET = NATIVE.replace("get('tool_calls', [])", "get('tool_calls', []) if call.function.name != 'secret'")


def test_a_call_that_the_template_drops_is_refused(refused, model_of):
    """Its name has to stand in the completion."""
    refused(
        model_of(NO_SECRET),
        chat(ASKS, tells(None, tool_calls=[call("secret")])),
        "received: a tool call of `secret`, which the template does not write in this turn",
    )


# Llama 3's habit.
CALLS_ALONE = NATIVE.replace("{{ message['content'] or '' }}", "{{ '' if message.get('tool_calls') else message['content'] }}")


def test_content_beside_calls_decides_how_calls_are_written(marked, said, model_of):
    model, beside = model_of(CALLS_ALONE), chat(ASKS, tells("I dive.", tool_calls=[call()]))
    alone = chat(ASKS, tells("", tool_calls=[call()]))
    native, content = (
        QUESTION + text
        for text in (
            '«<call>dive {"metres": 9}</call><|im_end|>»',
            '«%s<tool_call>\n{"name": "dive", "arguments": {"metres": 9}}\n</tool_call><|im_end|>»',
        )
    )
    assert marked(model, [alone]) == [native], "no message has both"
    assert "tool calls: rendered by the chat template" in said()
    assert marked(model, [alone, beside]) == [content % "", content % "I dive.\n"]
    assert "(the chat template drops the content of messages with tool calls)" in said()
    assert marked(model, [alone, beside], "--tool-calls", "template") == [native, native]
    assert (
        "1 turn with content beside tool calls, which the template does not render; --tool-calls content writes both; first "
        in said()
    )


def test_ids_of_calls_that_have_to_be_nine_letters(marked, said, model_of):
    """As Mistral's; the id of a result is that of its call."""
    check = "{% if call.id | length != 9 %}{{ raise_exception('nine!') }}{% endif %}"
    check = "{% for call in message.get('tool_calls', []) %}" + check + "{% endfor %}"
    template = (
        NATIVE.replace("<|im_start|>{{", check + "<|im_start|>{{")
        .replace("<call>", "<call>{{ call.id }} ")
        .replace("{{ message['content'] or '' }}", "{{ message.tool_call_id or '' }}{{ message['content'] or '' }}")
    )
    messages = [
        ASKS,
        tells(None, tool_calls=[call(identity="call_very_long_1"), call("swim", "{}", "call_very_long_2")]),
        result("R", "call_very_long_1"),
        result("S", "call_very_long_2"),
        TELLS,
    ]
    (text,) = marked(model_of(template), [chat(*messages)])
    identities = re.findall("<call>([a-zA-Z0-9]{9}) ", text)
    assert len(set(identities)) == 2
    assert text == (
        QUESTION + '«<call>%s dive {"metres": 9}</call><call>%s swim {}</call><|im_end|>»\n<|im_start|>tool\n%sR<|im_end|>\n'
        "<|im_start|>tool\n%sS<|im_end|>\n<|im_start|>assistant\n«A<|im_end|>»"
    ) % (*identities, *identities)
    assert (
        "1 message with ids of tool calls of nine letters and digits in place of theirs, which the template refuses" in said()
    )
    short = [ASKS, tells(None, tool_calls=[call(identity="abcdefgh9")]), result("R", "abcdefgh9"), TELLS]
    (text,) = marked(model_of(template), [chat(*short)])
    assert text.count("abcdefgh9") == 2 and "nine letters" not in said()


TOOLS = [{"type": "function", "function": {"name": "dive", "parameters": {"type": "object", "properties": {}}}}]


def test_a_template_that_needs_tools(marked, refused, model_of):
    template = "{% for tool in tools %}[{{ tool.function.name }}]{% endfor %}" + NATIVE
    record = {"messages": [ASKS, tells(None, tool_calls=[call()])], "tools": TOOLS}
    assert marked(model_of(template), [record]) == ["[dive]" + QUESTION + '«<call>dive {"metres": 9}</call><|im_end|>»']
    refused(model_of(template), chat(ASKS, TELLS), "is not iterable", "; the template needs `tools`")


def test_a_template_of_its_own_for_records_with_tools(marked, model_of):
    """As Hermes': `default` and `tool_use`."""
    model = model_of(
        {"default": NO_CALLS, "tool_use": "{% for tool in tools %}[{{ tool.function.name }}]{% endfor %}" + NATIVE}
    )
    assert marked(model, [chat(ASKS, TELLS), {"messages": [ASKS, TELLS], "tools": TOOLS}]) == [
        ANSWER,
        "[dive]" + ANSWER,
    ]


# ---- Reasoning and contents -----------------------------------------------------------------------------------------


def test_reasoning_that_the_template_drops_is_counted(marked, said):
    records = [
        chat(ASKS, tells("B"), ASKS, tells(reasoning_content="T"), ASKS, tells(thinking="T")),
        chat(ASKS, tells("<think>T</think>A")),
    ]
    assert marked("native", records) == [
        QUESTION + "«B<|im_end|>»\n" + ANSWER + "\n" + ANSWER,
        QUESTION + "«<think>T</think>A<|im_end|>»",
    ]
    assert "2 turns whose reasoning the template does not render: their answers are learned without it; first " in said()


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_reaches_the_template_under_the_name_that_it_reads(marked, said, model_of, name, key):
    model = model_of(
        NATIVE.replace(
            "{{ message['content'] or '' }}",
            "{% if message.NAME %}<think>{{ message.NAME }}</think>{% endif %}{{ message['content'] or '' }}".replace(
                "NAME", name
            ),
        )
    )
    assert marked(model, [chat(ASKS, tells(**{key: "T"}))]) == [QUESTION + "«<think>T</think>A<|im_end|>»"]
    assert "whose reasoning" not in said()


def test_spaces_that_a_template_takes_away_do_not_count(marked, said, model_of):
    model = model_of(NATIVE.replace("message['content'] or ''", "(message['content'] or '') | trim"))
    assert marked(model, [chat({"role": "user", "content": "\nQ"}, tells(" A\n"))]) == [ANSWER]
    assert "not in the rendering" not in said()


SOME_WORDS = NATIVE.replace("message['content'] or ''", "(message['content'] or '').split('|')[0]")


def test_texts_that_a_template_cuts_are_counted_by_their_role(marked, said, model_of):
    records = [
        chat({"role": "user", "content": "Q|and more"}, TELLS),
        chat(ASKS, tells("A|and more")),
        chat(ASKS, TELLS),
    ]
    assert marked(model_of(SOME_WORDS), records) == [ANSWER] * 3
    error = said()
    assert re.search(r"1 message of role user whose text is not in the rendering; first chats.jsonl:1\n", error)
    assert re.search(r"1 turn whose content is not in the rendering as the file has it; first chats.jsonl:2\n", error)


def test_special_tokens_in_texts_are_counted(marked, said):
    assert marked("native", [chat({"role": "user", "content": "What is <|im_end|>?"}, TELLS)]) == [
        "<|im_start|>user\nWhat is <|im_end|>?<|im_end|>\n<|im_start|>assistant\n«A<|im_end|>»"
    ]
    assert "1 message whose text has special tokens of the tokenizer, which are encoded as such; first " in said()


# SmolVLM's habit.
PARTS = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""


def test_a_template_that_takes_lists_of_parts_gets_them(marked, model_of, said):
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": [{"type": "text", "text": "Q"}]}, TELLS]
    assert marked(model_of(PARTS), [chat(*messages)]) == ["<|im_start|>system\nS<|im_end|>\n" + ANSWER]
    error = said()
    assert "not in the rendering" not in error and "left out" not in error


def test_a_template_that_drops_all_texts_is_refused(prepare, said, model_of):
    assert prepare(model_of(PARTS.replace("'text'", "'words'")), [chat(ASKS, TELLS)]) == (1, None)
    assert "expected a chat template that writes the texts of messages, received one that drops them as texts and" in said()


# ---- Prompts and ends -----------------------------------------------------------------------------------------------

# Nemotron's and GLM 4.7's habit: the generation prompt opens a thought, and a turn without one has an empty one.
OPENS = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.role == 'assistant' %}<think>{{ message.reasoning_content or '' }}</think>{% endif %}
{{- message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
<think>{{ '</think>' if enable_thinking is false else '\n' }}{% endif -%}
"""


def test_a_thought_that_the_prompt_opens_and_the_turn_does_not_have(marked, said, model_of):
    record = chat(ASKS, TELLS, ASKS, tells(reasoning_content="\nT"))
    opened = QUESTION + "<think>«%s</think>A<|im_end|>»"
    assert marked(model_of(OPENS), [record]) == [opened % "" + "\n" + QUESTION + "<think>\n«T</think>A<|im_end|>»"]
    error = said()
    assert "1 turn that the template writes in another way than its generation prompt begins" in error
    assert """; --template-args '{"enable_thinking": false}' makes both alike; first """ in error
    assert marked(model_of(OPENS), [chat(ASKS, TELLS)], "--template-args", '{"enable_thinking": false}') == [
        QUESTION + "<think></think>«A<|im_end|>»"
    ]
    assert "another way" not in said()


def test_a_special_token_in_which_prompt_and_turn_part_belongs_to_the_turn(marked, model_of):
    specials = ("<|im_start|>", "<think>\n", "<think></think>", "<|im_end|>")
    assert marked(model_of(OPENS, specials), [chat(ASKS, TELLS)]) == [QUESTION + "«<think></think>A<|im_end|>»"]


# Mistral's habit.
LAST_SYSTEM = """\
{%- set system = messages[0].content if messages[0].role == 'system' else none -%}
{%- for message in (messages if system is none else messages[1:]) -%}
{%- if message.role == 'user' -%}
[INST] {% if loop.last and system is not none %}{{ system }}

{% endif %}{{ message.content }}[/INST]
{%- else %} {{ message.content }}</s>
{%- endif -%}
{%- endfor -%}
"""


def test_a_system_prompt_that_stands_in_the_last_question(marked, said, model_of):
    model, system = model_of(LAST_SYSTEM, ("<s>", "</s>")), {"role": "system", "content": "Be kind."}
    messages = [{"role": "user", "content": "One?"}, tells("Yes."), {"role": "user", "content": "Two?"}, tells("No.")]
    assert marked(model, [chat(system, *messages)]) == [
        "[INST] Be kind.\n\nOne?[/INST]« Yes.</s>»",
        "[INST] One?[/INST] Yes.</s>[INST] Be kind.\n\nTwo?[/INST]« No.</s>»",
    ]
    error = said()
    assert "2 turns whose prompt the template writes in another way once the turn is there: rows have the prompt as" in error
    assert "1 of 1 conversation: template rewrites history at turn 1" in error and "not in the rendering" not in error
    assert marked(model, [chat(*messages)]) == ["[INST] One?[/INST]« Yes.</s>»[INST] Two?[/INST]« No.</s>»"]


def test_a_generation_prompt_that_is_always_there(marked, said, model_of):
    """As command-r7b's."""
    template = NO_CALLS.replace("{% if add_generation_prompt %}", "").removesuffix("{% endif %}")
    assert marked(model_of(template), [TWICE]) == [TWO_ANSWERS]
    error = said()
    assert "does not end" not in error and "left out" not in error and "another way" not in error


def test_an_end_of_text_behind_the_last_turn_is_in_no_row(marked, said, model_of):
    """As Phi 3's: only whole texts have it, so a longer row lacks it in the middle."""
    template = NATIVE.replace("{% endif -%}\n", "{% else %}<|endoftext|>{% endif -%}\n")
    model = model_of(template, ("<|im_start|>", "<|im_end|>", "<|endoftext|>"))
    assert marked(model, [TWICE]) == [TWO_ANSWERS]
    assert "rewrites" not in said()
    assert marked(model, [TWICE], "--per-turn") == [QUESTION + "«B<|im_end|>»", QUESTION + "B<|im_end|>\n" + ANSWER]


def test_turns_without_an_end_are_counted(marked, said, model_of):
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    assert marked(model_of(template), [TWICE]) == ["user: Q\nassistant: «B\n»user: Q\nassistant: «A\n»"]
    assert "2 turns that the template does not end with a special token, so the model does not learn to stop" in said()


def test_todays_date_is_warned_of(marked, said, model_of):
    marked(model_of("{% set today = strftime_now('%Y') %}" + NATIVE), [chat(ASKS, TELLS)])
    assert "warning: the chat template writes today's date" in said()


# ---- Templates that TRL ships ---------------------------------------------------------------------------------------


@pytest.fixture
def shipped(marked, model_of):
    """The rows of messages with a template of TRL, and the special tokens of its model."""

    def run(name, specials, *chats, flags=()):
        return marked(
            model_of((TRL / f"{name}.jinja").read_text(encoding="utf-8"), specials),
            [chat(*messages) for messages in chats],
            *flags,
        )

    return run


PHI = tuple("<s> <|user|> <|assistant|> <|system|> <|end|> <|endoftext|>".split())
GEMMA = tuple('<bos> <|turn> <turn|> <|tool_call> <tool_call|> <|tool_response> <tool_response|> <|"|> <eos>'.split())
GPT_OSS = tuple("<|start|> <|end|> <|message|> <|channel|> <|call|> <|return|>".split())
COHERE = tuple(
    "<BOS_TOKEN> <|START_OF_TURN_TOKEN|> <|USER_TOKEN|> <|CHATBOT_TOKEN|> <|SYSTEM_TOKEN|> <|START_RESPONSE|> <|END_RESPONSE|> "
    "<|END_OF_TURN_TOKEN|>".split()
)
DEEPSEEK = tuple(
    f"<\uff5c{name}\uff5c>"
    for name in (
        "begin_of_sentence User Assistant tool_calls_begin tool_calls_end tool_call_begin tool_call_end tool_outputs_begin "
        "tool_outputs_end tool_output_begin tool_output_end tool_sep end_of_sentence"
    ).replace("_", "\u2581").split()
)  # fmt: skip
TWO_TURNS = [ASKS, tells("B"), {"role": "user", "content": "R"}, TELLS]


def test_phi_3(shipped, said):
    assert shipped("phi3", PHI, TWO_TURNS) == [
        "<|user|>\nQ<|end|>\n<|assistant|>\n«B<|end|>»\n<|user|>\nR<|end|>\n<|assistant|>\n«A<|end|>»"
    ]
    assert "rewrites" not in said()


@pytest.mark.parametrize("version", ["gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5"])
def test_gemma_4_takes_arguments_as_objects(shipped, version):
    arguments = {"metres": 9, "rope": "red", "deep": True, "at": [1, 2]}
    written = 'call:dive{at:[1,2],deep:true,metres:9,rope:<|"|>red<|"|>}<tool_call|>'
    for form in (arguments, json.dumps(arguments)):
        (text,) = shipped(version, GEMMA, [ASKS, tells("", tool_calls=[call(arguments=form)]), result(name="dive"), TELLS])
        begin = "<bos><|turn>user\nQ<turn|>\n<|turn>model\n«<|tool_call>" + written
        if version == "gemma4_v2":
            assert text == begin + "<turn|>»\n<|turn>tool\nR<turn|>\n<|turn>model\n«A<turn|>»"
        else:  # the answer stands in the turn of the call
            assert text == begin + '<|tool_response>»response:dive{value:<|"|>R<|"|>}<tool_response|>«A<turn|>»'


def test_gpt_oss_keeps_thoughts_between_tools_and_drops_them_behind_an_answer(shipped, said):
    first = [ASKS, tells(None, tool_calls=[call()], reasoning_content="T1"), result(), tells("B", thinking="T2")]
    rows = shipped("gptoss", GPT_OSS, first, [*first, {"role": "user", "content": "R"}, tells(thinking="T3")])
    rows = [text.partition("<|end|>")[2] for text in rows]  # the first message has today's date
    question, header = "<|start|>user<|message|>Q<|end|>", "<|start|>assistant"
    answer = '<|start|>functions.dive to=assistant<|channel|>commentary<|message|>"R"<|end|><|start|>assistant'
    diving = ' to=functions.dive<|channel|>commentary json<|message|>{"metres": 9}<|call|>'
    thought, final = "«<|channel|>analysis<|message|>%s<|end|><|start|>assistant", "<|channel|>final<|message|>%s"
    loop = f"{question}{header}{thought % 'T1'}{diving}»{answer}{thought % 'T2'}{final % 'B'}<|return|>»"
    later = f"{question}{header}{diving}{answer}{final % 'B'}<|end|><|start|>user<|message|>R<|end|>"
    later += f"{header}{thought % 'T3'}{final % 'A'}<|return|>»"
    assert rows == [loop, loop, later]
    error = said()
    assert "2 turns whose prompt the template writes in another way once the turn is there" in error
    assert "whose reasoning" not in error and "1 of 2 conversations: template rewrites history at turn 2" in error


def test_gpt_oss_writes_one_call_of_a_message(prepare, said, model_of):
    model = model_of((TRL / "gptoss.jinja").read_text(encoding="utf-8"), GPT_OSS)
    assert prepare(model, [chat(*BOTH)]) == (1, None)
    assert "2 tool calls of a message, of which the template does not write all" in said()


def test_qwen_3_drops_thoughts_before_the_last_question(shipped, said):
    thinking = [ASKS, tells("B", reasoning_content="T1"), {"role": "user", "content": "R"}, tells(reasoning_content="T2")]
    second = "<|im_start|>user\nR<|im_end|>\n<|im_start|>assistant\n"
    assert shipped("qwen3", CHATML, thinking) == [
        QUESTION + "«<think>\nT1\n</think>\n\nB<|im_end|>»",
        QUESTION + "B<|im_end|>\n" + second + "«<think>\nT2\n</think>\n\nA<|im_end|>»",
    ]
    assert "whose reasoning" not in said()
    assert shipped("qwen3", CHATML, [ASKS, TELLS], flags=("--template-args", '{"enable_thinking": false}')) == [
        QUESTION + "<think>\n\n</think>\n\n«A<|im_end|>»"
    ]


def test_deepseek_v3_opens_a_thought_in_its_prompt_alone(shipped, said):
    begin, user, assistant, calls, calls_end, one, one_end, outputs, outputs_end, output, output_end, sep, end = DEEPSEEK
    assert shipped("deepseekv3", DEEPSEEK, TWO_TURNS) == [f"{begin}{user}Q{assistant}«B{end}»{user}R{assistant}«A{end}»"]
    assert "2 turns that the template writes in another way than its generation prompt begins" in said()
    loop = [ASKS, tells(None, tool_calls=[call()]), result(), TELLS]
    assert shipped("deepseekv3", DEEPSEEK, loop) == [
        f"{begin}{user}Q{assistant}«{calls}{one}function{sep}dive\n```json\n"
        '{"metres": 9}'
        f"\n```{one_end}{calls_end}{end}»"
        f"{outputs}{output}R{output_end}{outputs_end}«A{end}»"
    ]


def test_cohere_2_writes_no_calls_and_no_tools(shipped, said):
    start, user, chatbot, begin, end = COHERE[1], COHERE[2], COHERE[3], COHERE[5], COHERE[6] + COHERE[7]
    (text,) = shipped("cohere2", COHERE, [ASKS, tells("", tool_calls=[call()]), result(), TELLS])
    assert text.partition(COHERE[7])[2] == (
        f"{start}{user}Q{COHERE[7]}{start}{chatbot}{begin}«<tool_call>\n"
        '{"name": "dive", "arguments": {"metres": 9}}'
        f"\n</tool_call>{end}»"
        f"{start}{user}<tool_response>\nR\n</tool_response>{COHERE[7]}{start}{chatbot}{begin}«A{end}»"
    )
    error = said()
    assert "(the chat template drops them)" in error and "tool results: as user messages in <tool_response>" in error


# ---- Control --------------------------------------------------------------------------------------------------------


def test_control_a_completion_that_ends_elsewhere_is_seen(marked, monkeypatch):
    assert marked("native", [chat(ASKS, TELLS)]) == [ANSWER]
    monkeypatch.setattr(turns, "completion_end", lambda rest, template: (len(rest), True))
    assert marked("native", [chat(ASKS, TELLS)]) == [QUESTION + "«A<|im_end|>\n»"]


def test_control_a_call_that_nobody_looks_for_is_lost(marked, model_of, monkeypatch):
    monkeypatch.setattr(turns, "check_answer", lambda message, completion, tally: None)
    assert marked(model_of(NO_SECRET), [chat(ASKS, tells("A", tool_calls=[call("secret")]))]) == [ANSWER]
