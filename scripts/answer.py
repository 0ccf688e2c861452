#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Loads a model directory with Transformers and answers one prompt, greedily.

    scripts/answer.py MODEL_DIR [--prompt TEXT] [--max-new-tokens N]
"""

import argparse
import os
import sys
from pathlib import Path


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL_DIR", help="a Hugging Face directory, such as a checkpoint")
    parser.add_argument("--prompt", default="Name the capital city of France in one short sentence.", help="(default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=32, metavar="N", help="(default: %(default)s)")
    arguments = parser.parse_args()
    if not (arguments.model / "config.json").is_file():
        parser.error(f"expected a model directory, received {arguments.model}")

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32, trust_remote_code=False)
    text = tokenizer.apply_chat_template([{"role": "user", "content": arguments.prompt}], tokenize=False,
                                         add_generation_prompt=True)
    prompt = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
    answer = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False,
                            max_new_tokens=arguments.max_new_tokens, pad_token_id=tokenizer.eos_token_id)
    print(f"> {arguments.prompt}")
    text = tokenizer.decode(answer[0, prompt.shape[1]:], skip_special_tokens=True).strip()
    print(text or "(nothing but white space, as may be expected of a small random model)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
