# SPDX-License-Identifier: Apache-2.0
"""Transformers models that train on trees of tokens, in one line:

    model = espalier.hf.patch(model)

A patched model takes the batches that it took before, padded or packed, and returns hidden states, logits, losses and
gradients as before; prefixes that rows of a batch share are encoded once.
"""

from .versions import is_tested, what_to_pin

try:
    from .checked_patch import patch
    from .group_sampling import GroupSampler, group_sampler
    from .patching import Sharing, sharing, unpatch
    from .sharing_log import SharingCallback, SharingMeter, log_sharing
    from .verification import Report, VerificationError, verify
except ImportError as error:
    if is_tested():
        raise
    raise ImportError(f"espalier.hf: expected a Transformers with all that it takes from it, received one without: {error}"
                      f"{what_to_pin()}") from error  # fmt: skip

__all__ = ["GroupSampler", "Report", "Sharing", "SharingCallback", "SharingMeter", "VerificationError", "group_sampler",
           "log_sharing", "patch", "sharing", "unpatch", "verify"]  # fmt: skip
