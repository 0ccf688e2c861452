# SPDX-License-Identifier: Apache-2.0
"""Tests installed wheels: check_wheels.py TORCH TRAIN, two environments, one with espalier-train and espalier-torch, the other with
espalier-train alone. scripts/wheels.sh makes them."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

MODEL = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96,
         "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6,
         "max_position_embeddings": 512, "rope_theta": 10000.0, "tie_word_embeddings": True}  # fmt: skip
CHATS = [{"messages": [{"role": "user", "content": "two and two?"}, {"role": "assistant", "content": text}]}
         for text in ("four", "five")]  # fmt: skip

# One step of a patched model of Transformers.
PATCH = """
import torch, transformers, espalier
model = transformers.AutoModelForCausalLM.from_pretrained("model")
ids = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 9]])
plain = model(input_ids=ids, labels=ids).loss.item()
espalier.hf.patch(model)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
losses = []
for _ in range(2):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert abs(losses[0] - plain) < 1e-4 and losses[1] < losses[0], (plain, losses)
print("hf.patch: loss", losses)
"""
ENGINE = """
import espalier
engine = espalier.Engine("model", learning_rate=1e-2)
rows = [{"input_ids": [5, 6, 7, 8]}, {"input_ids": [5, 6, 7, 9]}]
losses = []
for _ in range(2):
    losses.append(engine.forward_backward(rows)["loss"])
    engine.optim_step()
assert losses[1] < losses[0], losses
print("Engine: loss", losses)
"""
# Four steps, since a first one may miss, and a sample by the client of the Tinker API.
SERVER = """
import subprocess, sys, tinker
from tinker import types
command = [sys.argv[1], "serve", "--model", "model", "--port", "0", "--state", "state"]
server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
try:
    address = server.stderr.readline().split()[-1]
    service = tinker.ServiceClient(base_url=address, api_key="tml-local")
    training = service.create_lora_training_client(base_model="model", rank=2, seed=1).result()
    data = [types.Datum(model_input=types.ModelInput.from_ints([5, 6, 7]),
                        loss_fn_inputs={"target_tokens": [6, 7, last], "weights": [1.0] * 3}) for last in (8, 9)]
    losses = []
    for _ in range(4):
        done = training.forward_backward(data, "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        losses.append(done.result().metrics["loss:sum"])
    assert losses[-1] < losses[0], losses
    sampling = training.save_weights_and_get_sampling_client().result()
    sampling.sample(types.ModelInput.from_ints([5, 6]), 2, types.SamplingParams(max_tokens=3)).result()
    print("serve: loss", losses)
finally:
    server.terminate()
    server.wait()
"""
LOADS = {"operators": "import espalier.ops", "Engine": "import espalier; espalier.Engine"}


def call(*command, cwd, status=0, **variables):
    """What a command prints; ends the test where its exit status is another."""
    ours = ("PYTHONPATH", "PYTHONHOME", "ESPALIER_PYTHON", "ESPALIER_OPS", "LD_LIBRARY_PATH")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    done = subprocess.run([str(word) for word in command], cwd=cwd, env=environment | variables, capture_output=True, text=True)
    shown = " ".join(str(word) if "\n" not in str(word) else "..." for word in command[1:])
    print(f"{Path(command[0]).name} {shown}: {'ok' if done.returncode == status else 'FAILED'}", flush=True)
    if done.returncode != status:
        sys.exit(done.stdout + done.stderr)
    return done.stdout + done.stderr


def check_both(torch, folder):
    """All commands, a training step in each of the three ways, and one by the server."""
    espalier = torch / "bin/espalier"
    (folder / "config.json").write_text(json.dumps(MODEL))
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in CHATS))
    for line in ("--version", "init --config config.json --out model --tokenizer bytes", "synth --vocab-size 300 --trees 1 -o synth.jsonl",
                 "prepare --model model chats.jsonl -o rows.jsonl", "inspect --model model --data rows.jsonl",
                 "plan --model model --data rows.jsonl --no-calibration", "verify --model model --data rows.jsonl",
                 "train --model model --data rows.jsonl --out run --steps 1 --no-calibration",
                 "logprobs --model run/checkpoints/step_1 --data rows.jsonl -o logprobs.jsonl"):  # fmt: skip
        call(espalier, *line.split(), cwd=folder)
    python = torch / "bin/python"
    print(call(python, "-c", PATCH, cwd=folder) + call(python, "-c", ENGINE, cwd=folder)
          + call(python, "-c", SERVER, espalier, cwd=folder))  # fmt: skip


def check_train_alone(train, torch, folder):
    """What needs no LibTorch, with the same help; the rest says what to install."""
    espalier = train / "bin/espalier"
    for line in ("--version", "synth --trees 1 -o alone.jsonl", "inspect --data alone.jsonl", "plan --data alone.jsonl",
                 "prepare --model model chats.jsonl -o again.jsonl", "export rows.jsonl --to traces -o traces.jsonl",
                 "import traces.jsonl -o imported.jsonl", "completion bash", "man"):  # fmt: skip
        call(espalier, *line.split(), cwd=folder)
    for line in ("--help", "inspect --help", "plan --help", "synth --help", "prepare --help", "completion --help", "train --help"):
        assert call(espalier, *line.split(), cwd=folder) == call(torch / "bin/espalier", *line.split(), cwd=folder), line
    for line in ("train", "plan --model model --data rows.jsonl"):
        said = call(espalier, *line.split(), cwd=folder, status=1)
        assert "pip install 'espalier-train[torch]'" in said and said.count("\n") == 1, said


def check_refusals(torch, folder):
    """An espalier-torch of another Espalier or for another PyTorch is refused by name, before anything of it is loaded."""
    (package,) = torch.glob("lib/python*/site-packages/espalier_torch")
    built = json.loads((package / "built.json").read_text())
    shutil.copy(package / "built.json", folder)
    try:
        for changed, expected in (({"version": "0.1.0"}, "received 0.1.0"), ({"torch": "2.8.0"}, "expected PyTorch 2.8")):
            (package / "built.json").write_text(json.dumps(built | changed))
            said = [call(torch / "bin/python", "-c", code, cwd=folder, status=1) for code in LOADS.values()]
            said.append(call(torch / "bin/espalier", "train", cwd=folder, status=1))
            assert all("espalier-torch: expected" in text and expected in text for text in said), said
            call(torch / "bin/espalier", "synth", "-o", "refused.jsonl", cwd=folder)  # what needs no LibTorch runs
    finally:
        shutil.copy(folder / "built.json", package)
    for code in LOADS.values():
        call(torch / "bin/python", "-c", code, cwd=folder)


def main():
    torch, train = (Path(name).resolve() for name in sys.argv[1:])
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        check_both(torch, folder)
        check_train_alone(train, torch, folder)
        check_refusals(torch, folder)
    print("wheels: all checks passed")


if __name__ == "__main__":
    main()
