# SPDX-License-Identifier: Apache-2.0
"""Models of Transformers as their default configs have them, without weights, for proofs by small copies."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM


def default_model(model_type, **settings):
    """In evaluation, where dropout is off."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings)).eval()
