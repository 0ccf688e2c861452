# SPDX-License-Identifier: Apache-2.0
"""The texts of tokens, read from tokenizer.json."""

import itertools
import contextlib
import json
import random

import pytest

from conftest import seed_of
from espalier import InputError
from espalier.vocabulary import token_bytes

BYTE_LEVEL = {
    "added_tokens": [{"id": 5, "content": "<|im_start|>"}, {"id": 9, "content": "caf\u00e9 \u0120"}],
    "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits"}, {"type": "ByteLevel"}]},
    "decoder": {"type": "ByteLevel"},
    "model": {"type": "BPE", "merges": [], "vocab": {"Z": 0, "\u00c3": 1, "\u00bc": 2, "\u0120rich": 3, "\u010a\u010a": 4}}}  # fmt: skip

SENTENCE_PIECE = {
    "added_tokens": [{"id": 0, "content": "<s>"}],
    "decoder": {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                                                 {"type": "ByteFallback"}, {"type": "Fuse"}]},
    "model": {"type": "BPE", "byte_fallback": True,
              "vocab": {"<s>": 0, "\u2581Hello": 1, "<0xC3>": 2, "<0xbc>": 3, "\u2581\u2581": 4, "<0xZZ>": 5, "lo": 6}}}  # fmt: skip


@pytest.fixture
def read(tmp_path):
    def tokens(tokenizer):
        file = tmp_path / "tokenizer.json"
        file.write_text(tokenizer if isinstance(tokenizer, str) else json.dumps(tokenizer))
        offsets, texts = token_bytes(file)
        return [texts[begin:end] for begin, end in itertools.pairwise(offsets)]

    return tokens


def test_byte_level(read):
    tokens = read(BYTE_LEVEL)
    assert tokens == [b"Z", b"\xc3", b"\xbc", b" rich", b"\n\n", b"<|im_start|>", b"", b"", b"", "caf\u00e9 \u0120".encode()]
    # Negative control: the same pieces are other text without the byte-level decoder.
    assert read(json.dumps(BYTE_LEVEL).replace("ByteLevel", "Fuse"))[3] == "\u0120rich".encode()


def test_sentence_piece_unigram_and_word_piece(read):
    assert read(SENTENCE_PIECE) == [b"<s>", b" Hello", b"\xc3", b"\xbc", b"  ", b"<0xZZ>", b"lo"]
    unigram = {"pre_tokenizer": {"type": "Metaspace"}, "decoder": {"type": "Metaspace"},
               "model": {"type": "Unigram", "vocab": [["<unk>", 0.0], ["\u2581a", -1.5], ["b", -2.0], ["\u2581a", -3.0], ["<0x  >", -3.0]]}}  # fmt: skip
    assert read(unigram) == [b"<unk>", b" a", b"b", b" a", b"<0x  >"]
    assert read({"decoder": {"type": "WordPiece"}, "model": {"type": "WordPiece", "vocab": {"play": 0, "##ing": 1}}}) == [b" play", b"ing"]


def test_they_are_those_of_tokenizers(read):
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    own = tokenizers.Tokenizer(tokenizers.models.BPE({piece: number for number, piece in enumerate(sorted(alphabet))}, []))
    own.pre_tokenizer, own.decoder = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False), tokenizers.decoders.ByteLevel()
    tokens, text = read(own.to_str()), "caf\u00e9, \U0001f600\n\t\x00"
    assert b"".join(tokens[number] for number in own.encode(text).ids).decode() == text


@pytest.mark.parametrize("text", [
    "[]", "{", "{}", '{"model": 3}', '{"model": {"vocab": 3}}', '{"model": {"vocab": {"a": "b"}}}', '{"model": {"vocab": {"a": -1}}}',
    '{"model": {"vocab": {"a": 99999999999}}}', '{"model": {"vocab": [3]}}', '{"model": {"vocab": {"a": true}}}',
    '{"model": {"vocab": {}}, "added_tokens": [{"id": 1}]}', '{"model": {"vocab": {}}, "added_tokens": 1}'])  # fmt: skip
def test_bad_files_are_named(read, tmp_path, text):
    with pytest.raises(InputError, match="tokenizer.json: expected a tokenizer of Hugging Face tokenizers: "):
        read(text)
    with pytest.raises(InputError, match="none.json: No such file or directory"):
        token_bytes(tmp_path / "none.json")


def test_any_bytes_are_refused_or_read(tmp_path):
    draw = random.Random(seed_of(17))
    texts = [json.dumps(each).encode() for each in (BYTE_LEVEL, SENTENCE_PIECE)]
    file, read = tmp_path / "tokenizer.json", 0
    for _ in range(2000):
        text = bytearray(draw.choice(texts))
        for _ in range(draw.randint(1, 4)):
            text[draw.randrange(len(text))] = draw.choice(b'"{}[]:,\\0a\xff\xc3' if draw.random() < 0.5 else text)
        file.write_bytes(text)
        with contextlib.suppress(InputError):
            token_bytes(file)
            read += 1
    assert 20 < read < 1980
