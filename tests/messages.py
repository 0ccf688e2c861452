# SPDX-License-Identifier: Apache-2.0
"""The refusals and warnings that the sources can print, as patterns with `...` for what is filled in.

What counts: in Python `raise` of an error with a message, and
`warnings.warn`; in C++ `ESPALIER_CHECK`, `TORCH_CHECK`, `throw InputError`, lines for the log, texts that begin with "warning: " or "note: ", and
the warnings about data. Operators (src/espalier/ops) are called by models, not by users, and do not count; neither do assertions.
"""

import ast
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RAISED = {"InputError", "Unsupported", "ImportError", "RuntimeError", "ValueError", "TypeError", "RankError", "VerificationError",
          "BadRow", "UsageError", "FileError"}  # fmt: skip
CPP = re.compile(r'\b(?:ESPALIER_CHECK|TORCH_CHECK|log_line|explained)\(|\bthrow (?:InputError|NewerFormatError|RunError|RankError)\(|(?=fmt::format\(\s*"(?:warning|note): )')
LISTED = re.compile(r"\b(?:warnings|lines)\.push_back\(")  # in the sources of the warnings about data
LISTS = ("signal.cpp", "data_summary.cpp")
FRAME = re.compile(r"espalier: |error: |warning:|note: |\(see --help\)|\{.*?\}")  # around the words of a message
NAMED = re.compile(r"named\(((?:[^()]|\(\))*)\)")  # an option (base/option_names.h)
LITERAL = re.compile(r'"((?:[^"\\\n]|\\.)*)"')


class Message(NamedTuple):
    place: str  # file:line
    text: str


def tidy(text):
    text = re.sub(r"\{[^{}]*\}", "...", text.replace("{{", "(").replace("}}", ")"))
    text = re.sub(r"\s+", " ", text.replace("\\n", " ").replace('\\"', '"').replace("\\", ""))
    return re.sub(r"(\.\.\.\s*)+(?=\.\.\.)", "", text).strip()


def text_of(node):
    """A string expression with `...` in place of values; None where it has no words."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(value.value if isinstance(value, ast.Constant) else "..." for value in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return f"{text_of(node.left) or '...'}{text_of(node.right) or '...'}"
    if isinstance(node, ast.IfExp):
        return text_of(node.body) or text_of(node.orelse)
    return None


def python_messages(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        call = node.exc if isinstance(node, ast.Raise) else node.value if isinstance(node, ast.Expr) else None
        if not isinstance(call, ast.Call):
            continue
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if name == "BadRow" and len(call.args) == 3:
            yield node.lineno, f"field `{text_of(call.args[0]) or '...'}`: expected {text_of(call.args[1]) or '...'}, received ..."
        elif name in RAISED or name == "warn":
            for argument in call.args:
                if text := text_of(argument):
                    yield node.lineno, text
                    break


def cpp_messages(path):
    source = re.sub(r"^\s*//.*$", lambda match: " " * len(match[0]), path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    for match in [*CPP.finditer(source), *(LISTED.finditer(source) if path.name in LISTS else ())]:
        depth, at = 0, source.index("(", match.start())
        end = at
        while True:
            literal = LITERAL.match(source, end)
            if literal:
                end = literal.end()
                continue
            depth += {"(": 1, ")": -1}.get(source[end], 0)
            end += 1
            if depth == 0:
                break
        if text := _text_of_call(source[at + 1 : end - 1]):
            yield source.count("\n", 0, match.start()) + 1, text


def _arguments_of_call(call):
    """The arguments, split at the commas between them."""
    arguments, begin, depth, at = [], 0, 0, 0
    while at < len(call):
        if literal := LITERAL.match(call, at):
            at = literal.end()
            continue
        depth += {"(": 1, "{": 1, "[": 1, ")": -1, "}": -1, "]": -1}.get(call[at], 0)
        if call[at] == "," and depth == 0:
            arguments.append(call[begin:at])
            begin = at + 1
        at += 1
    return [argument.strip() for argument in (*arguments, call[begin:])]


def _text_of_call(call):
    """The words of all arguments; options that are named stand as flags in place of their placeholders."""
    arguments = _arguments_of_call(call)
    first = next((number for number, each in enumerate(arguments) if each.startswith('"')), len(arguments))
    values = iter(arguments[first + 1 :])

    def value_of(placeholder):
        option = NAMED.fullmatch(next(values, ""))
        return f"--{' '.join(LITERAL.findall(option[1])) or '...'}" if option else placeholder[0]

    texts = []
    for number, argument in enumerate(arguments):
        literals = list(LITERAL.finditer(argument))
        text = ""
        for literal, before in zip(literals, [None, *literals]):
            joined = before is not None and not argument[before.end() : literal.start()].strip()
            text += ("" if before is None or joined else "...") + literal[1]
        if number == first:
            text = re.sub(r"(?<!\{)\{[^{}]*\}(?!\})", value_of, text)
        if text and not NAMED.fullmatch(argument):
            texts.append(text)
    return "...".join(texts)


def shell_messages(path):
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        for text in re.findall(r'echo "([^"]*)"', line):
            yield number, re.sub(r"\$\w+", "...", text)


def messages(paths):
    found = []
    for path in paths:
        read = {".py": python_messages, ".in": shell_messages}.get(path.suffix, cpp_messages)
        name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
        found += [Message(f"{name}:{line}", tidy(text)) for line, text in read(path) if re.search(r"[a-z]{3}", FRAME.sub("", text))]
    return found


def sources():
    folders = ("commands", "train", "engine", "data", "config", "model", "objective", "plan", "runtime", "sample", "measure", "verify",
               "base", "tree", "inspect", "distributed", "python", "python_engine",
               "python_module")  # fmt: skip
    for folder in folders:
        yield from sorted(path for path in (ROOT / "src/espalier" / folder).rglob("*") if path.suffix in (".cpp", ".h"))
    yield from sorted((ROOT / "python/espalier").rglob("*.py"))
    yield ROOT / "cmake/espalier.in"


if __name__ == "__main__":
    for each in messages(sources()):
        print(f"{each.place}: {each.text}")
