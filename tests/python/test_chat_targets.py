# SPDX-License-Identifier: Apache-2.0
"""espalier prepare: which messages carry loss: by marks, in prompts, logged requests, preference pairs and histories."""

import json

import pytest

from chat_rows import ASKS, CURIOUS, PLAIN, TELLS, asks, call, chatml, notes, refused, schema  # noqa: F401
from conftest import NATIVE
from espalier.chats import messages as messages_of_chats

# ---- Marks of loss --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mark", ["weight", "loss", "train", "training", "trainable", "loss_mask", "loss_weight"])
@pytest.mark.parametrize("no, yes", [(0, 1), (False, True), (0.0, None)])
def test_marks_of_messages_take_loss_away(marked, notes, mark, no, yes):
    turns = [{**TELLS, "content": "Ten.", mark: no}, {"role": "user", "content": "Sure?"}, {**TELLS, mark: yes}]
    sharegpt = [
        {"from": "human", "value": ASKS["content"], mark: 0},
        {"from": "gpt", "value": "Ten.", mark: no},
        {"from": "human", "value": "Sure?"},
        {"from": "gpt", "value": "Nine metres.", mark: yes},
    ]
    expected = chatml("user: How deep is the lake?", "assistant: Ten.", "user: Sure?", "assistant! Nine metres.")
    assert marked("native", [asks(*turns), {"conversations": sharegpt}]) == [expected] * 2
    assert notes() == ["2 turns without loss, as their marks, prompts or pairs say"]


def test_turns_without_loss_are_no_rows_per_turn(marked):
    turns = [{**TELLS, "content": "Ten.", "weight": 0}, {"role": "user", "content": "Sure?"}, TELLS]
    assert marked("native", [asks(*turns)], "--per-turn") == [
        chatml("user: How deep is the lake?", "assistant: Ten.", "user: Sure?", "assistant! Nine metres.")
    ]


def test_other_numbers_are_weights_of_tokens(prepare):
    code, (row,) = prepare(
        "native", [asks({**TELLS, "content": "ab", "weight": 0.25}, ASKS, {**TELLS, "content": "c", "loss": 3})]
    )
    assert code == 0 and "loss_mask" not in row
    # Bytes of the text are tokens, and so is the end of a message.
    answers = [0.25] * 3, [3.0] * 2
    question = len("\n") + 1 + len("user\nHow deep is the lake?") + 1 + len("\n") + 1 + len("assistant\n")
    assert row["loss_weights"] == [0.0] * (question - 1) + answers[0] + [0.0] * question + answers[1]


def test_packed_rows_with_weights_and_without_have_weights_all(prepare):
    from safetensors.numpy import load_file

    records = [asks(TELLS), asks({**TELLS, "weight": 0.5}), asks({**TELLS, "weight": 0}, ASKS, TELLS)]
    _, rows = prepare("native", records)
    _, packed = prepare("native", records, name="rows.safetensors")
    columns = load_file(packed)
    assert "loss_mask" not in columns
    assert columns["loss_weights"].tolist() == [loss for row in rows for loss in row.get("loss_mask") or row["loss_weights"]]
    assert sorted(set(columns["loss_weights"].tolist())) == [0.0, 0.5, 1.0]


@pytest.mark.parametrize("value", ["no", -1, "0", [0], {"a": 1}])
def test_marks_that_are_no_weight_are_refused(refused, value):
    refused(
        asks({**TELLS, "weight": value}), "field `messages[1].weight`: expected true, false, or a finite number >= 0, received "
    )


def test_marks_that_disagree_are_refused(marked, refused):
    refused(
        asks({**TELLS, "weight": 1, "train": False}),
        "field `messages[1]`: expected one weight in `weight` and `train`, received [1, false]",
    )
    assert marked("native", [asks({**TELLS, "weight": 1, "train": True})]) == [PLAIN]


def test_a_mark_of_another_role_has_no_effect_and_is_counted(marked, notes):
    assert (
        marked("native", [{"messages": [{**ASKS, "weight": 1}, TELLS]}, {"messages": [{**ASKS, "weight": 0}, TELLS]}])
        == [PLAIN] * 2
    )
    assert [line.rpartition("; first ")[0] for line in notes()] == [
        "1 message of other roles than assistant with a mark of loss, which has no effect"
    ]


def test_marks_do_not_reach_the_template_nor_the_ignored_fields(marked, notes, model_of):
    model = model_of(
        NATIVE.replace(
            "<|im_end|>", "{% for key in message if key not in ('role', 'content') %} {{ key }}{% endfor %}<|im_end|>", 1
        )
    )
    assert marked(model, [asks({**TELLS, "weight": 1, "train": True, "mood": "dry"})]) == [
        PLAIN.replace("metres.", "metres. mood")
    ]
    assert notes() == ["ignored: messages[].mood (1)"]


def test_a_file_without_any_loss_is_refused(prepare, capsys):
    assert prepare("native", [asks({**TELLS, "weight": 0})]) == (1, None)
    assert "expected at least one trajectory, received none" in capsys.readouterr().err.splitlines()[-1]


def test_control_marks_that_are_not_read_are_seen(marked, monkeypatch):
    monkeypatch.setattr(messages_of_chats, "MARKS", ())
    assert marked("native", [asks({**TELLS, "weight": 0}, ASKS, TELLS)]) != [
        chatml(
            "user: How deep is the lake?", "assistant: Nine metres.", "user: How deep is the lake?", "assistant! Nine metres."
        )
    ]


# ---- Prompts and completions ----------------------------------------------------------------------------------------

EARLIER = [ASKS, {"role": "assistant", "content": "Ten?"}, {"role": "user", "content": "Measure it."}]


@pytest.mark.parametrize("prompt", ["prompt", "question", "query"])
@pytest.mark.parametrize("completion", ["completion", "response", "answer", "output"])
def test_prompts_and_completions_have_several_names(marked, prompt, completion):
    texts = {prompt: ASKS["content"], completion: TELLS["content"]}
    lists = {prompt: [ASKS], completion: [TELLS]}
    mixed = {prompt: [ASKS], completion: TELLS["content"]}
    single = {prompt: ASKS, completion: TELLS}
    assert (
        marked("native", [texts, lists, mixed, single, {prompt: json.dumps([ASKS]), completion: [TELLS["content"]]}])
        == [PLAIN] * 5
    )


def test_answers_of_a_prompt_are_context_and_those_of_a_completion_are_not(marked):
    before = "user: How deep is the lake?", "assistant: Ten?", "user: Measure it."
    assert marked("native", [{"prompt": EARLIER, "completion": "Nine metres."}]) == [chatml(*before, "assistant! Nine metres.")]
    completion = [{"role": "assistant", "content": "A rope..."}, {"role": "tool", "content": "9 m"}, TELLS]
    assert marked("native", [{"prompt": EARLIER, "completion": completion}]) == [
        chatml(*before, "assistant! A rope...", "tool: 9 m", "assistant! Nine metres.")
    ]
    assert marked("native", [{"input": EARLIER, "output": "Nine metres."}]) == [chatml(*before, "assistant! Nine metres.")]


def test_texts_that_programs_write_as_input_and_output_are_no_chat(prepare, capsys):
    assert prepare("native", [{"input": "How deep is the lake?", "output": "Nine metres."}]) == (1, None)
    assert "`input`, `output`" in capsys.readouterr().err


def test_completions_that_are_json_stay_texts(marked):
    """Only a list of messages in a text is one of messages."""
    for text in ('{"metres": 9}', "[9]", '["nine"]', "[deep", '[{"metres": 9}]'):
        assert marked("native", [{"prompt": ASKS["content"], "completion": text}]) == [
            chatml("user: How deep is the lake?", f"assistant! {text}")
        ]


def test_prompts_that_a_template_has_rendered_are_refused(refused, marked, model_of):
    rendered = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    words = "field `prompt`: expected the text of a message, received text that a chat template has rendered already (it has "
    refused({"prompt": rendered, "completion": "Yes."}, words, "<|im_start|>", "pass the messages, or the token ids")
    for text, mark in (
        ("[INST] Hi [/INST]", "[INST]"),
        ("<start_of_turn>user\nHi", "<start_of_turn>"),
        ("<|eot_id|>", "<|eot_id|>"),
        ("<\uff5cUser\uff5c>Hi", "<\uff5cUser\uff5c>"),
    ):
        refused({"prompt": text, "completion": "Yes."}, words, mark)
        refused({"prompt": text, "chosen": "Yes.", "rejected": "No."}, words, mark)
    # Special tokens of the model are known, whatever they look like.
    odd = model_of(NATIVE, ("<|im_start|>", "[[turn]]", "<|im_end|>"))
    refused({"prompt": "Say [[turn]].", "completion": "Yes."}, words, "[[turn]]", model=odd)
    assert marked("native", [{"prompt": "Say [[turn]] <b> | <|.", "completion": "Yes."}]) == [
        chatml("user: Say [[turn]] <b> | <|.", "assistant! Yes.")
    ]


# ---- Logged requests and their answers ------------------------------------------------------------------------------

LOGGED = chatml("user: How deep is the lake?", "assistant: Ten?", "user: Measure it.", "assistant! Nine metres.")


@pytest.mark.parametrize(
    "response",
    [
        "Nine metres.",
        TELLS,
        json.dumps(TELLS),
        [TELLS],
        {"id": "r1", "choices": [{"index": 0, "message": {**TELLS, "refusal": None}, "finish_reason": "stop"}], "usage": {}},
        json.dumps({"choices": [{"message": TELLS}]}),
    ],
    ids=["text", "message", "json", "list", "choices", "choices as json"],
)
def test_the_loss_of_a_logged_request_is_on_its_response(marked, response):
    assert marked("native", [{"messages": EARLIER, "response": response}]) == [LOGGED]
    assert marked("native", [{"messages": [*EARLIER, TELLS], "response": response}]) == [LOGGED], "it may be appended as well"


def test_responses_that_are_not_one_answer_are_refused(refused):
    refused(
        {"messages": [*EARLIER, TELLS], "response": "Eight."},
        'field `response`: expected the last message of the assistant, or messages that end before it, received "Eight."',
    )
    both = [{"message": TELLS}, {"message": {**TELLS, "content": "Eight."}}]
    refused(
        {"messages": EARLIER, "response": {"choices": both}}, "field `response.choices`: expected one choice with a message"
    )
    refused({"messages": EARLIER, "response": 9}, "field `response`: expected a text, or a list of messages, received 9")


def test_a_response_that_calls_another_tool_than_the_last_message_is_not_lost(refused, marked):
    first, other = ({"role": "assistant", "content": None, "tool_calls": [call(name)]} for name in ("dive", "swim"))
    assert marked("native", [{"messages": [ASKS, first], "response": first}]) == [
        chatml("user: How deep is the lake?", 'assistant! <call>dive {"metres": 9}</call>')
    ]
    refused({"messages": [ASKS, first], "response": other}, "field `response`: expected the last message of the assistant")


# ---- Preference pairs -----------------------------------------------------------------------------------------------

GOOD, BAD = (chatml("user: How deep is the lake?", f"assistant! {text}") for text in ("Nine metres.", "Who knows."))
WORSE = {"role": "assistant", "content": "Who knows."}
PAIRS = {
    "texts": {"prompt": ASKS["content"], "chosen": "Nine metres.", "rejected": "Who knows."},
    "messages": {"prompt": [ASKS], "chosen": [TELLS], "rejected": [WORSE]},
    "single messages": {"prompt": [ASKS], "chosen": TELLS, "rejected": WORSE},
    "sides with the prompt": {"chosen": [ASKS, TELLS], "rejected": [ASKS, WORSE]},
    "the prompt three times": {"prompt": ASKS["content"], "chosen": [ASKS, TELLS], "rejected": [ASKS, WORSE]},
    "question": {"question": ASKS["content"], "chosen": "Nine metres.", "rejected": "Who knows."},
    "ShareGPT": {
        "conversations": [{"from": "human", "value": ASKS["content"]}],
        "chosen": {"from": "gpt", "value": "Nine metres."},
        "rejected": {"from": "gpt", "value": "Who knows."},
    },
    "Alpaca": {"instruction": "How deep", "input": "is the lake?", "chosen": "Nine metres.", "rejected": "Who knows."},
    "OpenAI": {"input": {"messages": [ASKS]}, "preferred_output": [TELLS], "non_preferred_output": [WORSE]},
    "a rejected response": {"messages": [ASKS, TELLS], "rejected_response": "Who knows."},
    "rejected messages": {"messages": [ASKS, TELLS], "rejected_messages": [ASKS, WORSE]},
    "JSON texts": {"chosen": json.dumps([ASKS, TELLS]), "rejected": json.dumps([ASKS, WORSE])},
}


@pytest.mark.parametrize("shape", PAIRS)
def test_a_pair_is_two_rows_with_loss_on_what_differs(prepare, marked, shape):
    expected = [text.replace("How deep ", "How deep\n\n") for text in (GOOD, BAD)] if shape == "Alpaca" else [GOOD, BAD]
    assert marked("native", [PAIRS[shape]]) == expected
    _, rows = prepare("native", [PAIRS[shape]])
    assert [row["chosen"] for row in rows] == [True, False]
    assert len({row["pair_id"] for row in rows}) == 1
    assert [row["trajectory_id"] for row in rows] == [f"{rows[0]['pair_id']}/chosen", f"{rows[0]['pair_id']}/rejected"]


@pytest.mark.parametrize("shape", PAIRS)
def test_pairs_have_the_system_prompt_and_the_tools_of_their_record(marked, model_of, shape):
    dive = schema("dive", metres={"type": "integer"})
    for chosen, rejected in [marked(model_of(CURIOUS), [{**PAIRS[shape], "system": "Be exact.", "tools": [dive]}])]:
        before = chatml(f"system: {json.dumps(dive)};", "system: Be exact.") + "\n<|im_start|>user"
        assert chosen.startswith(before) and rejected.startswith(before)


def test_tools_of_openais_pairs_stand_in_the_request(marked, model_of):
    dive = schema("dive", metres={"type": "integer"})
    record = {"input": {"messages": [ASKS], "tools": [dive]}, "preferred_output": [TELLS], "non_preferred_output": [WORSE]}
    assert marked(model_of(CURIOUS), [record]) == [f"{chatml(f'system: {json.dumps(dive)};')}\n{text}" for text in (GOOD, BAD)]


def test_turns_that_both_sides_share_carry_no_loss(marked, notes):
    before = "user: How deep is the lake?", "assistant: Ten?", "user: Measure it."
    expected = [chatml(*before, f"assistant! {text}") for text in ("Nine metres.", "Who knows.")]
    sides = {"chosen": [*EARLIER, TELLS], "rejected": [*EARLIER, WORSE]}
    assert marked("native", [sides, {"prompt": EARLIER, "chosen": "Nine metres.", "rejected": "Who knows."}]) == expected * 2
    # Names of roles and contents, and keys that are null, do not make messages differ.
    other = [{"from": "human", "value": ASKS["content"]}, {"from": "gpt", "value": "Ten?", "weight": None}, EARLIER[2], WORSE]
    assert marked("native", [{**sides, "rejected": other}]) == expected
    assert notes()[0] == "4 turns without loss, as their marks, prompts or pairs say"


def test_sides_of_several_turns_carry_loss_on_all_that_differ(marked):
    chosen, rejected = (
        [ASKS, {**TELLS, "content": first}, {"role": "user", "content": "Sure?"}, {**TELLS, "content": last}]
        for first, last in (("Nine.", "Yes."), ("Ten.", "No."))
    )
    assert marked("native", [{"chosen": chosen, "rejected": rejected}]) == [
        chatml("user: How deep is the lake?", f"assistant! {first}", "user: Sure?", f"assistant! {last}")
        for first, last in (("Nine.", "Yes."), ("Ten.", "No."))
    ]


def test_sides_that_are_alike_keep_the_loss_of_their_last_turn(marked):
    assert marked("native", [{"chosen": [ASKS, TELLS], "rejected": [ASKS, TELLS]}]) == [PLAIN, PLAIN]


def test_names_of_pairs(prepare):
    names = [{"pair_id": "p"}, {"id": 7}, {"prompt_id": "q"}, {}, {"id": "p"}]
    _, rows = prepare("native", [PAIRS["texts"] | name for name in names])
    assert [row["pair_id"] for row in rows[::2]] == ["p", "7", "q", "chats.jsonl:4", "p~2"]
    assert [row["pair_id"] for row in rows[1::2]] == [row["pair_id"] for row in rows[::2]]


def test_pairs_of_which_a_side_is_missing_are_left_out_and_counted(prepare, marked, notes):
    long = {"prompt": ASKS["content"], "chosen": "Nine.", "rejected": "Who knows. " * 50}
    limit = str(len(prepare("native", [PAIRS["texts"]])[1][0]["input_ids"]))
    notes()
    assert marked("native", [long, PAIRS["texts"]], "--max-tokens", limit) == [GOOD, BAD]
    assert "1 preference pair left out, because one of its sides has no row" in notes()
    silent = {"prompt": ASKS["content"], "chosen": [{**TELLS, "weight": 0}], "rejected": "Who knows."}
    assert marked("native", [silent, PAIRS["texts"]]) == [GOOD, BAD]
    assert "1 preference pair left out, because one of its sides has no row" in notes()


def test_pairs_whose_side_would_be_several_rows_are_left_out(marked, notes):
    thoughts = [
        ASKS,
        {**TELLS, "content": "<think>1</think>Nine."},
        {"role": "user", "content": "Sure?"},
        {**TELLS, "content": "Yes."},
    ]
    record = {"chosen": thoughts, "rejected": [ASKS, WORSE]}
    assert marked("rewrites", [record, PAIRS["texts"]]) == [GOOD, BAD]
    assert any(
        line.startswith("1 preference pair left out, because the template rewrites history between turns with loss")
        for line in notes()
    )


def test_pairs_cannot_be_split_into_turns(prepare, capsys):
    assert prepare("native", [PAIRS["texts"]], "--per-turn") == (1, None)
    assert "expected a chat (--per-turn), received a preference pair" in capsys.readouterr().err


def test_whole_dialogues_in_a_text_are_refused(refused):
    refused(
        {"chosen": "\n\nHuman: Hi\n\nAssistant: Yes.", "rejected": "\n\nHuman: Hi\n\nAssistant: No."},
        "field `chosen`: expected a text with a `prompt`, or a list of messages",
    )


# ---- Labels of single answers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "record", [{"prompt": ASKS["content"], "completion": "Nine metres."}, asks(TELLS)], ids=["texts", "messages"]
)
@pytest.mark.parametrize("field", ["label", "kto_tag", "chosen"])
def test_labels_of_answers_are_chosen(prepare, record, field):
    _, rows = prepare("native", [record | {field: value} for value in (True, False, None)])
    assert [row.get("chosen") for row in rows] == [True, False, None]
    assert all("pair_id" not in row for row in rows)


def test_labels_that_are_no_booleans_are_ignored_and_listed(prepare, notes):
    _, rows = prepare("native", [asks(TELLS, label="physics"), asks(TELLS, label=3)])
    assert not any("chosen" in row for row in rows) and notes() == ["ignored: label (2)"]


def test_two_records_with_one_pair_id_are_a_pair(prepare):
    _, rows = prepare("native", [asks(TELLS, pair_id=5, chosen=True), asks(WORSE, pair_id=5, chosen=False)])
    assert [(row["pair_id"], row["chosen"]) for row in rows] == [("5", True), ("5", False)]


# ---- History --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "record",
    [
        {"instruction": "How deep is the lake?", "input": "", "output": "Nine metres."},
        {"query": "How deep is the lake?", "response": "Nine metres."},
    ],
    ids=["alpaca", "query"],
)
def test_turns_of_the_history_stand_before_and_carry_loss(marked, record):
    expected = chatml("user: Where?", "assistant! Here.", "user: How deep is the lake?", "assistant! Nine metres.")
    pairs, turns = [["Where?", "Here."]], [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "Here."}]
    assert (
        marked("native", [{**record, "history": pairs}, {**record, "history": turns}, {**record, "history": json.dumps(turns)}])
        == [expected] * 3
    )
    assert marked("native", [{**record, "history": []}, {**record, "history": None}]) == [PLAIN, PLAIN]


def test_a_history_of_a_pair_is_context(marked):
    assert marked("native", [PAIRS["texts"] | {"history": [["Where?", "Here."]]}]) == [
        chatml("user: Where?", "assistant: Here.", "user: How deep is the lake?", f"assistant! {text}")
        for text in ("Nine metres.", "Who knows.")
    ]


def test_answers_inside_a_prompt_are_context_behind_a_history_too(marked):
    before = "user: Where?", "assistant! Here.", "user: How deep is the lake?", "assistant: Ten?", "user: Measure it."
    record = {"prompt": EARLIER, "completion": "Nine metres.", "history": [["Where?", "Here."]]}
    assert marked("native", [record]) == [chatml(*before, "assistant! Nine metres.")]


@pytest.mark.parametrize("turn", ["Where?", ["Where?"], ["Where?", 3], 3])
def test_histories_of_other_forms_are_refused(refused, turn):
    refused(
        {"instruction": "How deep?", "output": "Nine.", "history": [["Where?", "Here."], turn]},
        "field `history[1]`: expected two texts, a question and its answer, received ",
    )
