#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What `espalier prepare` does with the chat templates of TRL and llama.cpp: docs/chat-templates.md.

    python scripts/chat_templates.py [--llama-cpp DIR]           # writes it; without DIR, llama.cpp's are downloaded
    python scripts/chat_templates.py --check [--llama-cpp DIR]   # fails if it differs; without DIR, in TRL's table
    python scripts/chat_templates.py --show FILE.jinja           # the line of any template

Conversations of unique words go through the program's own rendering (python/espalier/chats), and each cell says what came out.
The tokenizers are made here: bytes, and as special tokens what looks like one.
"""

import argparse
import importlib.util
import json
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from importlib.metadata import version
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

from espalier.chats.probes import ANSWER, SWITCHES, USER, Probes, answer, schema, user
from espalier.chats.template import ChatTemplate
from espalier.chats.turns import render
from espalier.errors import RenderError

PAGE = Path(__file__).resolve().parents[1] / "docs/chat-templates.md"
# The public source distribution that has llama.cpp's models/templates, and the commit of llama.cpp that it names.
PACKAGE, RELEASE, COMMIT = "llama-cpp-python", "0.3.36", "0c1e57098"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
FOLDER = "/vendor/llama.cpp/models/templates/"

SPECIAL = re.compile(
    r"<[|\uff5c][^|\uff5c<>{}'\n]{1,40}[|\uff5c]>|<\|[a-z_]+>|<[a-z_]+\|>|</?s>|\[/?[A-Z_]{3,}\]|\[e~\[|\]~b\]|\]~!b\[|"
    r"<(?:start|end|begin|beginning)_of_\w+>|</(?:assistant|user|system)>|<seed:(?:bos|eos)>|<SPECIAL_\d+>|<sep>"
)
TAG = re.compile(r"</?[A-Za-z_]+(?::[a-z_]+)*>")  # added tokens of most tokenizers, but not special
END = re.compile(r"(?i)end(?!_header|_of_role)|eo[st]|eom|</|return|\[e~\[|<turn\||message_sep|<sep>|SPECIAL_12")


def tokenizer_of(source):
    """A byte-level tokenizer with a template and its special tokens: of its source, and of what it writes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={character: number for number, character in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    )
    tokenizer.chat_template = source
    short, long, prompt = rendered_texts(tokenizer)
    special = {*SPECIAL.findall(source), *SPECIAL.findall(long)}
    for tokens, is_special in ((special, True), (set(TAG.findall(source)) - special, False)):
        tokenizer.add_tokens(
            [AddedToken(token, special=is_special, normalized=False) for token in sorted(tokens)], special_tokens=is_special
        )
    if not re.search(r"\beos_token\b", source):
        endings = [long, short] if short == prompt else [short, long]  # of which some have the next turn's beginning
        behind = next(filter(None, (text.partition(ANSWER)[2].partition(USER)[0] for text in endings)), "")
        ends = [token for token in SPECIAL.findall(behind) if END.search(token)]
        tokenizer.eos_token = ends[-1] if ends else "<eos>"
    return tokenizer


def rendered_texts(tokenizer):
    """A question with its answer, both with another question, both with a generation prompt; "" where the template fails."""

    def rendered(messages, add_generation_prompt, tools=None):
        try:
            return tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt, tools=tools
            )
        except Exception as error:
            raise RenderError(str(error)) from None

    probes = Probes(rendered)
    probes.find_parts()
    talk = [user(), answer()]
    texts = [probes.text(talk, False), probes.text([*talk, user(USER + "s")], False), probes.text(talk)]
    return [text or "" for text in texts]


NAMES = [f"function_{number}" for number in range(1, 5)]
TOOLS = [schema(name, "key") for name in NAMES]


def says(role, number, **keys):
    return {"role": role, "content": f"{role} text {number}.", **keys}


def thought(number):
    return f"thought {number}."


def turn(number, *calls, thinks=False, content=None):
    """A message of the assistant: an answer, or calls with the given numbers."""
    message = says("assistant", number)
    if calls:
        message["content"] = content
        message["tool_calls"] = [
            {
                "id": f"call0000{call}",
                "type": "function",
                "function": {"name": NAMES[call - 1], "arguments": json.dumps({"key": f"value {call}", "switch": True})},
            }
            for call in calls
        ]
    return {**message, "reasoning_content": thought(number)} if thinks else message


def result(number):
    return {"role": "tool", "tool_call_id": f"call0000{number}", "name": NAMES[number - 1], "content": f"result {number}."}


def answers(thinks=False):
    return [message for number in (1, 2, 3) for message in (says("user", number), turn(number, thinks=thinks))]


def loop(thinks=False):
    """A question, two calls one after the other, an answer, and another question with its answer."""
    calls = [message for number in (1, 2) for message in (turn(number, number, thinks=thinks), result(number))]
    return [says("user", 1), *calls, turn(3, thinks=thinks), says("user", 2), turn(4, thinks=thinks)]


def variants(is_so):
    """In words, with what conversations have a property: "" with nothing, None if never. is_so(messages before them, tools)."""
    if is_so([], None):
        return ""
    system = [says("system", 0)]
    words = ["a system prompt"] * is_so(system, None) + ["tools"] * is_so([], TOOLS)
    if words:
        return " with " + " or ".join(words)
    return " with a system prompt and tools" if is_so(system, TOOLS) else None


class Talk:
    """A rendered conversation. `losses`, `contexts`: of each turn, what it writes, and the text before that."""

    def __init__(self, template, messages, tools=None):
        self.counts, self.losses, self.contexts = Counter(), {}, {}
        weights = [1.0] * sum(message["role"] == "assistant" for message in messages)
        rendered = render(template, messages, weights, tools, lambda kind: self.counts.update([kind]))
        self.rewritten_at = rendered.rewritten_at
        for run in rendered.runs:
            for at, number in enumerate(run.turns):
                self.losses[number] = run.texts[2 * at + 1]
                self.contexts[number] = "".join(run.texts[: 2 * at + 1])


def bare(token):
    """A special token without its brackets."""
    return re.sub(r"^[<|\uff5c]+|[|\uff5c>]+$", "", token)


class Subject:
    """A template that is looked at. `tools`: those that all conversations have, if it needs some."""

    def __init__(self, source):
        self.tokenizer = tokenizer_of(source)
        self.template = ChatTemplate(self.tokenizer, has_beside=lambda: False)
        self.tools = None
        try:
            self.talk(answers())
        except RenderError:
            self.tools = TOOLS
        self.talk(answers())

    def talk(self, messages, tools=None, template=None):
        """Raises RenderError."""
        try:
            return Talk(template or self.template, messages, tools or self.tools)
        except RenderError:
            raise
        except Exception as error:  # of the template
            raise RenderError(f"{type(error).__name__}: {error}") from None

    def counts(self, messages, tools=None):
        try:
            return self.talk(messages, tools).counts
        except RenderError:
            return Counter()

    def writes(self, messages, number, words, template=None):
        """Whether a turn writes words. A conversation that is refused writes none."""
        try:
            return words in self.talk(messages, TOOLS, template).losses.get(number, "")
        except RenderError:
            return False

    def rewrites(self, messages, turns, tools=None):
        """Whether the first turn that does not extend the one before it is one of these."""
        try:
            return self.talk(messages, tools).rewritten_at in turns
        except RenderError:
            return False

    def history(self):
        """When a turn does not extend the one before it."""
        after_results = variants(lambda before, tools: self.rewrites([*before, *loop()], (1, 2), tools))
        after_users = variants(
            lambda before, tools: (
                self.rewrites([*before, *answers()], (1, 2), tools) or self.rewrites([*before, *loop()], (3,), tools)
            )
        )
        words = []
        if after_results is not None and after_results == after_users:
            words.append("every turn" + after_users)
        else:
            words += ["after results" + after_results] if after_results is not None else []
            words += ["user turns" + after_users] if after_users is not None else []
        if after_users is None and (self.rewrites(answers(True), (1, 2)) or self.rewrites(loop(True), (3,), TOOLS)):
            words.append("user turns with reasoning")
        return "; ".join(words) or "kept"

    def system(self):
        if self.template.fault_of_role("system", True):
            return "no"
        messages = [says("system", 1), *answers()[:2], says("system", 2), *answers()[2:]]
        try:
            talk = self.talk(messages)
        except RenderError:
            return "first"
        if any(kind.startswith("dropped") for kind in talk.counts):
            return "last"
        return "moved" if talk.rewritten_at and not self.rewrites(answers(), (1, 2)) else "yes"

    def developer(self):
        if not self.template.fault_of_role("developer", True):
            return "yes"
        return "no" if self.template.fault_of_role("system", True) else "as system"

    def schemas(self):
        return "needed" if self.tools else "yes" if self.template.renders_tools else "no"

    def calls(self):
        results = "" if self.template.renders_results else ", results as user"
        if self.template.tool_calls == "content":
            return "in content" + results
        text = self.talk(loop(), TOOLS).losses[0]
        words = ["objects" if self.template._forms.objects else "texts"]
        words += ["Python"] if "true" not in text else []
        words += [] if self.template.renders_several_calls else ["one"]
        words += ["alone"] if ChatTemplate(self.tokenizer, has_beside=lambda: True).tool_calls == "content" else []
        return ", ".join(words)

    def thoughts(self, template=None):
        """In words, which turns have their thoughts."""
        talk = answers(True)
        calling = self.writes(loop(True), 0, thought(1), template)
        if not self.writes(talk, 1, thought(2), template):
            return "calls" if calling else "no"
        words = ["yes" if calling else "answers"]
        words += [] if self.writes(talk, 0, thought(1), template) else ["not the first"]
        words += ["kept"] if thought(1) in self.talk(talk, template=template).contexts[2] else []
        return ", ".join(words)

    def reasoning(self):
        words = self.thoughts()
        switches = [name for name in SWITCHES if words == "no" and re.search(rf"\b{name}\b", self.template.source)]
        for arguments in ({name: value} for name in switches for value in (True, False)):
            others = self.thoughts(ChatTemplate(self.tokenizer, arguments=arguments))
            if others != "no":
                return f"{others}: `{json.dumps(arguments)}`"
        return words

    def prompt(self):
        """Which turns the generation prompt does not begin, and the arguments with which it does."""
        counts = {
            "differs": self.counts(answers()),
            "differs with calls": self.counts(loop(), TOOLS),
            "differs with reasoning": self.counts(answers(True)),
        }
        words = [kind for kind, count in counts.items() if count["differing_prompts"] or count["skipped_turns"]][:1]
        words += [f"`{self.template.cure}`"] if words and self.template.cure else []
        history = ["history"] if any(count["differing_history"] for count in counts.values()) else []
        return "; ".join([": ".join(words)] * bool(words) + history) or "same"

    def end(self):
        """The special tokens that end turns."""
        ends = []
        for messages, number in ((answers(), 2), (loop(), 0)):
            text = self.talk(messages, TOOLS).losses[number]
            token = next((token for token in self.template.ending_tokens if text.endswith(token)), None)
            ends.append("-" if token is None else "`eos_token`" if token == "<eos>" else f"`{bare(token)}`")
        return ", calls ".join(dict.fromkeys(ends))


COLUMNS = ("history", "system", "developer", "schemas", "calls", "reasoning", "prompt", "end")


def line_of(name, source):
    """A template's line. One that refuses every conversation has its reason in the first cell."""
    try:
        subject = Subject(source)
    except (RenderError, ValueError) as refusal:
        cells = [f"refused: {' '.join(str(refusal).split())[:60]}"] + [""] * (len(COLUMNS) - 1)
        return f"| `{name}` | {' | '.join(cells)} |"
    lists = " (lists)" if subject.template.probes.parts else ""
    return f"| `{name}`{lists} | {' | '.join(getattr(subject, column)() for column in COLUMNS)} |"


HEAD = """# Chat templates

What [`espalier prepare`](data-format.md#chats) does with chat templates, by `scripts/chat_templates.py`: conversations of
unique words go through the program's own rendering, and each cell says what came out, here with Transformers {transformers}.
Whatever a file has and its template drops is named by a note, or refused. `--tool-calls content` writes calls into the content
whatever the template does.

- **template**: of those with *(lists)* contents have to be lists of parts, which texts become.
- **history** is *kept* if every turn is a prefix of the next, so that a conversation is one row. Otherwise the template writes
  earlier messages in another way, and a new row begins: at *user turns*, *after results* of tools, or at both (*every turn*);
  perhaps only where the conversation has a system prompt, tools, or reasoning.
- **system** messages are written (*yes*), all at the beginning (*moved*), the *first* message alone (others are refused), the
  *last* alone (a note counts the others), or none (*no*: refused).
- **developer** messages are written (*yes*), become system messages (*as system*), or are refused (*no*).
- **schemas** of `tools` are written, or dropped with a note. *needed*: a conversation without `tools` is refused.
- **calls** are written by the template, which takes their arguments as *objects* or as JSON *texts*, or *in content*:
  `<tool_call>` with JSON in the content. *Python*: true is written as `True`. *one*: several calls of a message are refused.
  *alone*: content beside calls is not written, so a file that has some gets all its calls in the content. *results as user*:
  results become user messages of `<tool_response>`.
- **reasoning** is written in all turns (*yes*), turns with *calls*, *answers*, or none (*no*, with a note); perhaps only with
  `--template-args`. *kept*: history has it, too.
- **prompt**: generation prompts begin the rendered turns (*same*), or not (*differs*: a thought is opened or closed in another
  way). Then loss begins where both part. `--template-args` that cure it stand behind. *history*: both differ before the turn,
  and the row has the prompt.
- **end**: the special token that ends a turn, without its brackets, and that of turns with calls. *-*: none, so the model does
  not learn to stop.

`python scripts/chat_templates.py --show FILE.jinja` prints the line of another template.
"""
TRL = """
## TRL

The {count} templates of TRL {version} (`trl/chat_templates`), without those for training.

"""
LLAMA_CPP = """
## llama.cpp

The {count} templates of llama.cpp at {commit} (`models/templates`), as {package} {version} has them.

"""


def table(templates):
    """The lines of templates, {name: source}. Says how far it is."""
    lines = [f"| template | {' | '.join(COLUMNS)} |", "|---|" + "---|" * len(COLUMNS)]
    for number, (name, source) in enumerate(sorted(templates.items(), key=lambda item: item[0].lower()), 1):
        print(f"{number}/{len(templates)} {name}", file=sys.stderr)
        lines.append(line_of(name, source))
    return "\n".join(lines) + "\n"


def trl_section():
    folder = Path(importlib.util.find_spec("trl").origin).parent / "chat_templates"
    templates = {path.stem: path.read_text("utf-8") for path in folder.glob("*.jinja") if not path.stem.endswith("_training")}
    return TRL.format(count=len(templates), version=version("trl")) + table(templates)


def llama_cpp_section(folder):
    templates = {path.stem: path.read_text("utf-8") for path in folder.glob("*.jinja")} if folder else download()
    if not templates:
        raise SystemExit(f"{folder}: expected a folder of *.jinja, received none")
    return LLAMA_CPP.format(count=len(templates), commit=COMMIT, package=PACKAGE, version=RELEASE) + table(templates)


def download():
    """The templates of llama.cpp, from the source distribution of a package, which is neither built nor kept."""
    with tempfile.TemporaryDirectory() as folder:
        pins = Path(folder) / "requirements.txt"
        pins.write_text(f"{PACKAGE}=={RELEASE} --hash=sha256:{SHA256}\n")
        flags = ["--no-deps", "--no-binary", PACKAGE, "--require-hashes", "--requirement", str(pins), "--dest", folder]
        if subprocess.run([sys.executable, "-m", "pip", "download", *flags], stdout=sys.stderr).returncode:
            raise SystemExit(f"chat_templates.py: {PACKAGE} {RELEASE} cannot be downloaded; --llama-cpp DIR reads a copy")
        with tarfile.open(next(Path(folder).glob("*.tar.gz"))) as archive:
            members = [member for member in archive if FOLDER in member.name and member.name.endswith(".jinja")]
            return {Path(member.name).stem: archive.extractfile(member).read().decode("utf-8") for member in members}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--llama-cpp", type=Path, metavar="DIR", help="llama.cpp's models/templates, otherwise downloaded")
    parser.add_argument("--check", action="store_true", help="compare the page; without --llama-cpp, its table of TRL alone")
    parser.add_argument("--show", type=Path, metavar="FILE", help="print the line of a template")
    arguments = parser.parse_args(arguments)
    logging.set_verbosity_error()
    if arguments.show and not arguments.show.is_file():
        parser.error(f"--show {arguments.show}: expected a file, received none")
    if arguments.show:
        print(f"| template | {' | '.join(COLUMNS)} |\n{line_of(arguments.show.stem, arguments.show.read_text('utf-8'))}")
        return 0
    page = HEAD.format(transformers=version("transformers")) + trl_section()
    if arguments.llama_cpp or not arguments.check:
        page += llama_cpp_section(arguments.llama_cpp)
    if not arguments.check:
        PAGE.write_text(page, "utf-8")
        return 0
    old = PAGE.read_text("utf-8") if PAGE.is_file() else ""
    if not old.startswith(page):
        print(*[line for line in page.splitlines() if line not in old.splitlines()][:20], sep="\n", file=sys.stderr)
        print(f"{PAGE}: expected what scripts/chat_templates.py writes, received another text", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
