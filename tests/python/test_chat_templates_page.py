# SPDX-License-Identifier: Apache-2.0
"""docs/chat-templates.md says what the rendering does, and habits of its templates that cost a turn its loss or its text."""

import importlib.util
import re
from importlib.metadata import version

import pytest
import torch  # noqa: F401  (before transformers, which the script imports: commands/model.py hides it where nobody has it)

from conftest import REPOSITORY
from espalier.chats.template import ChatTemplate

SPEC = importlib.util.spec_from_file_location("chat_templates", REPOSITORY / "scripts/chat_templates.py")
pages = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(pages)

CALL = "{% for call in message.tool_calls or [] %}<call>{{ call.function.name }}{{ call.function.arguments }}</call>{% endfor %}"
TURNS = "{% for message in messages %}<|{{ message.role }}|>{{ message.content or '' }}" + CALL + "<|end|>{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|assistant|>{% endif %}"


def template_of(source):
    return ChatTemplate(pages.tokenizer_of(source), has_beside=lambda: False)


def talk_of(source, messages, tools=None):
    return pages.Talk(template_of(source), messages, tools)


def ends(messages):
    return {number: f"{message['content']}<|end|>" for number, message in enumerate(messages[1::2])}


def test_the_table_of_trl_is_what_the_rendering_does(capsys):
    page = pages.PAGE.read_text("utf-8")
    versions = re.search(r"Transformers (\S+)\.\n", page)[1], re.search(r"of TRL (\S+) ", page)[1]
    if versions != (version("transformers"), version("trl")):
        pytest.skip(f"the page has Transformers {versions[0]} and TRL {versions[1]}")
    assert pages.main(["--check"]) == 0, capsys.readouterr().err


def test_a_page_that_differs_is_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "plain.jinja").write_text(TURNS + PROMPT)
    monkeypatch.setattr(pages, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(pages, "trl_section", lambda: "\n## TRL\n")
    assert pages.main(["--llama-cpp", str(tmp_path)]) == 0
    line = "| `plain` | kept | yes | yes | no | texts | no | same | `end` |"
    assert line in pages.PAGE.read_text()
    assert pages.main(["--check", "--llama-cpp", str(tmp_path)]) == 0
    pages.PAGE.write_text(pages.PAGE.read_text().replace("| kept |", "| user turns |"))
    capsys.readouterr()
    assert pages.main(["--check", "--llama-cpp", str(tmp_path)]) == 1
    assert line in capsys.readouterr().err


def test_a_last_token_of_whole_texts_that_begins_as_the_next_turn_does_has_no_loss():
    """As Phi-3's, which writes <|endoftext|> where a turn would begin with <|user|>."""
    messages = pages.answers()
    talk = talk_of(TURNS + "{% if add_generation_prompt %}<|assistant|>{% else %}<|endoftext|>{% endif %}", messages)
    assert talk.losses == ends(messages) and talk.rewritten_at is None


def test_loss_begins_with_a_whole_token_where_prompt_and_turn_part():
    """As GLM 4.7, whose prompt opens a thought with <think>, and whose turns without any begin with </think>."""
    source = TURNS.replace("|>{{", "|>{{ '</think>' if message.role == 'assistant' }}{{") + PROMPT.replace("|>{%", "|><think>{%")
    messages = pages.answers()
    talk = talk_of(source, messages)
    assert talk.losses == {number: "</think>" + loss for number, loss in ends(messages).items()}
    assert talk.contexts[0].endswith("<|assistant|>") and talk.counts["differing_prompts"] == 3


@pytest.mark.parametrize("end", ["", "<|end|>"])
def test_the_header_of_a_turn_has_no_loss_where_the_prompt_lacks_it(end):
    """As GigaChat, which writes no generation prompt behind an answer, and Apriel, which leaves the last answer open."""
    source = TURNS.replace("<|end|>", "{{ '<|end|>' if not loop.last or END or message.role != 'assistant' }}").replace(
        "END", str(bool(end))
    ) + PROMPT.replace("add_generation_prompt", "add_generation_prompt and messages[-1].role != 'assistant'")
    messages = [pages.says("user", 1), pages.turn(1), pages.turn(2)]
    talk = talk_of(source, messages)
    assert talk.losses == {0: "assistant text 1." + end, 1: "assistant text 2." + end}
    assert talk.contexts[1].endswith("assistant text 1.<|end|><|assistant|>") and talk.counts["differing_prompts"] == 1


def test_a_generation_prompt_that_is_always_there_is_not_found_at_an_earlier_turn():
    """As Command R7B's, which ends every text with an empty thought that no turn has, and is longer than results are."""
    prompt = "<|assistant|>" + "<|begin_thought|><|end_thought|>" * 5
    messages = [{**message, "content": "ok"} if message["role"] == "tool" else message for message in pages.loop()]
    source = TURNS.replace("{{ message.content", "{{ '<|begin_text|>' if message.role == 'assistant' }}{{ message.content")
    talk = talk_of(source + prompt, messages)
    assert [loss.count("<|end|>") for loss in talk.losses.values()] == [1] * 4
    assert talk.losses[3] == "<|begin_text|>assistant text 4.<|end|>" and talk.rewritten_at is None
    assert talk.counts == {"differing_prompts": 4}


def test_a_turn_that_is_found_at_an_earlier_place_alone_is_left_out():
    """The whole text begins with the number of its messages, and the last turn alone begins otherwise than its prompt."""
    source = TURNS.replace("<|end|>", "<|end|>" * 20).replace(
        "|>{{", "|>{% if message.role == 'assistant' and not loop.last %}<open>{% endif %}{{"
    )
    talk = talk_of("{{ messages | length }}" + source + PROMPT.replace("|>{%", "|><open>{%"), pages.answers())
    assert not talk.losses and talk.counts == {"skipped_turns": 3}


def test_a_call_that_comes_with_a_turn_of_its_own_goes_into_the_content():
    """As in the first templates of DeepSeek R1, which write an empty answer behind calls."""
    source = TURNS.replace(CALL, "").replace(
        "{% for message in messages %}",
        "{% for message in messages %}{% if message.tool_calls %}<|assistant|>" + CALL + "<|end|>{% endif %}",
    )
    template = template_of(source + PROMPT)
    assert template.tool_calls == "content" and "empty turn" in template.describe()[0]
    talk = pages.Talk(template, pages.loop())
    assert talk.losses[0].count("<|end|>") == 1 and "<tool_call>" in talk.losses[0]


def test_a_system_message_that_some_prompt_lacks_is_counted():
    """As Mistral Nemo's, which writes it with the last question."""
    source = (
        "{% for message in messages %}{% if message.role == 'user' and loop.last and messages[0].role == 'system' %}"
        "{{ messages[0].content }}{% endif %}{% if message.role != 'system' %}<|{{ message.role }}|>{{ message.content or '' }}"
        + CALL
        + "<|end|>{% endif %}{% endfor %}"
        + PROMPT
    )
    talk = talk_of(source, [pages.says("system", 1), *pages.loop()])
    assert talk.counts["dropped:system"] == 1 and "system text 1." in talk.contexts[3]


def test_thoughts_inside_of_the_content_are_written_as_the_template_writes_thoughts():
    """As of Qwen 3.8 and gpt-oss, which take a content with <think> for an answer."""
    source = TURNS.replace("|>{{", "|>{% if message.thinking %}<thought>{{ message.thinking }}</thought>{% endif %}{{")
    inside = "<think>\nthought 1.\n</think>\n\n"
    for messages in (pages.answers(), pages.loop()):
        content = messages[1]["content"] or ""
        message = {**messages[1], "content": inside + content}
        loss = talk_of(source + PROMPT, [messages[0], message, *messages[2:]]).losses[0]
        assert loss.startswith(f"<thought>thought 1.</thought>{content}") and "think>" not in loss
        assert talk_of(TURNS + PROMPT, [messages[0], message, *messages[2:]]).losses[0].startswith(inside + content)


def test_arguments_that_the_template_drops_are_counted():
    """As MiniMax M3, which writes no arguments that are null."""
    source = TURNS.replace(
        "{{ call.function.arguments }}",
        "{% for key, value in call.function.arguments.items() if value is not none %}{{ key }}={{ value }};{% endfor %}",
    )
    messages = pages.loop()
    assert talk_of(source + PROMPT, messages).counts["dropped_arguments"] == 0
    messages[1]["tool_calls"][0]["function"]["arguments"] = '{"key": "value 1", "depth": null}'
    assert talk_of(source + PROMPT, messages).counts["dropped_arguments"] == 1


@pytest.mark.parametrize("opens, cure", [("not enable_thinking", None), ("enable_thinking", '{"enable_thinking": true}')])
def test_a_cure_is_one_for_turns_that_differ(opens, cure):
    """As Qwen 3.5 without thoughts: answers begin as prompts do, and those with thoughts do so with another argument."""
    source = TURNS.replace(
        "|>{{",
        "|>{% if message.role == 'assistant' %}<think>{{ message.reasoning_content or '' }}</think>{% endif %}{{",
    )
    prompt = f"<think>{{{{ '' if {opens} else '</think>' }}}}"
    template = template_of(source + PROMPT.replace("|>{%", "|>" + prompt + "{%"))
    assert template.probes.reasoning_key and template.cure == cure
