# SPDX-License-Identifier: Apache-2.0
"""espalier prepare: which fields of chats are used and how, and what is said of the others."""

import json

import pytest

from chat_rows import ASKS, CURIOUS, PLAIN, TELLS, asks, call, chatml, notes, refused, schema  # noqa: F401
from conftest import NATIVE, with_marks

# ---- Messages before all others -------------------------------------------------------------------------------------


@pytest.mark.parametrize("field, role", [("system", "system"), ("system_prompt", "system"), ("developer", "developer")])
@pytest.mark.parametrize(
    "record",
    [
        asks(TELLS),
        {"conversations": [{"from": "human", "value": ASKS["content"]}, {"from": "gpt", "value": TELLS["content"]}]},
        {"prompt": ASKS["content"], "completion": TELLS["content"]},
        {"instruction": ASKS["content"], "output": TELLS["content"]},
    ],
    ids=["messages", "sharegpt", "prompt", "alpaca"],
)
def test_a_system_prompt_beside_the_messages_stands_before_them(marked, record, field, role):
    expected = f"<|im_start|>{role}\nAnswer shortly.<|im_end|>\n{PLAIN}"
    assert marked("native", [{field: "Answer shortly.", **record}]) == [expected]
    assert marked("native", [{field: "", **record}, {field: None, **record}]) == [PLAIN, PLAIN]


def test_the_same_system_prompt_twice_is_one_and_another_is_refused(marked, refused):
    record = {"messages": [{"role": "system", "content": "Be exact."}, ASKS, TELLS]}
    expected = chatml("system: Be exact.", "user: How deep is the lake?", "assistant! Nine metres.")
    assert marked("native", [record | {"system": "Be exact.", "system_prompt": "Be exact."}]) == [expected]
    refused(
        record | {"system": "Be vague."},
        "field `system`: expected the same text as the other system message",
        'received "Be vague."',
    )
    refused(asks(TELLS, system="Be exact.", system_prompt="Be vague."), "field `system_prompt`: expected the same text")
    refused(asks(TELLS, system=["Be exact."]), "field `system`: expected a text, received")


def test_a_system_and_a_developer_message_both_stand_before_the_others(marked):
    record = asks(TELLS, developer="No jokes.", system="You are a diver.")
    assert marked("native", [record]) == [
        chatml("system: You are a diver.", "developer: No jokes.", "user: How deep is the lake?", "assistant! Nine metres.")
    ]


# ---- Variables of the template --------------------------------------------------------------------------------------


def test_each_record_has_its_variables_of_the_template(marked, model_of):
    model = model_of(CURIOUS)
    values = [
        {"chat_template_kwargs": {"mood": "dry"}},
        {"chat_template_kwargs": '{"mood": "wet"}'},
        {},
        {"chat_template_kwargs": ""},
        {"chat_template_kwargs": {"mood": None}},
        {"chat_template_kwargs": {"mood": "dry"}},
    ]
    texts = [PLAIN.replace("«", prefix + "«") for prefix in ("(dry) ", "(wet) ", "", "", "", "(dry) ")]
    assert marked(model, [asks(TELLS, **value) for value in values]) == texts
    texts = [PLAIN.replace("«", prefix + "«") for prefix in ("(dry) ", "(wet) ", "(calm) ", "(calm) ", "(calm) ", "(dry) ")]
    assert marked(model, [asks(TELLS, **value) for value in values], "--template-args", '{"mood": "calm"}') == texts


def test_enable_thinking_of_a_record(marked, model_of, refused):
    template = NATIVE.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n{% if enable_thinking is false %}!{% endif %}")
    template = template.replace(
        "{{ message['content'] or '' }}",
        "{% if message.role == 'assistant' and enable_thinking is false %}!{% endif %}{{ message['content'] or '' }}",
    )
    model, quiet = model_of(template), PLAIN.replace("«", "!«")
    records = [asks(TELLS, enable_thinking=value) for value in (False, True, None)]
    both = asks(TELLS, enable_thinking=True, chat_template_kwargs={"enable_thinking": False})
    assert marked(model, [*records, both]) == [quiet, PLAIN, PLAIN, quiet]
    refused(asks(TELLS, enable_thinking="no"), 'field `enable_thinking`: expected true or false, received "no"')


@pytest.mark.parametrize("value, words", [
    ([], "expected an object, received []"), ("{", 'expected an object, received "{"'), (3, "expected an object, received 3"),
    ({"tools": []}, 'expected variables of the template, received "tools"'),
    ({"add_generation_prompt": True}, 'expected variables of the template, received "add_generation_prompt"')])  # fmt: skip
def test_variables_that_are_none_are_refused(refused, value, words):
    refused(asks(TELLS, chat_template_kwargs=value), f"field `chat_template_kwargs`: {words}")


# ---- Schemas of tools -----------------------------------------------------------------------------------------------

DIVE, SWIM = schema("dive", metres={"type": "integer"}), schema("swim", style={"type": "string", "enum": ["crawl", "back"]})


@pytest.mark.parametrize("fields", [
    {"tools": [DIVE, SWIM]}, {"tools": json.dumps([DIVE, SWIM])}, {"tools": [json.dumps(DIVE), json.dumps(SWIM)]},
    {"functions": [DIVE["function"], SWIM["function"]]}, {"functions": json.dumps([DIVE["function"], SWIM])},
    {"tool_defs": [DIVE["function"], SWIM]}, {"tools": None, "functions": [DIVE["function"], SWIM["function"]]}],
    ids=["list", "JSON", "JSONs", "functions", "functions as JSON", "tool_defs", "null tools"])  # fmt: skip
def test_schemas_in_all_forms_reach_the_template(marked, model_of, fields):
    assert marked(model_of(CURIOUS), [asks(TELLS, **fields)]) == [
        chatml(f"system: {json.dumps(DIVE)};{json.dumps(SWIM)};") + "\n" + PLAIN
    ]


def test_no_schemas_are_no_tools(marked, notes, model_of):
    assert marked(model_of(CURIOUS), [asks(TELLS, tools=tools) for tools in ([], "", "[]", None)]) == [PLAIN] * 4
    assert notes() == []


def test_nulls_of_tables_are_no_part_of_a_schema(marked, model_of):
    filled = {
        "type": "function",
        "strict": None,
        "function": {
            "name": "dive",
            "description": None,
            "parameters": {
                "type": "object",
                "required": None,
                "properties": {"metres": {"type": "integer", "enum": [None, 9], "default": None, "items": None}, "style": None},
            },
        },
    }
    plain = {
        "type": "function",
        "function": {
            "name": "dive",
            "parameters": {"type": "object", "properties": {"metres": {"type": "integer", "enum": [None, 9], "default": None}}},
        },
    }
    assert marked(model_of(CURIOUS), [asks(TELLS, tools=[filled])]) == [chatml(f"system: {json.dumps(plain)};") + "\n" + PLAIN]


def test_schemas_that_the_template_does_not_render_are_counted(marked, notes):
    assert marked("native", [asks(TELLS, tools=[DIVE]), asks(TELLS), asks(TELLS, functions=[DIVE["function"]])]) == [PLAIN] * 3
    assert notes() == ["2 conversations with `tools`, which the template does not render"]


@pytest.mark.parametrize("tools", ["[{", 3, [3], {"dive": {}}, '"dive"', ["dive"]])
def test_schemas_of_other_forms_are_refused(refused, tools):
    refused(asks(TELLS, tools=tools), "field `tools`: expected a list of tool schemas")


# ---- Nulls, roles, calls and contents -------------------------------------------------------------------------------


def test_keys_that_are_null_are_absent(marked, model_of, notes):
    template = NATIVE.replace(
        "<|im_end|>", "{% for key in message if key not in ('role', 'content') %} {{ key }}{% endfor %}<|im_end|>", 1
    )
    nulls = {
        "tool_calls": None,
        "function_call": None,
        "name": None,
        "refusal": None,
        "weight": None,
        "reasoning_content": None,
    }
    assert marked(model_of(template), [asks({**TELLS, **nulls}, images=None, system=None, reward=None, extra=None)]) == [PLAIN]
    assert notes() == []


def test_a_content_of_null_is_empty_in_either_form(marked):
    assert (
        marked("native", [asks({"role": "assistant", "content": None}, ASKS, TELLS), asks({"role": "assistant"}, ASKS, TELLS)])
        == [chatml("user: How deep is the lake?", "assistant! ", "user: How deep is the lake?", "assistant! Nine metres.")] * 2
    )


def test_null_arguments_that_a_function_does_not_have_are_those_of_a_table(marked, notes):
    arguments = {"metres": 9, "style": None, "rope": None}
    record = asks({"role": "assistant", "content": "", "tool_calls": [call(arguments=arguments)]})
    expected = chatml("user: How deep is the lake?", "assistant! <call>dive %s</call>")
    tools = [schema("dive", metres={"type": "integer"}, rope={"type": "string"}), SWIM]
    assert marked("native", [record | {"tools": tools}]) == [expected % '{"metres": 9, "rope": null}']
    assert [line.partition("; first")[0] for line in notes()] == [
        "1 conversation with `tools`, which the template does not render",
        "1 tool call with arguments that are null, which stay as the file has them",
        "1 tool call without arguments that are null and that their function does not have",
    ]
    # Without a schema nobody knows.
    assert marked("native", [record]) == [expected % '{"metres": 9, "style": null, "rope": null}']
    assert [line.partition("; first")[0] for line in notes()] == [
        "1 tool call with arguments that are null, which stay as the file has them"
    ]
    # A text of arguments is the model's own.
    text = asks({"role": "assistant", "content": "", "tool_calls": [call(arguments='{"style":null}')]}, tools=tools)
    assert marked("native", [text]) == [expected % '{"style":null}']


def test_parquet_of_records_that_differ_gives_the_rows_of_json_lines(marked, models, tmp_path):
    """A table has the keys of all calls and schemas in each of them."""
    import pyarrow
    from pyarrow import parquet

    from espalier.commands.model import load_tokenizer
    from espalier.commands.prepare import main

    records = [
        asks({**TELLS, "tool_calls": [call(arguments={"metres": 9})]}, tools=[DIVE]),
        asks({**TELLS, "weight": 0}, ASKS, {**TELLS, "tool_calls": [call("swim", {"style": "crawl"})]}, tools=[SWIM]),
    ]
    expected = marked("native", records)
    assert expected[0] == chatml("user: How deep is the lake?", 'assistant! Nine metres.<call>dive {"metres": 9}</call>')
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "chats.parquet")
    assert main(["--model", str(models["native"]), str(tmp_path / "chats.parquet"), "-o", str(tmp_path / "rows.jsonl")]) == 0
    rows = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    assert [with_marks(row, load_tokenizer(models["native"])) for row in rows] == expected


@pytest.mark.parametrize("role, known", [
    ("human", "user"), ("gpt", "assistant"), ("chatgpt", "assistant"), ("model", "assistant"), ("bot", "assistant"),
    ("ai", "assistant"), ("function", "tool"), ("observation", "tool"), ("function_response", "tool"),
    ("tool_response", "tool"), ("ipython", "tool")])  # fmt: skip
def test_roles_of_other_programs(marked, role, known):
    turns = [{"from": "user", "value": "Q"}, {"from": role, "value": "X"}, {"from": "assistant", "value": "A"}]
    expected = chatml("user: Q", f"{known}{'!' if known == 'assistant' else ':'} X", "assistant! A")
    assert (
        marked(
            "native",
            [{"conversations": turns}, {"messages": [{"role": turn["from"], "content": turn["value"]} for turn in turns]}],
        )
        == [expected] * 2
    )


@pytest.mark.parametrize("role", ["tool_call", "function_call"])
def test_messages_that_are_calls_are_answers_with_loss(marked, role):
    one, two = ({"name": name, "arguments": {"metres": metres}} for name, metres in (("dive", 9), ("swim", 5)))
    calls = '<call>dive {"metres": 9}</call>', '<call>swim {"metres": 5}</call>'

    def turns(*contents):
        return [
            {"from": "human", "value": "Q"},
            *({"from": role, "value": content} for content in contents),
            {"from": "observation", "value": "ok"},
            {"from": "gpt", "value": "A"},
        ]

    both = chatml("user: Q", "assistant! " + "".join(calls), "tool: ok", "assistant! A")
    assert (
        marked(
            "native",
            [{"conversations": turns(json.dumps(one), json.dumps(two))}, {"conversations": turns(json.dumps([one, two]))}],
        )
        == [both] * 2
    )
    single = chatml("user: Q", "assistant! " + calls[0], "tool: ok", "assistant! A")
    assert marked("native", [{"conversations": turns("<think>Why not.</think>\n" + json.dumps(one))}]) == [single]


def test_calls_behind_an_answer_belong_to_it(marked):
    turns = [
        ASKS,
        {"role": "assistant", "content": "I dive."},
        {"role": "tool_call", "content": '{"name": "dive", "arguments": {}}'},
        {"role": "tool_response", "content": "9 m"},
        TELLS,
    ]
    assert marked("native", [{"messages": turns}]) == [
        chatml("user: How deep is the lake?", "assistant! I dive.<call>dive {}</call>", "tool: 9 m", "assistant! Nine metres.")
    ]


def test_a_call_with_another_mark_than_the_answer_before_it_is_a_turn(marked):
    turns = [
        ASKS,
        {"role": "assistant", "content": "I dive.", "loss": False},
        {"role": "tool_call", "content": '{"name": "dive", "arguments": {}}'},
    ]
    assert marked("native", [{"messages": turns}]) == [
        chatml("user: How deep is the lake?", "assistant: I dive.", "assistant! <call>dive {}</call>")
    ]


@pytest.mark.parametrize("content", ["dive", "{}", '{"arguments": {}}', "[3]"])
def test_messages_that_should_be_calls_and_are_none(refused, content):
    refused(
        asks({"role": "tool_call", "content": content}),
        "field `messages[1].content`: expected ",
        " tool call with name and arguments",
    )


@pytest.mark.parametrize(
    "form",
    [
        {"function": {"name": "dive", "arguments": {"metres": 9}}},
        {"name": "dive", "arguments": {"metres": 9}},
        {"name": "dive", "arguments": '{"metres": 9}'},
        json.dumps({"name": "dive", "arguments": {"metres": 9}}),
        call(),
    ],
    ids=["without type", "flat", "flat with a text", "text", "OpenAI's"],
)
def test_forms_of_calls(marked, form):
    expected = [chatml("user: How deep is the lake?", 'assistant! <call>dive {"metres": 9}</call>')]
    assert marked("native", [asks({"role": "assistant", "content": None, "tool_calls": [form]})]) == expected
    assert marked("native", [asks({"role": "assistant", "content": None, "tool_calls": json.dumps([form])})]) == expected


@pytest.mark.parametrize("arguments", ["", "  ", None, {}, "{}"])
def test_calls_without_arguments(marked, arguments):
    assert marked("native", [asks({"role": "assistant", "content": None, "tool_calls": [call(arguments=arguments)]})]) == [
        chatml("user: How deep is the lake?", "assistant! <call>dive {}</call>")
    ]


def test_lists_of_text_parts_are_texts(marked, notes):
    parts = [{"type": "text", "text": "How deep "}, {"type": "input_text", "text": "is "}, "the lake?"]
    answer = [{"type": "output_text", "text": "Nine "}, {"type": "text", "text": "metres."}]
    assert marked("native", [{"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]}]) == [
        PLAIN
    ]
    thoughts = [{"type": "thinking", "thinking": "A rope."}, *answer]
    assert marked("native", [asks({"role": "assistant", "content": thoughts})]) == [PLAIN]
    assert [line.partition(":")[0] for line in notes()] == ["1 turn whose reasoning the template does not render"]


@pytest.mark.parametrize("field", ["images", "image", "videos", "video", "audios", "audio", "pixel_values"])
def test_records_with_other_inputs_than_text_are_refused(marked, refused, field):
    refused(
        asks(TELLS, **{field: ["a.png"]}),
        f"field `{field}`: expected text alone, since rows have tokens only, received images or other inputs",
    )
    assert marked("native", [asks(TELLS, **{field: value}) for value in ([], "", None, {})]) == [PLAIN] * 4


def test_a_reward_of_nan_is_none(prepare):
    """Tables have it where there is none."""
    line = json.dumps(asks(TELLS)).encode()[:-1] + b', "reward": NaN}'
    code, rows = prepare("native", [line, asks(TELLS, reward=-0.5)])
    assert code == 0 and [row.get("reward") for row in rows] == [None, -0.5]


# ---- Fields that nothing uses ---------------------------------------------------------------------------------------


def test_fields_that_nothing_uses_are_reported_once_with_their_numbers(marked, notes):
    records = [
        asks({**TELLS, "stance": "firm"}, {**ASKS, "stance": "shy", "locale": "de"}, TELLS, source="a", uuid=1),
        asks(TELLS, source="b"),
        asks(TELLS, source=None, uuid=2),
        asks(TELLS, source="c", score={"depth": 9}),
    ]
    assert len(marked("native", records)) == 4
    assert notes() == ["ignored: source (3), uuid (2), messages[].stance (2), messages[].locale (1), score (1)"]


def test_keys_that_the_template_reads_are_not_reported(marked, notes, model_of):
    assert marked(model_of(CURIOUS), [asks({**TELLS, "stance": "firm", "locale": "de"})]) == [
        PLAIN.replace("metres.", "metres. [firm]")
    ]
    assert notes() == ["ignored: messages[].locale (1)"]


def test_fields_that_are_used_are_not_reported(marked, notes, model_of):
    marked(
        model_of(CURIOUS),
        [
            asks(
                TELLS,
                system="s",
                tools=[DIVE],
                chat_template_kwargs={"mood": "dry"},
                reward=1,
                id="x",
                label=True,
                enable_thinking=True,
            )
        ],
        "--template-args",
        '{"mood": "wet"}',
    )
    assert notes() == []


def test_fields_of_another_shape_than_the_one_that_is_read_are_reported(marked, notes):
    assert marked("native", [asks(TELLS, prompt="How deep?", text="deep")]) == [PLAIN]
    assert notes() == ["ignored: prompt (1), text (1)"]


def test_many_fields_that_nothing_uses_fit_a_line(marked, notes):
    marked("native", [asks(TELLS, **{f"field{number:02}": number for number in range(50)})])
    (line,) = notes()
    assert line.startswith("ignored: field00 (1), field01 (1), ") and line.endswith(", field39 (1) and 10 others")
