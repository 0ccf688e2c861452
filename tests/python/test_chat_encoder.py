# SPDX-License-Identifier: Apache-2.0
"""chats/encoder.py and chats/views.py: what is remembered and cut gives exactly the ids and texts of the plain way.

The plain way tokenises the texts of a row one by one with tokenizer.encode, and renders each prefix of a conversation with
apply_chat_template. Tokenizers are trained here, on small corpora.
"""

import importlib.util
import random
import zlib
from array import array
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from conftest import NATIVE, NO_CALLS, REWRITES, TEMPLATES, seed_of
from espalier.chats import encoder as encoders
from espalier.chats.encoder import Encoder
from espalier.chats.views import AppendedViews, appends, views_of
from espalier.errors import InputError

pytestmark = pytest.mark.usefixtures("tokenizer")  # which imports Transformers without PyTorch

TRL = Path(importlib.util.find_spec("trl").origin).parent / "chat_templates"

CORPUS = [
    "It's 3.14 or 2025-01-05, isn't it? They'll pay 1,000,000 EUR for 12345678 units, 100 each.",
    "def f(x):\n    return x + 10\n\n\nprint(f(200))\t# done\r\n",
    "\u00fcber Gr\u00f6\u00dfe, \u65e5\u672c\u8a9e, \u00e7a va \u2014 na\u00efve",
    '{"city": "Paris", "days": [1, 20, 300]}', "assistant\nuser\nsystem  tool   result", "hello world hello there  world",
] * 3  # fmt: skip
LLAMA_3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN = LLAMA_3.replace("{1,3}", "")
# Groups of three digits from the right, if nothing but the end of a word follows.
FROM_THE_RIGHT = r"\d{1,3}(?=(?:\d{3})*\b)"


def trained(tokenizer, **more):
    byte_level = isinstance(tokenizer.model, models.BPE) and tokenizer.model.unk_token is None
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet()) if byte_level else []
    kind = trainers.WordPieceTrainer if isinstance(tokenizer.model, models.WordPiece) else trainers.BpeTrainer
    tokenizer.train_from_iterator(CORPUS, kind(vocab_size=600, initial_alphabet=alphabet, show_progress=False, **more))
    return tokenizer


def byte_level(*patterns, use_regex=False, normalizer=None):
    tokenizer = Tokenizer(models.BPE())
    if normalizer:
        tokenizer.normalizer = normalizer
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)]
    )
    return trained(tokenizer)


def of_words(pre_tokenizer):
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    if pre_tokenizer:
        tokenizer.pre_tokenizer = pre_tokenizer
    return trained(tokenizer, special_tokens=["<unk>"])


def word_piece():
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    return trained(tokenizer, special_tokens=["<unk>"])


# (how it is made, whether texts inside of a row need a token before them, whether words may be cut at spaces, and at digits).
KINDS = {
    "gpt2": (lambda: byte_level(use_regex=True), False, True, True),
    "llama3": (lambda: byte_level(LLAMA_3), False, True, True),
    "qwen": (lambda: byte_level(QWEN, normalizer=normalizers.NFC()), False, True, True),
    "digits from the right": (lambda: byte_level(FROM_THE_RIGHT, LLAMA_3), False, False, False),
    "bytes alone": (byte_level, False, False, False),
    "metaspace first": (lambda: of_words(pre_tokenizers.Metaspace(prepend_scheme="first")), True, True, False),
    "metaspace always": (lambda: of_words(pre_tokenizers.Metaspace(prepend_scheme="always")), False, True, False),
    "no pre-tokenizer": (lambda: of_words(None), False, False, False),
    "wordpiece": (word_piece, False, False, False),
}  # fmt: skip
ADDED = {
    "none": [],
    "words": [AddedToken(text, normalized=False) for text in ("<think>", "</think>", "a1")],
    "digits": [AddedToken(text, special=True, normalized=False) for text in ("<|reserved_12|>", "<|x7")],
    "overlap": [AddedToken(text, special=True, normalized=False) for text in ("<|a", "|a|>", "<|a|>")],
    "spaces around": [
        AddedToken("<L>", lstrip=True, special=True, normalized=False),
        AddedToken("<R>", rstrip=True, special=True, normalized=False)],
    "normalized": [AddedToken("Foo", normalized=True), AddedToken("World", normalized=True, special=True)],
    "single words": [
        AddedToken("tool", single_word=True, special=True, normalized=False),
        AddedToken("hello", single_word=True, normalized=False)],
    "runs of spaces": [
        AddedToken("  ", normalized=False), AddedToken("\n\n\n", normalized=False),
        AddedToken(" x", special=True, normalized=False)],
}  # fmt: skip
PIECES = [
    *"<|im_start|> <|im_end|> <s> <|reserved_12|> <|x7 <|x <L> <R> <think> </think> <|a |a|> <|a|>".split(" "),
    *"Foo foo World world hello hellox tool It assistant user x Y a1 's 'll 'S { \"city\" : . , ! ?! - ( ) |".split(" "),
    *"0 5 12 007 2025 123456 12345678 3.14 99.5 1,000,000 \u0967\u0968 \u00bd".split(" "),
    " ", " ", " ", "  ", "   ", " x", "\n", "\n\n", "\n\n\n", "\t", "\r\n", "\u00a0", "\u2028",
    "\u00fcber", "\u65e5\u672c", "e\u0301", "\U0001f600", "\u2014"]  # fmt: skip


def wrapped(kind, added=()):
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=KINDS[kind][0](), bos_token="<s>", eos_token="<|im_end|>")
    tokenizer.add_tokens([AddedToken("<|im_start|>", special=True, normalized=False)], special_tokens=True)
    for token in added:
        tokenizer.add_tokens([token], special_tokens=token.special)
    return tokenizer


def plainly(tokenizer, texts, needs_anchor):
    """The ids of each text of a row. One inside of it has a token before it where the tokenizer puts a space before texts."""
    ids = [tokenizer.encode(texts[0], add_special_tokens=False)]
    for text in texts[1:]:
        ids.append(tokenizer.encode("<s>" * needs_anchor + text, add_special_tokens=False)[needs_anchor:])
    return ids


def encoded(encoder, texts):
    """The ids of each text by the encoder."""
    segments = encoder.segments(texts)
    ids = [array("i", encoder.joined(segment)).tolist() for segment in segments]
    assert [sum(piece.tokens for piece in segment) for segment in segments] == list(map(len, ids))
    return ids


def random_texts(rng, count, most):
    texts = ["".join(rng.choices(PIECES, k=rng.randrange(most))) for _ in range(count)]
    return ["<s>" * (rng.random() < 0.3) + (texts[0] or "x"), *texts[1:]]


# ---- Ids ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("added", ADDED)
@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_the_plain_way(kind, added):
    seed = seed_of(zlib.crc32(f"{kind} {added}".encode()))
    print(f"seed {seed}")
    rng, tokenizer, needs_anchor = random.Random(seed), wrapped(kind, ADDED[added]), KINDS[kind][1]
    encoder = Encoder(tokenizer)
    for _ in range(40):
        if rng.random() < 0.5:
            encoder.begin()
        texts = random_texts(rng, rng.randrange(1, 5), 14)
        assert encoded(encoder, texts) == plainly(tokenizer, texts, needs_anchor), texts
        pair = random_texts(rng, 2, 8)
        if all(pair):
            apart = sum(plainly(tokenizer, pair, needs_anchor), [])
            assert encoder.differs_at_once(pair) == (apart != tokenizer.encode("".join(pair), add_special_tokens=False)), pair


@pytest.mark.parametrize("kind", KINDS)
def test_tokenizers_are_cut_where_they_allow_it_and_nowhere_else(kind):
    """Without it the test above could compare the plain way with itself."""
    _, needs_anchor, spaces, digits = KINDS[kind]
    encoder = Encoder(wrapped(kind))
    assert (encoder._anchor is not None, encoder._spaces is not None, encoder._numbers is not None) == (
        needs_anchor,
        spaces,
        digits,
    )
    assert encoder._cuts.fullmatch("<|im_start|>") and encoder._cuts.fullmatch("<s>")


def test_control_a_cut_that_the_tokenizer_does_not_allow_is_seen(monkeypatch):
    tokenizer = wrapped("bytes alone")
    monkeypatch.setattr(encoders, "_always_cut", lambda backend, pairs: True)
    monkeypatch.setattr(encoders, "SAMPLE", "a")
    texts = ["assistant\nhello world hello there 12345678"]
    assert encoded(Encoder(tokenizer), texts) != plainly(tokenizer, texts, False)


def test_a_text_inside_of_a_row_has_no_space_before_it():
    tokenizer = wrapped("metaspace first")
    first, second = encoded(Encoder(tokenizer), ["hello hello", "hello hello"])
    assert tokenizer.convert_ids_to_tokens(first) == ["\u2581hello", "\u2581hello"]
    inside = tokenizer.convert_ids_to_tokens(second)
    assert "".join(inside) == "hello\u2581hello" and inside[-1] == "\u2581hello"
    assert encoded(Encoder(tokenizer), ["<s>hello", "<|im_end|>"])[1] == [tokenizer.convert_tokens_to_ids("<|im_end|>")]


def test_ids_outside_of_the_models_vocabulary_are_refused():
    tokenizer = wrapped("llama3")
    last = tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert encoded(Encoder(tokenizer, last + 1), ["<|im_start|>"]) == [[last]]
    with pytest.raises(
        InputError, match=rf"expected token ids below the model's vocab_size {last}, received {last} from its tokenizer"
    ):
        Encoder(tokenizer, last).segments(["x<|im_start|>"])


def test_a_tokenizer_without_a_fast_half_is_asked_itself():
    tokenizer = wrapped("gpt2")

    class Slow:
        all_special_tokens, added_tokens_decoder = tokenizer.all_special_tokens, tokenizer.added_tokens_decoder
        get_vocab = tokenizer.get_vocab

        def encode(self, text, add_special_tokens):
            return [7, *tokenizer.encode(text, add_special_tokens=add_special_tokens)]

    texts = ["<s>hello world", "12 hello"]
    assert encoded(Encoder(Slow()), texts) == [[7, *tokenizer.encode(text, add_special_tokens=False)] for text in texts]


# ---- Nothing twice --------------------------------------------------------------------------------------------------


class Counting:
    """The fast half of a tokenizer, which counts the characters that it encodes."""

    def __init__(self, backend):
        self._backend, self.characters = backend, 0

    def __getattr__(self, name):
        return getattr(self._backend, name)

    def encode(self, text, **options):
        self.characters += len(text)
        return self._backend.encode(text, **options)


@pytest.fixture
def counting(monkeypatch):
    """The backends of all encoders from now on, which count."""
    backends, exact = [], encoders._exact_backend

    def counts(tokenizer):
        backends.append(Counting(exact(tokenizer)))
        return backends[-1]

    monkeypatch.setattr(encoders, "_exact_backend", counts)
    return backends


@pytest.mark.parametrize("kind", ["bytes alone", "llama3", "metaspace always"])
def test_a_piece_is_encoded_once_in_a_conversation(counting, kind):
    encoder = Encoder(wrapped(kind))
    parts = [
        f"<|im_start|>user\nquestion {'abc' * number} {number}?<|im_end|>\n<|im_start|>assistant\nanswer {number}<|im_end|>\n"
        for number in range(20)
    ]
    counting[0].characters = 0
    encoder.begin()
    for number in range(1, 21):
        encoder.segments(["".join(parts[:number])])
    once = counting[0].characters
    assert 0 < once <= sum(map(len, parts))
    encoder.segments(["".join(parts)])
    assert counting[0].characters == once
    # Control: an encoder that forgets does ten times the work, unless it remembers the words.
    if encoder._spaces is None:
        for number in range(1, 21):
            encoder.begin()
            encoder.segments(["".join(parts[:number])])
        assert counting[0].characters > 8 * once


@pytest.mark.parametrize("flags", [(), ("--per-turn",)], ids=["whole", "per turn"])
def test_the_work_of_a_conversation_is_that_of_its_text(counting, prepare, model_of, flags):
    """Every answer begins a row of its own, which has all that came before it."""
    turns = []
    for number in range(25):
        turns += [{"role": "user", "content": f"question {number} " + "word " * 100},
                  {"role": "assistant", "content": f"<think>{number}</think>answer {number} " + "text " * 100}]  # fmt: skip
    code, rows = prepare("rewrites", [{"messages": turns}], *flags, "--workers", "1")
    assert code == 0 and len(rows) == 25
    length = sum(len(turn["content"]) + len("<|im_start|>assistant\n<|im_end|>\n") for turn in turns)
    assert sum(len(row["input_ids"]) for row in rows) > 10 * length
    assert counting[0].characters < 2 * length


def test_seams_are_compared_near_by(counting):
    encoder = Encoder(wrapped("bytes alone"))
    counting[0].characters = 0
    assert not encoder.differs_at_once(["<s>" + "a b c " * 10_000, "x y z " * 10_000])
    assert counting[0].characters <= 4 * encoders.WINDOW


# ---- Views ----------------------------------------------------------------------------------------------------------

LLAMA = """\
{{ bos_token }}{% if messages[0].role == 'system' %}{% set begin = 'S' %}{% else %}{% set begin = 'U' %}{% endif %}{{ begin }}
{%- for message in messages %}{% if loop.first %}*{% endif %}{{ loop.index0 }}[{{ message.role }}]{{ message.content | trim }}
{%- endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}"""
# What came before may change what comes later.
MEMORY = """\
{% set seen = namespace(tool=false) %}
{%- for message in messages %}{% if message.role == 'tool' %}{% set seen.tool = true %}{% endif %}
({{ message.role }}{{ '!' if seen.tool }}{{ loop.previtem.role if loop.previtem is defined }}) {{ message.content }}
{%- endfor %}
{%- if add_generation_prompt %}(assistant){% else %}<end>{% endif %}"""
APPENDING = {"ChatML": NO_CALLS, "calls": NATIVE, "Llama": LLAMA, "memory": MEMORY, "phi3": "phi3.jinja"}

LOOP = "{% for message in messages %}TEXT{{ message.content }}{% endfor %}{% if add_generation_prompt %}PROMPT:{% endif %}"


def loop(text="", before="", behind="", prompt="", messages="messages"):
    """A template with something at the beginning of its loop, before it, behind it, or in the generation prompt."""
    template = (
        LOOP.replace("TEXT", "{{ message.role }}: " + text).replace("PROMPT", prompt).replace("in messages", f"in {messages}")
    )
    return before + template.replace("{% endfor %}", "{% endfor %}" + behind)


LAST = "{% set last = namespace(role='') %}"
REMEMBERS = "{% set last.role = message.role %}"
LOOKING_AHEAD = {
    "loop.last": loop("{% if loop.last %}last {% endif %}"),
    "loop['last']": loop("{% if loop['last'] %}last {% endif %}"),
    "loop.nextitem": loop("{% if loop.nextitem is defined %}, {% endif %}"),
    "loop.length": loop("{{ loop.length }}"),
    "loop.revindex": loop("{{ loop.revindex }}"),
    "loop under another name": loop("{% set round = loop %}{{ round.last }}"),
    "messages|length": loop("{% if loop.index0 == messages | length - 1 %}last {% endif %}"),
    "messages[-1]": loop("{% if messages[-1].role == 'user' %}asked {% endif %}"),
    "messages[1]": loop("{% if messages[1] is defined %}more {% endif %}"),
    "messages[loop.index]": loop("{% if messages[loop.index] is defined %}more {% endif %}"),
    "slice": loop("{{ messages[1:] | map(attribute='role') | join }}"),
    "slice before": loop(before="{% set others = messages[1:] %}{{ others | map(attribute='role') | join }}"),
    "backwards": loop(messages="messages[::-1]"),
    "a loop before": loop("{{ last.role }}", before=LAST + "{% for message in messages %}" + REMEMBERS + "{% endfor %}"),
    "another name": loop(before="{% set all = messages %}{{ all | length }}"),
    "a namespace behind the loop": loop(REMEMBERS, before=LAST, behind="{% if last.role == 'tool' %}tools end{% endif %}"),
    "a namespace in the prompt": loop(REMEMBERS, before=LAST, prompt="{{ last.role }} asks "),
    "the messages behind the loop": loop(prompt="{{ messages | length }} "),
    "the last message behind the loop": loop(prompt="{{ messages[-1].role }} "),
    "the prompt inside of the loop": loop("{% if not add_generation_prompt %}done {% endif %}"),
    "the prompt before the loop": loop(before="{% if add_generation_prompt %}ask {% endif %}"),
    "a condition of the loop": loop(messages="messages if message.role != 'tool' and messages | length > 2"),
    "break": loop("{% if message.role == 'tool' %}{% break %}{% endif %}"),
    "a macro": loop("{{ count() }}", before="{% macro count() %}{{ messages | length }}{% endmacro %}"),
    "a text around the loop": "{% set text %}" + loop() + "{% endset %}{{ text | trim | upper }}",
    "rewrites": REWRITES,
    **{name: f"{name}.jinja" for name in ("qwen3", "gptoss", "deepseekv3", "gemma4")},
}  # fmt: skip

MESSAGES = [
    {"role": "system", "content": " S "}, {"role": "user", "content": "Q"},
    {"role": "assistant", "content": "", "reasoning_content": "T", "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "dive", "arguments": '{"metres": 9}'}}]},
    {"role": "tool", "tool_call_id": "c1", "name": "dive", "content": "R"},
    {"role": "assistant", "content": "A", "refusal": None},
    {"role": "user", "content": "Q2"}, {"role": "assistant", "content": "A2"}]  # fmt: skip


def source_of(template):
    return (TRL / template).read_text(encoding="utf-8") if template.endswith(".jinja") else template


@pytest.fixture(scope="module")
def rendering():
    """Returns (views, standard) of a template: standard(count, add_generation_prompt) is apply_chat_template."""
    tokenizer = wrapped("gpt2")

    def run(template, messages):
        tokenizer.chat_template = source_of(template)

        def standard(count, add_generation_prompt):
            return tokenizer.apply_chat_template(messages[:count], tokenize=False, add_generation_prompt=add_generation_prompt)

        return views_of(tokenizer, messages, None, {}, standard), standard

    return run


@pytest.mark.parametrize(
    "name", [*APPENDING, *LOOKING_AHEAD, *(name for name in TEMPLATES if name not in ("two_roles", "object_arguments"))]
)
def test_views_are_the_texts_of_apply_chat_template(rendering, name):
    template = {**TEMPLATES, **APPENDING, **LOOKING_AHEAD}[name]
    views, standard = rendering(template, MESSAGES)
    assert isinstance(views, AppendedViews) == (
        name in APPENDING or name in ("native", "no_calls", "null_fails", "unlocatable")
    )
    for index in range(1, len(MESSAGES)):
        assert views.prompt(index) == standard(index, True)
        assert views.answered(index) == standard(index + 1, False)


@pytest.mark.parametrize("name", APPENDING)
def test_templates_that_append_are_known(name):
    assert appends(source_of(APPENDING[name]))


@pytest.mark.parametrize("name", LOOKING_AHEAD)
def test_templates_that_look_ahead_are_known(name):
    assert not appends(source_of(LOOKING_AHEAD[name]))


def test_control_views_of_a_template_that_does_not_append_would_be_seen(rendering, monkeypatch):
    from espalier.chats import views as module

    monkeypatch.setattr(module, "appends", lambda source: True)
    views, standard = rendering(LOOKING_AHEAD["loop.last"], MESSAGES)
    assert views.answered(1) != standard(2, False)


def test_a_template_that_appends_is_executed_for_all_turns_at_once(rendering, monkeypatch):
    from espalier.chats import views as module

    renders = []
    generate = module._Direct.appended
    monkeypatch.setattr(module._Direct, "appended", lambda self: renders.append("all") or generate(self))
    monkeypatch.setattr(module._Direct, "render", lambda self, count, prompt: renders.append(count))
    views, _ = rendering(NO_CALLS, MESSAGES)
    for index in range(1, len(MESSAGES)):
        views.prompt(index), views.answered(index)
    assert renders == ["all"]


def test_a_template_whose_direct_rendering_differs_is_left_to_transformers(rendering, monkeypatch):
    """Such as a tokenizer class with an apply_chat_template of its own."""
    tokenizer = wrapped("gpt2")
    tokenizer.chat_template = NO_CALLS
    calls = []

    def standard(count, add_generation_prompt):
        calls.append(count)
        return f"{count} messages" + "?" * add_generation_prompt

    views = views_of(tokenizer, MESSAGES, None, {}, standard)
    assert (views.prompt(3), views.answered(3)) == ("3 messages?", "4 messages")
    assert calls == [len(MESSAGES), 3, 4]
