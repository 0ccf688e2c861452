# SPDX-License-Identifier: Apache-2.0
"""Token ids of the texts of a conversation, exactly those of the tokenizer, with nothing tokenised twice.

A tokenizer first looks for its added tokens, and encodes what stands between two of them by itself. So a text is cut before its
added tokens, and each piece is encoded once in a conversation, however many of its renderings have it. Most tokenizers also
encode words and numbers by themselves. Where a check of the tokenizer shows that, pieces are cut before single spaces and
around digits as well, and the ids of such words are remembered for later conversations.
"""

import itertools
import re
import string
from array import array
from typing import NamedTuple

from ..errors import InputError

MOST_WORDS = 60_000  # remembered
LONGEST_WORD = 48  # characters of a remembered word
WINDOW = 64  # characters on each side of a seam that are encoded at once to compare
VISIBLE = "".join(character for character in string.printable if not character.isspace())
# Places where a pre-tokenizer may always cut: before a single space between visible ASCII characters; where digits begin or
# end; between any two digits.
SPACES, NUMBERS, DIGITS = r"(?<=[!-~])(?= [!-~])", r"(?<=[!-/:-~])(?=[0-9])|(?<=[0-9])(?=[!-/:-~])", r"(?<=[0-9])(?=[0-9])"
NEIGHBOURS = ("", "a", "23", "'", " ")  # on both sides of such a place
SAMPLE = "Is it 3.14 or (a-b)?  It's\tf(x)\n\n  \"Ja\", sagt er: {'k': [1, 20, 300]} über 日本語 https://a.b/c?d=e\r\n1234567px"


class Encoded(NamedTuple):
    """Token ids of a text: their number, and the bytes of int32."""

    tokens: int
    data: bytes


class Encoder:
    """Encodes the texts of runs. Raises InputError for ids outside of the model's vocabulary."""

    def __init__(self, tokenizer, vocab_size=None):
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._backend = _exact_backend(tokenizer)
        self._anchor = self._needed_anchor()
        self._cuts = _cuts_before_added_tokens(tokenizer) if self._backend else None
        self._takes_spaces = any(token.rstrip for token in tokenizer.added_tokens_decoder.values())
        self._words: dict[str, Encoded] = {}
        self._spaces: re.Pattern[str] | None = None
        self._numbers: re.Pattern[str] | None = None
        if self._backend is not None:
            self._spaces, self._numbers = _cuts_of_words(tokenizer, self._cuts)
        self._pieces: dict[tuple[str, bool], Encoded] = {}
        self._seams: dict[tuple[str, str, bool], bool] = {}

    def begin(self):
        """Forgets the texts of the conversation before: memory does not grow with their number."""
        self._pieces.clear()
        if len(self._seams) > MOST_WORDS:
            self._seams.clear()
        if len(self._words) > MOST_WORDS:
            self._words.clear()

    def segments(self, texts):
        """The pieces of each text of a run, as lists of Encoded. A run's texts are encoded separately, as in inference."""
        return [self._encoded_pieces(text, first=index == 0) for index, text in enumerate(texts)]

    def joined(self, pieces):
        """The ids of pieces one after the other."""
        return b"".join([piece.data for piece in pieces])

    def differs_at_once(self, texts):
        """Whether tokenising the texts at once would give other ids than one by one, looking at both sides of each seam."""
        first = bool(texts and texts[0])
        for text, later in itertools.pairwise(filter(None, texts)):
            if self._seam_differs(text, later, first):
                return True
            first = False
        return False

    def _seam_differs(self, text, later, first):
        begin = 0
        if self._cuts:
            begin = max((match.start() for match in self._cuts.finditer(text, max(0, len(text) - WINDOW))), default=0)
        left, right = text[max(begin, len(text) - WINDOW) :], later[:WINDOW]
        if self._cuts and (self._cuts.match(later) or (self._cuts.fullmatch(left) and not self._takes_spaces)):
            return False
        for cuts in (self._cuts, self._spaces, self._numbers):
            right = cuts.split(right, 1)[0] if cuts else right
        key = (left, right, first and len(left) == len(text))
        if key not in self._seams:
            apart = self._ids(left, key[2]) + self._ids(right, False)
            self._seams[key] = self._ids(left + right, key[2]) != apart
        return self._seams[key]

    def _cut(self, text, first):
        """[(piece, whether it is the beginning of a row)] of a text: each but the first begins with an added token."""
        if self._cuts is None:
            return [(text, first)]
        starts = [match.start() for match in self._cuts.finditer(text)]
        if not starts or starts[0]:
            starts.insert(0, 0)
        return [(text[begin:end], first and begin == 0) for begin, end in zip(starts, [*starts[1:], len(text)])]

    def _encoded_pieces(self, text, first):
        encoded = []
        for piece, is_first in self._cut(text, first):
            key = (piece, is_first and self._anchor is not None)
            known = self._pieces.get(key)
            if known is None:
                known = self._pieces[key] = self._encode(piece, is_first)
            encoded.append(known)
        return encoded

    def _encode(self, piece, is_first):
        if self._spaces is None:
            return self._packed(self._ids(piece, is_first))
        words, known = self._spaces.split(piece), self._words
        encoded = [known.get(word) or self._word(word) for word in words]
        if is_first and self._anchor is not None:
            encoded[0] = self._packed(self._ids(words[0], True))
        if len(encoded) == 1:
            return encoded[0]
        counts, data = zip(*encoded)
        return Encoded(sum(counts), b"".join(data))

    def _word(self, word):
        """The ids of a word inside of a row, which are those of its numbers and of what stands between them."""
        token = self._cuts.match(word) if self._cuts else None  # whose own digits are no place to cut
        begin = token.end() if token else 0
        parts = [word]
        if self._numbers:
            parts = [part for part in (word[:begin], *self._numbers.split(word[begin:])) if part]
        if len(parts) <= 1:
            encoded = self._packed(self._ids(word, False))
        else:
            pieces = [self._words.get(part) or self._word(part) for part in parts]
            encoded = Encoded(sum([piece.tokens for piece in pieces]), self.joined(pieces))
        if len(word) <= LONGEST_WORD:
            self._words[word] = encoded
        return encoded

    def _packed(self, ids):
        if self._vocab_size is not None and ids and max(ids) >= self._vocab_size:
            raise InputError(
                f"expected token ids below the model's vocab_size {self._vocab_size}, received {max(ids)} from its tokenizer"
            )
        return Encoded(len(ids), array("i", ids).tobytes())

    def _ids(self, text, is_first):
        """The ids of a text at the beginning of a row, or inside of one."""
        if is_first or self._anchor is None or (self._cuts and self._cuts.match(text)):
            return self._whole(text)
        return self._whole(self._anchor + text)[1:]

    def _whole(self, text):
        if self._backend is not None:
            return self._backend.encode(text, add_special_tokens=False).ids
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _needed_anchor(self):
        """Some tokenizers put a space before any text. Inside a run that space would be wrong, so a special
        token is put before it while encoding, and its id taken away."""
        for token in self._tokenizer.all_special_tokens:
            ids = self._whole(token + "a")
            if len(self._whole(token)) == 1 and ids[:1] == self._whole(token):
                return token if ids[1:] != self._whole("a") else None
        return None


def _exact_backend(tokenizer):
    """The tokenizer's fast half, if it alone gives the ids of a text; None otherwise."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not hasattr(backend, "encode"):
        return None
    special = "".join(tokenizer.all_special_tokens)
    texts = (SAMPLE, f" {SAMPLE} ", special + SAMPLE + special, "")
    alike = all(
        backend.encode(text, add_special_tokens=False).ids == tokenizer.encode(text, add_special_tokens=False) for text in texts
    )
    return backend if alike else None


def _cuts_before_added_tokens(tokenizer):
    """A pattern of the added tokens before which a text can be cut; None without any.

    Tokens that take spaces around them, that have to stand alone, or that are looked for after normalisation are part of a
    piece. So are all where one of them begins or ends with a space and others take spaces."""
    added = [token for token in tokenizer.added_tokens_decoder.values() if token.content]
    others = {token.content for token in added if not token.normalized}
    if any(token.lstrip or token.rstrip for token in added) and any(text != text.strip() for text in others):
        return None
    # The tokenizer takes the first token that begins, and the longest of those that begin at a place.
    plain = [
        token.content
        for token in added
        if token.special
        and not (token.normalized or token.lstrip or token.single_word)
        and not any(_overlap(token.content, other) for other in others)
    ]
    return re.compile("|".join(map(re.escape, sorted(plain, key=len, reverse=True)))) if plain else None


def _overlap(text, other):
    """Whether a place of `text` can lie inside of `other`, or behind its beginning."""
    return text != other and (text in other or any(other.endswith(text[:length]) for length in range(1, len(text))))


def _cuts_of_words(tokenizer, cuts):
    """Patterns of the spaces and of the ends of numbers at which the tokenizer cuts any text before it encodes its pieces; None
    for those at which it may not. cuts: of pieces, before added tokens.

    Pre-tokenizers cut by the characters around a place. So each kind of place is tried between all visible ASCII characters, with
    other neighbours further away. Added tokens must not take spaces."""
    backend = tokenizer.backend_tokenizer
    added = tokenizer.added_tokens_decoder.values()
    if backend.pre_tokenizer is None or any(token.lstrip or token.rstrip or " " in token.content for token in added):
        return None, None
    # Patterns that look around see more than neighbours; `(?!\S)` looks at spaces alone, which stand in no such place.
    if re.search(r"\(\?<?[=!]|\\\\b", backend.pre_tokenizer.__getstate__().decode().replace(r"(?!\\S)", "")):
        return None, None
    around = [(before, after) for before in NEIGHBOURS for after in NEIGHBOURS]
    pairs = {
        SPACES: [(left, " " + right) for left in VISIBLE for right in VISIBLE],
        NUMBERS: [
            (before + left, right + after)
            for other in VISIBLE
            if not other.isdigit()
            for left, right in ((other, "5"), ("5", other))
            for before, after in around
        ],
        DIGITS: [(before + left, right + after) for left, right in ("00", "05", "50", "12") for before, after in around],
    }
    kinds = [kind for kind in pairs if _always_cut(backend, pairs[kind])]
    if SPACES not in kinds:
        return None, None
    inner = [token for token in added if not (cuts and cuts.fullmatch(token.content))]
    if any(token.single_word or re.search("[0-9]", token.content) for token in inner):
        kinds = [SPACES]
    ids = backend.encode(SAMPLE, add_special_tokens=False).ids
    for few in (kinds, [SPACES]):
        words = re.split("|".join(few), SAMPLE)
        if [identity for word in words for identity in backend.encode(word, add_special_tokens=False).ids] == ids:
            return re.compile(SPACES), re.compile("|".join(few[1:])) if few[1:] else None
    return None, None


def _always_cut(backend, pairs):
    """Whether the pre-tokenizer cuts between the texts of each pair."""
    text, places = "", []
    for left, right in pairs:
        text += left
        places.append(len(text))
        text += right + "\n"
    if backend.normalizer is not None and backend.normalizer.normalize_str(text) != text:
        return False
    begins = {begin for _, (begin, _) in backend.pre_tokenizer.pre_tokenize_str(text)}
    return begins.issuperset(places)
