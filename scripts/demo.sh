#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The whole path on real conversations: prepare, sample a group of answers, inspect, verify, train, bench, and the
# checkpoint answers a prompt.
#   scripts/demo.sh         SmolLM2-135M-Instruct; where its weights cannot be had, a small random model
#   scripts/demo.sh --tiny  the small random model
#   scripts/demo.sh --full  SmolLM2 with a group of 16 answers, as in README.md, not 8: packing them takes a minute longer
# Everything lands in runs/demo (or runs/demo-tiny) and is made anew; weights stay in data/models.
set -euo pipefail
cd "$(dirname "$0")/.."

python=$(scripts/setup.sh --print-python)
chats=examples/tau_airline_part.jsonl
smollm2=data/models/SmolLM2-135M-Instruct
prompt=38/0/turn-1  # which the group of answers answers
answers=8
export TOKENIZERS_PARALLELISM=false

use_smollm2() {
  model=$smollm2
  dtype=float32
  conversations=4   # of the 8, and their shorter turns, for training: about 2,000 distinct tokens
  longest=1520
  part=2            # trajectories that `verify` runs on
  steps=4
  rate=1e-5
  budget=2048
  group_budget=3072
}

use_tiny() {
  model=$out/model
  dtype=float32
  conversations=4
  longest=7000
  part=3
  steps=10
  rate=3e-3
  budget=16384
  group_budget=16384
}

headline() { printf '\n== %s\n' "$*"; }

# Shows a command as a user would type it, then runs it.
show() {
  printf '$ %s\n' "$*"
  "$@"
}

choose_model() {
  if [[ $tiny == no ]]; then
    headline "SmolLM2-135M-Instruct"
    local status=0
    "$python" scripts/fetch_smollm2.py --out "$smollm2" || status=$?
    case $status in
      0)
        use_smollm2
        return
        ;;
      3) echo "demo: going on with a small random model instead" ;;
      *) exit "$status" ;;
    esac
  fi
  headline "A small random model with a byte-level tokenizer"
  use_tiny
  show bin/espalier init --config examples/tiny_llama.json --out "$model" --seed 0 --tokenizer bytes
}

case "${1:-}" in
  "") tiny=no out=runs/demo ;;
  --full) tiny=no out=runs/demo answers=16 ;;
  --tiny) tiny=yes out=runs/demo-tiny ;;
  *)
    echo "usage: scripts/demo.sh [--tiny | --full]" >&2
    exit 2
    ;;
esac
rm -rf "$out"
mkdir -p "$out" data/models
choose_model

headline "Conversations become trajectories: one per assistant turn"
show bin/espalier prepare --model "$model" "$chats" --per-turn --group-by task_id -o "$out/all.safetensors"
show bin/espalier prepare --model "$model" "$chats" --per-turn --group-by task_id --limit "$conversations" \
  --max-tokens "$longest" -o "$out/rows.jsonl"

headline "A group: the model samples $answers answers to one real prompt"
show "$python" scripts/sample_answers.py "$model" "$out/rows.jsonl" --trajectory "$prompt" --answers "$answers" \
  -o "$out/group.jsonl"

headline "What sharing promises: on the group, and on the turns of all conversations"
show bin/espalier inspect --model "$model" --data "$out/group.jsonl" --html "$out/group.html"
show bin/espalier inspect --model "$model" --data "$out/all.safetensors" --html "$out/inspect.html"

headline "The tree run equals training each trajectory by itself"
show bin/espalier verify --model "$model" --data "$out/rows.jsonl" --limit "$part" --token-budget "$budget" \
  --dtype float64

headline "Training"
show bin/espalier train --model "$model" --data "$out/rows.jsonl" --out "$out/run" --dtype "$dtype" \
  --objective sft --steps "$steps" --learning-rate "$rate" --scheduler constant --batch-size 0 --token-budget "$budget"
"$python" - "$out/run/metrics.jsonl" <<'PYTHON'
import json
import sys

losses = [json.loads(line)["loss"] for line in open(sys.argv[1])]
print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps")
if not losses[-1] < losses[0]:
    sys.exit("demo: expected a falling loss")
PYTHON

headline "Measured on the group, which append-only merging cannot help: speed-up beside its bound"
show bin/espalier bench --model "$model" --data "$out/group.jsonl" --objective grpo --dtype "$dtype" \
  --token-budget "$group_budget" --repeats 1

headline "Measured on the turns: over sequence packing, and over append-only merging"
show bin/espalier bench --model "$model" --data "$out/rows.jsonl" --dtype "$dtype" --token-budget "$budget" --repeats 1

headline "Transformers loads the checkpoint"
show "$python" scripts/answer.py "$out/run/checkpoints/step_$steps"

printf '\nNext, with your own chats or rollouts: bin/espalier prepare --model DIR chats.jsonl -o rows.jsonl, and then bin/espalier inspect --data rows.jsonl\n'
