# SPDX-License-Identifier: Apache-2.0
"""Data of a training request: what the client sends, as rows of the engine, and what it gets back.

A datum has N input tokens, and for each of them one target or K. The tokens up to the i-th predict the i-th targets, which
need not be the next input token. Each column of targets is a row: the input tokens, then the last target. Rows of one datum
have the same tokens, so they are encoded once; what they predict instead is `target_ids`.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

import espalier

from . import schema
from .errors import Refused

_DTYPES: dict[int, np.dtype[Any]] = {
    schema.FLOAT32: np.dtype("<f4"), schema.INT64: np.dtype("<i8"), schema.INT32: np.dtype("<i4")}  # fmt: skip
MAX_TARGETS = 1024   # for a position
MAX_CELLS = 1 << 24  # of all targets and inputs of a request, with those that a sparse tensor leaves out


@dataclass
class Datum:
    """One datum. Arrays are [N] or [N, K], those of the loss in float64."""

    tokens: NDArray[np.int32]
    targets: NDArray[np.int64]
    inputs: dict[str, NDArray[np.float64]]  # all others of loss_fn_inputs
    spans: list[tuple[str, int, int]] = field(default_factory=list)  # of the targets: sequence ("": a prompt), offset, length

    @property
    def width(self) -> int:
        """Targets for a position: K."""
        return 1 if self.targets.ndim == 1 else self.targets.shape[1]

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes + self.targets.nbytes + sum(values.nbytes for values in self.inputs.values()) + 1024


def check_cells(data: Any) -> None:
    """Raises Refused where the tensors of data would have too many entries, before any is made."""
    cells = 0
    for datum in data:
        for value in datum.loss_fn_inputs.values():
            cells += math.prod(map(abs, value.shape)) if value.HasField("sparse_csr") else len(value.dense) // 4
        if cells > MAX_CELLS:
            raise Refused(f"loss_fn_inputs: expected tensors with at most {MAX_CELLS} entries in a request, sparse ones made "
                          "dense, received more")  # fmt: skip


def tensor(name: str, message: Any) -> NDArray[Any]:
    """The array of a Tensor; a sparse one with 0 where it has no entry. Raises Refused."""
    dtype = _DTYPES.get(message.dtype)
    if dtype is None:
        raise Refused(f"{name}: expected a tensor of float32, int64 or int32, received dtype {message.dtype}")
    shape = list(message.shape)
    if any(size < 0 for size in shape):
        raise Refused(f"{name}: expected a shape without negative sizes, received {shape}")
    if message.HasField("sparse_csr"):
        return _dense(name, message.sparse_csr, shape, dtype)
    values = _array(name, message.dense, dtype)
    shape = shape or [len(values)]
    if math.prod(shape) != len(values):
        raise Refused(f"{name}: expected {math.prod(shape)} values for shape {shape}, received {len(values)}")
    return values.reshape(shape)


def _array(name: str, data: bytes, dtype: np.dtype[Any]) -> NDArray[Any]:
    if len(data) % dtype.itemsize:
        raise Refused(f"{name}: expected values of {dtype.itemsize} bytes, received {len(data)} bytes")
    return np.frombuffer(data, dtype)


def _dense(name: str, csr: Any, shape: list[int], dtype: np.dtype[Any]) -> NDArray[Any]:
    values = _array(name, csr.values, dtype)
    rows, columns = (_array(name, data, _DTYPES[schema.INT64]) for data in (csr.crow_indices, csr.col_indices))
    if len(shape) != 2 or shape[1] > MAX_TARGETS or not fits_csr(rows, columns, len(values), (shape[0], shape[1])):
        raise Refused(f"{name}: expected a sparse matrix (CSR) of shape [N, K], K at most {MAX_TARGETS}, received shape {shape} "
                      f"with {len(values)} values, {len(rows)} row pointers and {len(columns)} columns")  # fmt: skip
    table = np.zeros(shape, dtype)
    table[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = values
    return table


def fits_csr(rows: NDArray[Any], columns: NDArray[Any], values: int, shape: tuple[int, int]) -> bool:
    """Whether row pointers and columns are those of a sparse matrix of this shape with so many values."""
    return (len(rows) == shape[0] + 1 and len(columns) == values and rows[0] == 0 and rows[-1] == values
            and bool((np.diff(rows) >= 0).all())
            and (len(columns) == 0 or bool(columns.min() >= 0 and columns.max() < shape[1])))  # fmt: skip


def tokens_of(chunks: Any) -> NDArray[np.int32]:
    """The token ids of a prompt or model input. Raises Refused for images and sound."""
    parts = []
    for chunk in chunks:
        if chunk.HasField("image") or chunk.HasField("dmel") or not chunk.HasField("encoded_text"):
            raise Refused("model_input: expected chunks of tokens alone, received an image or sound, which these models do "
                          "not read")  # fmt: skip
        parts.append(_array("model_input", chunk.encoded_text.tokens, _DTYPES[schema.INT32]))
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


def datum_of(message: Any, vocab_size: int, max_tokens: int) -> Datum:
    """A Datum of the request. Raises Refused."""
    tokens = tokens_of(message.model_input)
    if not 1 <= len(tokens) <= max_tokens:
        raise Refused(f"model_input: expected 1 to {max_tokens} tokens, received {len(tokens)}")
    if "target_tokens" not in message.loss_fn_inputs:
        raise Refused("loss_fn_inputs: expected target_tokens, received "
                      f"{', '.join(sorted(message.loss_fn_inputs)) or 'none'}")  # fmt: skip
    targets = tensor("target_tokens", message.loss_fn_inputs["target_tokens"])
    if targets.ndim not in (1, 2) or targets.shape[0] != len(tokens) or targets.size == 0 or (
            targets.ndim == 2 and targets.shape[1] > MAX_TARGETS):  # fmt: skip
        raise Refused(f"target_tokens: expected shape [{len(tokens)}] or [{len(tokens)}, K], K at most {MAX_TARGETS}, for "
                      f"{len(tokens)} input tokens, received {list(targets.shape)}")  # fmt: skip
    for name, ids in (("model_input", tokens), ("target_tokens", targets)):
        if ids.min() < 0 or ids.max() >= vocab_size:
            raise Refused(f"{name}: expected token ids from 0 and below {vocab_size}, the model's vocab_size, received "
                          f"{ids.min()} to {ids.max()}")  # fmt: skip
    inputs = {}
    for name, value in message.loss_fn_inputs.items():
        if name == "target_tokens":
            continue
        values = tensor(name, value).astype(np.float64)
        if values.shape != targets.shape:
            raise Refused(f"{name}: expected shape {list(targets.shape)}, that of target_tokens, received {list(values.shape)}")
        if not np.isfinite(values).all():
            raise Refused(f"{name}: expected finite numbers, received {values[~np.isfinite(values)][0]}")
        inputs[name] = values
    return Datum(tokens, targets.astype(np.int64), inputs, _spans(message, len(tokens)))


def _spans(message: Any, targets: int) -> list[tuple[str, int, int]]:
    spans = []
    for span in message.loss_fn_input_spans:
        sampled = span.HasField("sampled_tokens")
        part = span.sampled_tokens if sampled else span.prompt_tokens
        spans.append((part.sequence_id if sampled else "", part.offset, part.length))
    lengths = [length for _, _, length in spans]
    if spans and (min(lengths) < 0 or sum(lengths) != targets):
        raise Refused(f"loss_fn_input_spans: expected lengths that add up to {targets} targets, received {sum(lengths)}")
    return spans


class Rows:
    """Rows of data for the engine, in order."""

    def __init__(self, data: list[Datum]) -> None:
        self.data = data
        sizes, ids, targets, masks = [], [], [], []
        for datum in data:
            table = datum.targets.reshape(len(datum.tokens), datum.width)
            tokens = np.append(datum.tokens, np.int32(table[-1, 0]))
            mask = np.ones(len(tokens), np.uint8)
            mask[0] = 0  # nothing predicts it
            for column in range(datum.width):
                sizes.append(len(tokens))
                ids.append(tokens)
                targets.append(np.append(tokens[:1], table[:, column]))
                masks.append(mask)
        self.rows = espalier.trajectories({
            "offsets": np.concatenate([[0], np.cumsum(sizes)]), "input_ids": np.concatenate(ids).astype(np.int32),
            "target_ids": np.concatenate(targets).astype(np.int32), "loss_mask": np.concatenate(masks)})  # fmt: skip

    def per_datum(self, rows: list[Any], stack: Any) -> list[Any]:
        """What was computed for the terms of each row [N], by datum: [N], or stacked by `stack` to [N, K]."""
        found, first = [], 0
        for datum in self.data:
            columns = rows[first : first + datum.width]
            found.append(columns[0] if datum.targets.ndim == 1 else stack(columns))
            first += datum.width
        return found


def output_of(logprobs: list[NDArray[np.floating[Any]]], metrics: dict[str, float]) -> bytes:
    """A ForwardBackwardOutput: log-probabilities of the targets by datum, in records of data with equal K."""
    message = schema.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    message.metrics.update(metrics)
    begin = 0
    while begin < len(logprobs):
        trailing = logprobs[begin].shape[1:]
        end = begin
        while end < len(logprobs) and logprobs[end].shape[1:] == trailing:
            end += 1
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=end - begin)
        parts = [np.ascontiguousarray(values, "<f4") for values in logprobs[begin:end]]
        batch = record.fields["logprobs"]
        batch.data = b"".join(part.tobytes() for part in parts)
        batch.offsets = np.cumsum([0, *(part.nbytes for part in parts)]).astype("<i8").tobytes()
        batch.dtype = schema.FLOAT32
        batch.trailing_shape.extend(trailing)
        begin = end
    return bytes(message.SerializeToString())
