# SPDX-License-Identifier: Apache-2.0
"""The texts of tokens, for reports. Imports only the standard library."""

import json
import re
from itertools import accumulate
from pathlib import Path
from typing import Any

from .errors import InputError

_LARGEST_ID = 1 << 24
_SENTENCE_SPACE = "\u2581"


def token_bytes(tokenizer_json: Path) -> tuple[list[int], bytes]:
    """The bytes of each token id, which may be part of a character, of a `tokenizer.json` of Hugging Face tokenizers.

    Byte-level models (GPT-2 and later), SentencePiece models (pieces with U+2581 for a space, bytes as "<0xNN>") and WordPiece
    ("##" continues a word). Special tokens are shown literally. The space that a SentencePiece decoder strips from the start of
    a text is kept, because a token sequence rarely starts a text.

    Returns offsets [V + 1] and bytes: token id is bytes[offsets[id]:offsets[id + 1]], empty where the id is not used. Raises
    InputError where it is not such a file."""
    try:
        tokens = _tokens(json.loads(tokenizer_json.read_bytes()))
    except OSError as error:
        raise InputError(f"{tokenizer_json}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise InputError(f"{tokenizer_json}: expected a tokenizer of Hugging Face tokenizers: {error!r}") from None
    texts = [tokens.get(number, b"") for number in range(max(tokens, default=-1) + 1)]
    return [0, *accumulate(map(len, texts))], b"".join(texts)


def _tokens(tokenizer: dict[str, Any]) -> dict[int, bytes]:
    model = tokenizer["model"]
    decode = _decoder(tokenizer)
    vocabulary = model["vocab"]
    # Unigram models have [piece, score] in the order of the ids.
    is_list = isinstance(vocabulary, list)
    pieces = ((entry[0], number) for number, entry in enumerate(vocabulary)) if is_list else vocabulary.items()
    tokens = {number: decode(piece) for piece, number in pieces}
    for added in tokenizer.get("added_tokens", []):
        tokens[added["id"]] = added["content"].encode(errors="replace")
    for number in tokens:
        if type(number) is not int or not 0 <= number < _LARGEST_ID:
            raise ValueError(f"expected token ids from 0 to {_LARGEST_ID - 1}, received {number!r}")
    return tokens


def _has_type(part: Any, name: str) -> bool:
    """Whether a component of the tokenizer, or one component of a sequence, has this type."""
    if not isinstance(part, dict):
        return False
    inner = (each for key in ("decoders", "pretokenizers", "normalizers") for each in part.get(key) or ())
    return part.get("type") == name or any(_has_type(each, name) for each in inner)


def _decoder(tokenizer: dict[str, Any]) -> Any:
    """The function from pieces to bytes."""
    decoder, before = tokenizer.get("decoder"), tokenizer.get("pre_tokenizer")
    if _has_type(decoder, "ByteLevel") or _has_type(before, "ByteLevel"):
        return _byte_level
    if _has_type(decoder, "WordPiece") or tokenizer["model"].get("type") == "WordPiece":
        return lambda piece: (piece[2:] if piece.startswith("##") else f" {piece}").encode(errors="replace")
    if any(_has_type(decoder, name) for name in ("Metaspace", "Replace", "ByteFallback")) or _has_type(before, "Metaspace"):
        return _sentence_piece
    return lambda piece: piece.encode(errors="replace")


def byte_characters() -> list[str]:
    """Of all bytes, as GPT-2 writes them: printable ones as they are, the others from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


_BYTES = {character: byte for byte, character in enumerate(byte_characters())}


def _byte_level(piece: str) -> bytes:
    try:
        return bytes(map(_BYTES.__getitem__, piece))
    except KeyError:  # not spelled in bytes: a token added as text
        return piece.encode(errors="replace")


def _sentence_piece(piece: str) -> bytes:
    if byte := re.fullmatch("<0x([0-9A-Fa-f]{2})>", piece):
        return bytes.fromhex(byte[1])
    return piece.replace(_SENTENCE_SPACE, " ").encode(errors="replace")
