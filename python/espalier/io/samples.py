# SPDX-License-Identifier: Apache-2.0
"""prime-rl's training samples as rows (August 2026: transports/rollouts/types.py, trainer/rl/token_export.py).

`TrainingSample` has one entry for each token in `token_ids, mask, logprobs, advantages, ref_logprobs` and the weights
`rl_weights`, `ce_weights`, `ref_kl_weights`. `token_exports/step_N/rank_R.jsonl` names the mask `loss_mask` and the
log-probabilities `inference_logprobs`. Its `rank_R.bin` (msgpack) is not read.

Weights: with `rl_weights` only, the row has loss_weights of mask times weight; with `ce_weights` only, those weights.
If there are both, --loss-weights selects one. Log-probabilities and advantages belong to `rl`; a row of `ce`, which may
carry loss on tokens that were not sampled, has none.
"""

from ..errors import BadRow
from .parts import refuse_images
from .rules import checked, number, same_length, token_ids, zero_one

CROSS_ENTROPY = "ce"
STREAMS = {"rl": "rl_weights", "ce": "ce_weights", "ref_kl": "ref_kl_weights"}


def rows(record, options):
    """Yields the row of one sample. options.loss_weights: "rl", "ce" or None for the only stream."""
    refuse_images(record, "mm_kwargs", "mm_token_type_ids")
    ids = token_ids(record.list("token_ids"), "token_ids")
    name, mask = record.first_of("mask", "loss_mask")
    if name is None:
        raise BadRow("mask", "a mask of the tokens that carry loss", "none")
    mask = zero_one(name, mask, len(ids), "token_ids")
    stream, loss = _loss(record, mask, options.loss_weights)
    row = {"input_ids": ids} | loss
    for field, names in (("logprobs", ("logprobs", "inference_logprobs")), ("ref_logprobs", ("ref_logprobs",)),
                         ("advantages", ("advantages",))):
        name, values = record.first_of(*names)
        if name and not _all_null(values) and stream != CROSS_ENTROPY:
            row[field] = same_length(name, values, len(ids), "token_ids")
    row["temperature"] = _temperature(record.get("temperatures", []), mask)
    row["routed_experts"] = _routes(record)
    yield checked(row)


def _temperature(temperatures, mask):
    """That of the tokens with loss; None where it is 1."""
    found = {number("temperatures", value) for value, carries in zip(temperatures, mask) if carries}
    if len(found) > 1:
        raise BadRow("temperatures", "one temperature of all tokens with loss", ", ".join(map(str, sorted(found))))
    return found.pop() if found - {1.0} else None


def _all_null(values):
    return isinstance(values, list) and all(value is None for value in values)


def _loss(record, mask, chosen):
    """The stream of weights that is used (None if the sample has none), and loss_mask or loss_weights."""
    given = [stream for stream, name in STREAMS.items() if name in record and not _all_null(record.peek(name))]
    if chosen is None and len(given) > 1:
        raise BadRow(STREAMS[given[0]], "one stream of weights, or --loss-weights to name one of them",
                     ", ".join(given))
    stream = chosen or (given[0] if given else None)
    refuse_unnamed(stream, chosen, STREAMS["ref_kl"])
    if stream not in given:
        return None, {"loss_mask": mask}
    name = STREAMS[stream]
    weights = [number(name, value) for value in same_length(name, record.get(name), len(mask), "token_ids")]
    if stream == "rl":
        weights = [loss * weight for loss, weight in zip(mask, weights)]
    return stream, {"loss_weights": weights}


def refuse_unnamed(stream, chosen, field):
    """Raises BadRow for weights of the loss against a reference model, unless they are selected explicitly: with another
    loss they have another meaning."""
    if stream == "ref_kl" and chosen is None:
        raise BadRow(field, "weights of rl or ce, or --loss-weights ref_kl", "ref_kl alone")


def _routes(record):
    """[tokens, layers, chosen], or the bytes of such an array with its shape and dtype."""
    routes = record.get("routed_experts")
    if routes is None or isinstance(routes, list):
        return routes
    import numpy as np

    try:
        fields = routes if isinstance(routes, dict) else vars(routes)
        return np.frombuffer(fields["data"], fields["dtype"]).reshape(fields["shape"]).tolist()
    except (KeyError, TypeError, ValueError):
        raise BadRow("routed_experts", "a list with the routes of every token", f"a {type(routes).__name__}") from None
