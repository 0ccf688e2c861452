#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that what the documents name exists.

    tests/check_docs.py              checks README.md, CONTRIBUTING.md, examples/README.md and docs/; exit 1 and one line per fault
    tests/check_docs.py --self-test  also plants faults in a scratch folder and demands that each is found

Rules: the target of a relative link exists, and so does the heading that its anchor names. A path in back-ticks, such as
`engine/batch.h`, is a file below the root of the repository, src/espalier or src/espalier/ops; a path that ends in a slash is a
folder there. `FILE: name` demands that the file has the name. A component in capitals stands for the reader's own name and
is not checked. A table ends at an empty line: Markdown takes any other line for a row. The table of docs/architecture.md says the
same as MAY_INCLUDE of check_layers.py. Every page of docs/ is in the navigation of mkdocs.yml.
"""

import argparse
import re
import sys
import tempfile
from pathlib import Path

from check_layers import MAY_INCLUDE

BASES = ("", "src/espalier", "src/espalier/ops")
BUILT = ("build", "bin", "runs", "~")  # what building and running makes
MAP = "docs/architecture.md"
SITE = "mkdocs.yml"
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"([\w.~-]+(?:/[\w.~-]+)*(?:/[\w-][\w.-]*\.\w+|/))(?:: ([\w:]+))?")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
TABLE_END = re.compile(r"^\|.*\|\n(?=[^|\n])", re.MULTILINE)
IN_NAVIGATION = re.compile(r"^ +- (?:[^\n]*: )?([\w/-]+\.md)$", re.MULTILINE)
ROW = re.compile(r"^\| `(\w+)/` \|[^|]*\| ([^|]*) \|$", re.MULTILINE)


def documents(root):
    pages = (root / "README.md", root / "CONTRIBUTING.md", root / "examples/README.md")
    return [path for path in pages if path.exists()] + sorted((root / "docs").rglob("*.md"))


def faults(root):
    """Yields "FILE:LINE: what is wrong" for every document below `root`."""
    for path in documents(root):
        text = path.read_text(encoding="utf-8")
        prose = FENCED.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)  # keeps the line numbers
        found = [(match.start(), link_fault(root, path, match[1])) for match in LINK.finditer(prose)]
        found += [(match.start(), code_fault(root, match[1])) for match in CODE.finditer(prose)]
        found += [(match.end(), "a table that no empty line ends") for match in TABLE_END.finditer(prose)]
        for place, fault in sorted((place, fault) for place, fault in found if fault):
            yield f"{path}:{text.count(chr(10), 0, place) + 1}: {fault}"
    if (root / SITE).exists():
        listed = set(IN_NAVIGATION.findall((root / SITE).read_text(encoding="utf-8")))
        for path in sorted((root / "docs").rglob("*.md")):
            if path.relative_to(root / "docs").as_posix() not in listed:
                yield f"{path}:1: not in the navigation of {SITE}"
    if (root / MAP).exists():
        for fault in map_faults((root / MAP).read_text(encoding="utf-8")):
            yield f"{root / MAP}:1: {fault}"


def link_fault(root, document, target):
    """What is wrong with one link; None when nothing is."""
    if re.match(r"[a-z]+:", target):
        return None
    name, _, anchor = target.partition("#")
    path = document.parent / name if name else document
    if not path.exists():
        return f"link to {target}: no such file"
    if anchor and anchor not in anchors(path.read_text(encoding="utf-8")):
        return f"link to {target}: no such heading"
    return None


def anchors(text):
    """The anchors that GitHub gives to the headings."""
    titles = [re.sub(r"[^\w\- ]", "", title.strip().lower()) for title in HEADING.findall(FENCED.sub("", text))]
    return {title.replace(" ", "-") for title in titles}


def code_fault(root, code):
    """What is wrong with text in back-ticks; None when nothing is, or when it is no path."""
    match = PATH.fullmatch(code)
    if not match:
        return None
    parts = match[1].split("/")
    if parts[0] in BUILT or any(re.fullmatch(r"[A-Z_]+(\.\w+)?", part) for part in parts):
        return None
    paths = [root / base / match[1] for base in BASES if (root / base / match[1]).exists()]
    if not paths:
        return f"`{code}`: no such {'folder' if match[1].endswith('/') else 'file'}"
    if match[2] and match[2].split("::")[-1] not in paths[0].read_text(encoding="utf-8"):
        return f"`{code}`: the file does not have this name"
    return None


def map_faults(text):
    """Where the table of modules differs from MAY_INCLUDE."""
    rows = {}
    for module, cell in ROW.findall(text):
        named = set(re.findall(r"`(\w+)`", cell))
        if cell == "all" or cell.startswith("all but "):
            named = set(MAY_INCLUDE) - {module} - named
        elif "and all that it may include" in cell:
            named |= set().union(*(rows.get(name, set()) for name in named))
        rows[module] = named
    for module, allowed in MAY_INCLUDE.items():
        if module not in rows:
            yield f"the table has no row for {module}"
        elif rows[module] != allowed - {module}:
            yield f"{module}: the table allows {sorted(rows[module])}, check_layers.py {sorted(allowed - {module})}"
    yield from (f"{module}: in the table, but not in check_layers.py" for module in set(rows) - set(MAY_INCLUDE))


PLANTED = {
    "docs/a.md": "[gone](gone.md)",
    "docs/b.md": "[gone](sound.md#no-such-heading)",
    "docs/deep/c.md": "[the wrong folder](d.md)",
    "docs/d.md": "`engine/gone.h`",
    "docs/e.md": "`engine/batch.h: gone`",
    "docs/f.md": "`engine/gone/`",
    "docs/g.md": "```\ncode\n```\n`tests/gone_test.cpp`",
    "docs/h.md": "| a | b |\n|---|---|\n| c | d |\nwords",
    "README.md": "[gone](docs/gone.md)",
    "docs/forgotten.md": "words",
    "docs/architecture.md": "| `base/` | checks | `tree` |",
}
SOUND = {
    "docs/sound.md": "# A heading, `with` code\n[above](#a-heading-with-code) [web](https://example.org) `engine/batch.h: make_step` "
                     "`src/espalier/engine/` `RUN/gone.json` `ops/NAME/cpu.cpp` `build/release/gone.so` `a / b`\n```\n`a/gone.h`\n```\n"
                     "| a | b |\n|---|---|\n| c | d |\n\nwords",
    "docs/deep/sound.md": "[up](../sound.md#a-heading-with-code) `kernels/a.h`",
}
LISTED = [*"abdefgh", "deep/c", "architecture", "sound", "deep/sound"]
SOURCES = {SITE: "nav:\n" + "".join(f"  - A title: {name}.md\n" for name in LISTED),
           "src/espalier/engine/batch.h": "void make_step();\n", "src/espalier/ops/kernels/a.h": ""}


def self_test():
    """Returns the planted documents that were missed and the sound ones that were blamed."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        for name, text in {**PLANTED, **SOUND, **SOURCES}.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text + "\n", encoding="utf-8")
        found = {str(Path(re.split(r":\d+: ", line)[0]).relative_to(root)) for line in faults(root)}
    return sorted(found ^ set(PLANTED))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--self-test", action="store_true", help="demand that planted faults are found")
    arguments = parser.parse_args()
    if arguments.self_test:
        wrong = self_test()
        if wrong:
            print(f"check_docs: the self-test misjudged {', '.join(wrong)}", file=sys.stderr)
            return 1
    root = Path(__file__).resolve().parents[1]
    found = list(faults(root))
    for line in found:
        print(line, file=sys.stderr)
    if not (root / MAP).exists():
        print(f"check_docs: expected {MAP}, which has the map of the modules", file=sys.stderr)
        return 1
    print(f"check_docs: {len(documents(root))} documents, {len(found)} faults"
          + (f", {len(PLANTED)} planted faults found" if arguments.self_test else ""))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
