# SPDX-License-Identifier: Apache-2.0
"""The byte-level tokenizer of `espalier init --tokenizer bytes`: a token's id is its byte's value, from 256 on special tokens."""

import json
from typing import Any

from ..vocabulary import byte_characters

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TEMPLATE = ("{%- for message in messages %}"
             "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
             "{%- endfor %}"
             "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}")  # fmt: skip


def _added(content: str) -> dict[str, Any]:
    return {"content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


def tokenizer_files() -> dict[str, str]:
    """Texts of the files by name."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    tokenizer: dict[str, Any] = {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": 256 + index, **_added(token)} for index, token in enumerate(_SPECIAL)],
        "normalizer": None, "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": {character: byte for byte, character in enumerate(byte_characters())}, "merges": []}}  # fmt: skip
    config = {"tokenizer_class": "PreTrainedTokenizerFast",
              "added_tokens_decoder": {str(256 + index): _added(token) for index, token in enumerate(_SPECIAL)},
              "bos_token": None, "eos_token": _SPECIAL[2], "pad_token": _SPECIAL[0], "unk_token": None,
              "clean_up_tokenization_spaces": False,
              "chat_template": _TEMPLATE}  # which Transformers before 4.43 reads, instead of the file # fmt: skip
    return {"tokenizer.json": json.dumps(tokenizer, indent=1, ensure_ascii=False) + "\n",
             "tokenizer_config.json": json.dumps(config, indent=2) + "\n", "chat_template.jinja": _TEMPLATE}  # fmt: skip
