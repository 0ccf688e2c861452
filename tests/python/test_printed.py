# SPDX-License-Identifier: Apache-2.0
"""What the Python package makes for commands: texts that need a machine which tests may not have, and the byte tokenizer."""

import json
import re

import pytest

from conftest import REPOSITORY


def test_the_byte_tokenizer_numbers_bytes(espalier, tmp_path):
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    config = json.loads((REPOSITORY / "examples/tiny_llama.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 259}))
    espalier("init", "--config", tmp_path / "config.json", "--out", tmp_path / "model", "--tokenizer", "bytes")
    tokenizer = Tokenizer.from_file(str(tmp_path / "model/tokenizer.json"))
    text = "A \n\t~ÿ\xad€"
    assert tokenizer.encode(text).ids == list(text.encode()) and tokenizer.decode(list(text.encode())) == text
    assert tokenizer.get_vocab_size() == 259 and tokenizer.get_vocab() | {"A": 65, "Ġ": 32, "Ċ": 10, "ÿ": 255, "Ń": 0xAD} == tokenizer.get_vocab()
    known = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert (known.eos_token_id, known.pad_token_id) == (258, 256)
    chat = known.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    assert chat == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert (tmp_path / "model/chat_template.jinja").read_text() == known.chat_template
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 258}))
    done = espalier("init", "--config", tmp_path / "config.json", "--out", tmp_path / "small", "--tokenizer", "bytes", check=False)
    assert done.returncode == 1 and "vocab_size: expected at least the 259 tokens of the tokenizer" in done.stderr
    assert not (tmp_path / "small").exists()


def test_devices_as_text():
    """Of GPUs, which tests may not have."""
    from espalier.printed.rows import device_text

    rates = {"dtype": "float32", "hidden_size": 8, "vocab_size": 16, "threads": 2, "measured": "2026-11-23",
             "flops_per_second": {"layers": 1e10, "attention": 4.48e11, "head": None}}  # fmt: skip
    on_gpu = {key: value for key, value in rates.items() if key != "threads"} | {
        "flops_per_second": {"layers": 5e14, "attention": 4e14, "head": 3e14}}  # fmt: skip
    cpu = {"name": "A CPU", "instruction_set": "avx2", "threads": 2, "matrix_products": "float32=library", "chosen_by": "measured",
           "rates": [rates]}  # fmt: skip
    gpu = {"device": "cuda:0", "name": "NVIDIA H200", "compute_capability": "9.0", "memory_bytes": 140 * 2**30,
           "rates": [on_gpu], "attention": {"library": "passed", "ampere": "FAILED: off"},
           "operators": {"head": "passed"}, "taken": {"attention": "library"}}  # fmt: skip
    cuda = {"libtorch": "2.11.0", "libtorch_cuda": "13.0", "driver": "580.1", "driver_cuda": "13.0", "nvcc": "13.0", "architectures": "90",
            "fault": None, "devices": [gpu]}  # fmt: skip
    lines = dict(re.split(r" {2,}", line.strip(), maxsplit=1) for line in device_text(cpu, cuda, "cuda:0").splitlines())
    assert lines["measured rates"] == "float32, hidden size 8: layers 500.0, attention 400.0, LM head 300.0 TFLOP/s (2026-11-23)"
    assert "layers 10.0, attention 448.0 GFLOP/s (2 threads, 2026-11-23)" in device_text(cpu, cuda, "cuda:0")
    assert lines["cuda:0"] == "NVIDIA H200, compute capability 9.0, 140.0 GiB" and lines["attention ampere"] == "FAILED: off"
    assert lines["ampere"] == "machine code" and lines["taken attention"] == "library" and lines["--device auto"] == "cuda:0" and "CUDA" not in lines
    without = device_text(cpu | {"rates": []}, cuda | {"nvcc": None, "driver": None, "fault": "no driver", "devices": []}, "cpu")
    assert "none stored; `espalier plan" in without and "cannot be used: no driver" in without and "this build had no nvcc" in without


@pytest.mark.parametrize("built_for, capabilities, code", [
    ("80,90-real", ("8.0", "8.6", "8.9", "9.0"), "machine code"),
    ("80,90-real", ("10.0", "10.3", "12.0", "12.1"), "PTX, compiled by the driver"),
    ("80,90-real", ("6.1", "7.0", "7.5"), "none"), ("80-real", ("9.0",), "none"), ("", ("9.0",), "none"),
    ("80-virtual", ("8.9",), "PTX, compiled by the driver"), ("86", ("8.0",), "none"),
    ("80-virtual,86-real", ("9.0",), "PTX, compiled by the driver"), ("90a", ("9.0",), "machine code"),
    ("90a", ("10.0",), "none"),  # of that version alone, PTX, too
    ("80,120-real", ("12.0",), "machine code"),
])  # fmt: skip
def test_the_code_of_gpu_kernels(built_for, capabilities, code):
    from espalier.printed.rows import code_of

    assert {code_of(capability, built_for) for capability in capabilities} == {code}


def test_the_gain_that_trees_add_comes_first():
    from espalier.printed.figures import gain_figures

    names = lambda packing, merging: [over for _, over, _ in gain_figures(
        {"predicted_speedup_over_sequence_packing": packing, "predicted_speedup_over_append_only": merging})]  # fmt: skip
    assert names(10.5, 1.21) == ["append-only merging", "sequence packing"]  # turns of conversations
    assert names(10.5, 10.4) == ["sequence packing", "append-only merging"]  # answers to a prompt, of which two are equal
