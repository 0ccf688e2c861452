# SPDX-License-Identifier: Apache-2.0
"""The protobuf messages of the Tinker API (SDK 0.38) that the server reads and writes.

Numbers and types are those of the client's `tinker.proto.tinker_public_pb2`; a test compares them. Enumerations are plain
integers here, which are the same on the wire. Messages are built when the module is imported, so that no generated code
has to match the installed protobuf.
"""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

# By message: NAME NUMBER TYPE of each field; "*" repeats, "map:TYPE" has texts as keys.
_FIELDS = {
    "SparseCsr": "values 1 bytes, crow_indices 2 bytes, col_indices 3 bytes",
    "Tensor": "dense 1 bytes, sparse_csr 2 SparseCsr, dtype 3 int32, shape 4 int64*",
    "BatchedTensor": "data 1 bytes, offsets 2 bytes, dtype 3 int32, trailing_shape 4 int64*",
    "ArrayRecord": "type_tag 1 string, fields 2 map:BatchedTensor, num_datums 3 int64",
    "ForwardBackwardOutput": "loss_fn_output_type 1 string, loss_fn_outputs 2 ArrayRecord*, metrics 3 map:double",
    "EncodedTextChunk": "tokens 1 bytes",
    "ImageChunk": "data 1 bytes, format 2 string",
    "DmelChunk": "dmel 1 bytes",
    "Chunk": "encoded_text 1 EncodedTextChunk, image 2 ImageChunk, dmel 3 DmelChunk",
    "PromptProvenanceSpan": "sequence_id 1 string, offset 2 int64, length 3 int64",
    "SampledProvenanceSpan": "sequence_id 1 string, offset 2 int64, length 3 int64",
    "ProvenanceSpan": "prompt_tokens 1 PromptProvenanceSpan, sampled_tokens 2 SampledProvenanceSpan",
    "Datum": "model_input 1 Chunk*, loss_fn_inputs 2 map:Tensor, model_input_spans 3 ProvenanceSpan*, "
             "loss_fn_input_spans 4 ProvenanceSpan*",
    "LossConfigValue": "number 1 double, text 2 string",
    "ForwardBackwardRequest": "model_id 1 string, seq_id 2 int32, data 3 Datum*, loss_fn 4 string, "
                              "loss_fn_config 5 map:double, forward_only 6 bool, loss_fn_config_v2 7 map:LossConfigValue",
    "TopkLogprobs": "token_ids 1 bytes, logprobs 2 bytes, k 3 uint32, length 4 uint32",
    "SampledSequence": "stop_reason 1 int32, tokens 2 bytes, logprobs 3 bytes, topk_sampled_logprobs 4 TopkLogprobs",
    "PromptAltTokens": "tokens 1 Tensor, logprobs 2 Tensor",
    "SampleResponse": "sequences 1 SampledSequence*, prompt_logprobs 2 bytes, topk_prompt_logprobs 3 TopkLogprobs, "
                      "prompt_cache_hit_tokens 4 int32, target_prompt_logprobs 5 Tensor, prompt_alt_tokens 6 PromptAltTokens",
}  # fmt: skip
_PACKAGE = "espalier.tinker"
_Field = descriptor_pb2.FieldDescriptorProto


def _set_type(field: Any, kind: str) -> None:
    if kind in _FIELDS:
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
    else:
        field.type = getattr(_Field, f"TYPE_{kind.upper()}")


def _add_map(message: Any, field: Any, kind: str) -> None:
    """A map is a repeated message of key and value on the wire."""
    entry = message.nested_type.add(name="".join(part.title() for part in field.name.split("_")) + "Entry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=_Field.LABEL_OPTIONAL, type=_Field.TYPE_STRING)
    _set_type(entry.field.add(name="value", number=2, label=_Field.LABEL_OPTIONAL), kind)
    field.type, field.type_name = _Field.TYPE_MESSAGE, f".{_PACKAGE}.{message.name}.{entry.name}"


def _messages() -> dict[str, Any]:
    # proto2, where every field knows whether it is set.
    file = descriptor_pb2.FileDescriptorProto(name="espalier/tinker.proto", package=_PACKAGE, syntax="proto2")
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        for text in fields.split(", "):
            field_name, number, kind = text.split()
            is_repeated = kind.endswith("*") or kind.startswith("map:")
            field = message.field.add(name=field_name, number=int(number),
                                      label=_Field.LABEL_REPEATED if is_repeated else _Field.LABEL_OPTIONAL)  # fmt: skip
            if kind.startswith("map:"):
                _add_map(message, field, kind.removeprefix("map:"))
                continue
            _set_type(field, kind.removesuffix("*"))
            if is_repeated and kind == "int64*":
                field.options.packed = True
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _FIELDS}


_CLASSES = _messages()
ForwardBackwardRequest = _CLASSES["ForwardBackwardRequest"]
ForwardBackwardOutput = _CLASSES["ForwardBackwardOutput"]
SampleResponse = _CLASSES["SampleResponse"]

FLOAT32, INT64, INT32 = 1, 2, 3  # DType
STOP, LENGTH = 0, 1              # StopReason
