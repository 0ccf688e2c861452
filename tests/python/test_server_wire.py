# SPDX-License-Identifier: Apache-2.0
"""Messages of the server against those of the official client."""

import numpy as np
import pytest

pytest.importorskip("tinker", reason="the client of the Tinker API")

import torch
from tinker import types
from tinker.proto import tinker_public_pb2 as public
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output

from espalier.server import data, schema
from espalier.server.errors import Refused


def test_messages_have_the_numbers_and_types_of_the_client():
    enums = {"dtype", "stop_reason"}
    for name, fields in schema._FIELDS.items():
        theirs = public.DESCRIPTOR.message_types_by_name[name].fields_by_name
        for field in fields.split(", "):
            field_name, number, kind = field.split()
            other = theirs[field_name]
            assert other.number == int(number), (name, field_name)
            is_map = kind.startswith("map:")
            if is_map:
                other = other.message_type.fields_by_name["value"]
            plain = kind.removeprefix("map:").removesuffix("*")
            found = other.message_type.name if other.message_type else "enum" if other.enum_type else {
                1: "double", 3: "int64", 5: "int32", 8: "bool", 9: "string", 12: "bytes", 13: "uint32"}[other.type]  # fmt: skip
            assert found == ("enum" if field_name in enums else plain), (name, field_name)


def request_of(datum, loss="cross_entropy", config=None):
    request = types.ForwardBackwardRequest(
        forward_backward_input=types.ForwardBackwardInput(data=[datum], loss_fn=loss, loss_fn_config=config),
        model_id="m", seq_id=3)  # fmt: skip
    return schema.ForwardBackwardRequest.FromString(forward_backward_request_to_proto(request).SerializeToString())


def test_data_of_the_client():
    datum = types.Datum(model_input=types.ModelInput.from_ints([1, 2, 3]),
                        loss_fn_inputs={"target_tokens": [2, 3, 9], "weights": [0.0, 1.0, -0.5]})  # fmt: skip
    message = request_of(datum, config={"beta": 0.1, "kind": "text"})
    assert (message.model_id, message.seq_id, message.loss_fn, message.forward_only) == ("m", 3, "cross_entropy", False)
    assert message.loss_fn_config_v2["kind"].text == "text" and message.loss_fn_config["beta"] == 0.1
    found = data.datum_of(message.data[0], 10, 100)
    assert (found.tokens.tolist(), found.targets.tolist(), found.width) == ([1, 2, 3], [2, 3, 9], 1)
    assert found.inputs["weights"].tolist() == [0.0, 1.0, -0.5]


def test_several_targets_dense_and_sparse():
    targets = torch.zeros(4, 8, dtype=torch.int64)
    targets[1, 3], targets[3, 0] = 7, 5
    weights = torch.zeros(4, 8)
    weights[1, 3] = 2.0
    datum = types.Datum(model_input=types.ModelInput.from_ints([1, 2, 3, 4]),
                        loss_fn_inputs={"target_tokens": targets, "weights": weights})  # fmt: skip
    assert datum.loss_fn_inputs["target_tokens"].sparse_crow_indices is not None
    found = data.datum_of(request_of(datum).data[0], 10, 100)
    assert np.array_equal(found.targets, targets.numpy()) and np.array_equal(found.inputs["weights"], weights.numpy())
    rows = data.Rows([found])
    assert rows.rows.num_rows == 8 and rows.rows.num_tokens == 8 * 5


def test_results_of_the_client():
    draw = np.random.default_rng(5)
    logprobs = [draw.standard_normal(size).astype(np.float32) for size in (3, 5)] + [
        draw.standard_normal((4, 2)).astype(np.float32), draw.standard_normal(1).astype(np.float32)]  # fmt: skip
    output = deserialize_forward_backward_output(data.output_of(logprobs, {"loss:sum": 1.5}))
    assert output.metrics == {"loss:sum": 1.5} and len(output.loss_fn_outputs) == 4
    for found, expected in zip(output.loss_fn_outputs, logprobs):
        assert np.array_equal(found["logprobs"].to_numpy(), expected)


@pytest.mark.parametrize("change, message", [
    (lambda datum: datum.model_input[0].encoded_text.__setattr__("tokens", b"abc"), "values of 4 bytes, received 3"),
    (lambda datum: datum.model_input[0].image.__setattr__("data", b"x"), "received an image or sound"),
    (lambda datum: datum.loss_fn_inputs["target_tokens"].shape.append(7), "expected 21 values for shape"),
    (lambda datum: datum.loss_fn_inputs["weights"].__setattr__("dtype", 9), "received dtype 9"),
    (lambda datum: datum.loss_fn_inputs.pop("target_tokens"), "expected target_tokens, received weights"),
    (lambda datum: datum.model_input[0].encoded_text.__setattr__("tokens", np.array([1, 2, 99], "<i4").tobytes()), "received 1 to 99"),
    (lambda datum: datum.loss_fn_inputs["weights"].__setattr__("dense", np.array([1, np.nan, 1], "<f4").tobytes()), "received nan"),
    (lambda datum: datum.model_input_spans.add() and datum.loss_fn_input_spans.add(), "lengths that add up to 3 targets"),
])  # fmt: skip
def test_data_that_cannot_be_used(change, message):
    datum = types.Datum(model_input=types.ModelInput.from_ints([1, 2, 3]),
                        loss_fn_inputs={"target_tokens": [2, 3, 9], "weights": [0.0, 1.0, -0.5]})  # fmt: skip
    broken = request_of(datum).data[0]
    change(broken)
    with pytest.raises(Refused, match=message):
        data.datum_of(broken, 10, 100)


def test_sparse_tensors_that_do_not_fit():
    message = schema._CLASSES["Tensor"](dtype=schema.FLOAT32, shape=[2, 3])
    message.sparse_csr.values = np.ones(2, "<f4").tobytes()
    message.sparse_csr.crow_indices = np.array([0, 1, 2], "<i8").tobytes()
    message.sparse_csr.col_indices = np.array([0, 3], "<i8").tobytes()
    with pytest.raises(Refused, match="expected a sparse matrix"):
        data.tensor("weights", message)
    message.sparse_csr.col_indices = np.array([0, 2], "<i8").tobytes()
    assert data.tensor("weights", message).tolist() == [[1, 0, 0], [0, 0, 1]]
