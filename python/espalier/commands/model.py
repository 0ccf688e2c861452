# SPDX-License-Identifier: Apache-2.0
"""The tokenizer and the config of a Hugging Face directory."""

import json
import os
import sys

from ..errors import InputError, is_failure
from .console import clipped


def load_tokenizer(model):
    """The tokenizer of a Hugging Face directory, without PyTorch: importing it takes longer than the work.

    Code that comes with a model is never run, and nobody is asked whether it should be."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    hidden = not {"torch", "transformers"} & sys.modules.keys()
    if hidden:
        sys.modules["torch"] = None  # type: ignore[assignment]  # makes find_spec report that it is missing
    try:
        try:
            from transformers import AutoTokenizer
            from transformers.utils import logging
        except ImportError as error:
            raise InputError(f"expected a Python with the package transformers, received {sys.executable}: {error}; "
                             "pip install 'espalier-train[prepare]', or set ESPALIER_PYTHON to another") from None
        logging.set_verbosity_error()
        return AutoTokenizer.from_pretrained(model, local_files_only=True, trust_remote_code=False)
    except InputError:
        raise
    except BaseException as error:  # invalid files fail in many ways
        if not is_failure(error):
            raise
        raise InputError(f"--model {model}: expected a directory with a tokenizer, received "
                         f"{type(error).__name__}: {clipped(str(error))}") from error
    finally:
        if hidden:
            del sys.modules["torch"]


def vocab_size_of(model):
    """vocab_size of the model's config.json, None if absent. Raises InputError for an invalid config.json."""
    path = model / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: expected a JSON object, received {type(error).__name__}: {clipped(str(error))}") from None
    if not isinstance(config, dict):
        raise InputError(f"{path}: expected a JSON object, received a {type(config).__name__}")
    text_config = config.get("text_config")
    size = config.get("vocab_size") or (text_config.get("vocab_size") if isinstance(text_config, dict) else None)
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size <= 0):
        raise InputError(f"{path}: field `vocab_size`: expected a whole number above 0, received {clipped(repr(size), 60)}")
    return size
