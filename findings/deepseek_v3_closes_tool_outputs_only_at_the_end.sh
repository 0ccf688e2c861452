#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The chat template of DeepSeek V3 that TRL 1.16.0 ships writes the token that ends a list of tool outputs only where nothing
# follows them. So the prompt from which a model samples its next call has that token, and the same conversation with the call
# does not: a row of the whole conversation trains the call behind a text that sampling never has.
#
# Ubuntu 24.04 and Debian 12, Python 3.11; transformers 5.23.0, trl 1.16.0 (its file alone). Seen:
#   prompt: ...sunny<tool output end><tool outputs end>
#   row:    ...sunny<tool output end>\n<tool call begin>function...
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.23.0 jinja2==3.1.6
"$folder/venv/bin/pip" install --quiet --no-deps --target "$folder/trl" trl==1.16.0

"$folder/venv/bin/python" - "$folder/trl/trl/chat_templates/deepseekv3.jinja" <<'PYTHON'
import sys
from pathlib import Path

import transformers
from transformers.utils.chat_template_utils import render_jinja_template

template = Path(sys.argv[1]).read_text()


def render(messages, prompt):
    texts, _ = render_jinja_template([messages], chat_template=template, add_generation_prompt=prompt, bos_token="", eos_token="<eos>")
    return texts[0]


def call(city):
    return {"role": "assistant", "content": "", "tool_calls": [
        {"type": "function", "function": {"name": "weather", "arguments": '{"city": "%s"}' % city}}]}


chat = [{"role": "user", "content": "Paris, and Rome?"}, call("Paris"), {"role": "tool", "content": "sunny"}]
prompt, row = render(chat, True), render([*chat, call("Rome")], False)
end = "<\uff5ctool\u2581outputs\u2581end\uff5c>"
print("transformers", transformers.__version__)
print("prompt:", repr(prompt[prompt.index("sunny"):]))
print("row:   ", repr(row[row.index("sunny"):]))
assert prompt.endswith(end) and end not in row, "the template has changed"
print("The prompt ends the list of outputs; the row with the next call does not.")
PYTHON
