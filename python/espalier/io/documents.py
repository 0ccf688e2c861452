# SPDX-License-Identifier: Apache-2.0
"""The documents of a packed token row: several sequences in one row, which must not see one another. They are named by

    attention_mask              numbers above 1, which count the documents (axolotl); 0 is padding
    seq_lengths, seq_lens       the length of each (TRL's pack_dataset, torchtune)
    cu_seq_lens_q, ...          0 and the end of each (flash attention)
    seq_idx, document_ids       the number of its document for each token
    position_ids                0, 1, 2, ... in each, if they restart

All that name documents must agree. Everything else in these fields, such as a mask of ones, is no statement about them.
"""

from itertools import accumulate, pairwise

from ..errors import BadRow
from ..rows.json_lines import shown
from .fields import Fields
from .rules import same_length

LENGTHS = ("seq_lengths", "seq_lens")
ENDS = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seq_lens", "cu_seqlens", "cu_seqlens_q", "cu_seqlens_k")
NUMBERS = ("seq_idx", "document_ids", "doc_ids", "segment_ids", "sequence_ids")
TOKEN_LISTS = ("attention_mask", "position_ids", *NUMBERS)


def unpadded(record: Fields, tokens: int) -> range:
    """The tokens of a row that are no padding: those without 0 in attention_mask."""
    if "attention_mask" not in record:
        return range(tokens)
    mask = same_length("attention_mask", record.get("attention_mask"), tokens)
    if mask.count(1) == tokens:
        return range(tokens)
    for index, value in enumerate(mask):
        if value not in (0, 1) and not (type(value) is int and value > 1):
            raise BadRow("attention_mask", "0, 1 or numbers of documents", f"{shown(value)} at index {index}")
    real = [index for index, value in enumerate(mask) if value]
    if not real:
        return range(0)
    if len(real) != real[-1] + 1 - real[0]:
        raise BadRow("attention_mask", "padding at the ends only", f"a 0 at index {mask.index(0, real[0])}, between others")
    return range(real[0], real[-1] + 1)


def documents(record: Fields, tokens: int, span: range) -> list[range]:
    """The tokens of each document of a row. span: those that are no padding."""
    if not span:
        return [span]
    named = list(_named(record, tokens, span))
    for (name, starts), (other, others) in pairwise(named):
        if starts != others:
            raise BadRow(other, f"the documents of `{name}`, which begin at {shown(starts)}", f"others, at {shown(others)}")
    starts = named[0][1] if named else [span.start]
    return [range(start, end) for start, end in zip(starts, [*starts[1:], span.stop])]


def _named(record, tokens, span):
    """Yields (field, the first token of each document) for each field that names documents."""
    if max(record.get("attention_mask", ()), default=0) > 1:
        yield "attention_mask", _starts_of_numbers("attention_mask", record.get("attention_mask"), span)
    for name in LENGTHS:
        if isinstance(record.peek(name), list):
            lengths = record.get(name)
            if not all(type(length) is int and length >= 0 for length in lengths) or sum(lengths) not in (tokens, len(span)):
                raise BadRow(name, f"the lengths of documents of {len(span)} tokens together", shown(lengths))
            yield name, _starts_of_ends([0, *accumulate(lengths)], tokens, span)
    for name in ENDS:
        if isinstance(record.peek(name), list):
            ends = record.get(name)
            if not all(type(end) is int for end in ends) or ends != sorted(ends) or ends[:1] != [0] or ends[-1] not in (
                    tokens, len(span)):
                raise BadRow(name, f"0 and the ends of documents of {len(span)} tokens together", shown(ends))
            yield name, _starts_of_ends(ends, tokens, span)
    for name in NUMBERS:
        if _is_for_each_token(record.peek(name), tokens):
            yield name, _starts_of_numbers(name, record.get(name), span)
    positions = record.peek("position_ids")
    if _is_for_each_token(positions, tokens) and _counts_from_zero(positions, span):
        starts = [index for index in span if record.get("position_ids")[index] == 0]
        if len(starts) > 1:
            yield "position_ids", starts


def _is_for_each_token(values, tokens):
    """Whether these are numbers of tokens. Names of documents and places in an image are something else."""
    return isinstance(values, list) and len(values) == tokens and all(type(value) is int for value in values)


def _counts_from_zero(positions, span):
    """Whether these are 0, 1, 2, ... once, or several times in a row."""
    return all(value in (0, before + 1) for before, value in pairwise([-1, *positions[span.start:span.stop]]))


def _starts_of_numbers(name, numbers, span):
    starts = [span.start]
    for index in span[1:]:
        if numbers[index] < numbers[index - 1]:
            received = f"{numbers[index]} after {numbers[index - 1]} at index {index}"
            raise BadRow(name, "numbers of documents that rise", received)
        if numbers[index] > numbers[index - 1]:
            starts.append(index)
    return starts


def _starts_of_ends(ends, tokens, span):
    """ends: 0 and the end of each document, counted with the padding or without it."""
    first = 0 if ends[-1] == tokens else span.start
    return [max(first + start, span.start) for start, end in pairwise(ends)
            if start < end and first + end > span.start and first + start < span.stop]
