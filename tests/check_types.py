#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that no two files define a type of the same qualified name.

    tests/check_types.py              checks src/espalier, tests and bench; exit 1 and one line per fault
    tests/check_types.py --self-test  also plants faults in a scratch tree and demands that each is found

Two such types in one program are undefined behaviour, of which neither compiler nor linker says anything where no
source includes both: the linker keeps one of two destructors. Read are the classes, structs, unions and enumerations of
namespaces that have a name, in headers and sources. Those of anonymous namespaces, functions and classes cannot collide.
What is not understood is a fault, too. (tests/CMakeLists.txt also compiles all headers
together.)
"""

import argparse
import re
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

FOLDERS = ("src/espalier", "tests", "bench")
SUFFIXES = {".h", ".cpp", ".cu", ".cuh"}
HEAD = re.compile(
    r"(?:template\b.*?)?(?:(?:typedef|static|inline|constexpr|const|export)\s+)*"
    r"(?:class|struct|union|enum(?:\s+(?:class|struct))?)\s+(?P<name>(?:::\s*)?\w+(?:\s*::\s*\w+)*)"
    r"(?P<arguments>\s*<.*>)?\s*(?:final\s*)?(?::[^:].*)?",
    re.DOTALL,
)
TYPE = re.compile(r"(?:template\b.*?>\s*)?(?:class|struct|union|enum)\s+(?!:)", re.DOTALL)  # that has a name
NAMESPACE = re.compile(r"(?:inline\s+)?namespace\b\s*(?P<name>[\w:\s]*)", re.DOTALL)
TOKEN = re.compile(
    r"""(?P<raw>\bR"(?P<mark>[^()\s\\]*)\(.*?\)(?P=mark)")|(?P<comment>//[^\n]*|/\*.*?\*/)"""
    r"""|(?P<text>"(?:\\.|[^"\\\n])*"|(?<![0-9A-Fa-f])'(?:\\.|[^'\\\n])+')"""
    r"""|(?P<directive>^[ \t]*\#(?:\\\n|//[^\n]*|/\*.*?\*/|[^\n])*)|(?P<other>\w+|\s+|.)""",
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)


class Unreadable(Exception):
    """A file whose braces do not match."""


def types_of(text):
    """Yields (qualified name, line) of the types that the text defines in namespaces with names."""
    scopes = []  # of open braces: a namespace's name, "" of extern "C", None of all else
    head, parentheses = [], 0
    for token in TOKEN.finditer(text):
        word = token[0]
        if token["comment"] or token["directive"]:
            head.append(" ")
        elif word == "(" or word == ")":
            parentheses += 1 if word == "(" else -1
            head.append(word)
        elif word == "{":
            scope = None if parentheses or None in scopes else opened("".join(head).strip())
            if isinstance(scope, tuple):
                names = [name for name in scopes if name] + [scope[0]]
                yield "::".join(names), text.count("\n", 0, token.start()) + 1
                scope = None
            scopes.append(scope)
            head = []
        elif word == "}":
            if not scopes:
                raise Unreadable(f"{text.count(chr(10), 0, token.start()) + 1}: a brace is closed that was not opened")
            scopes.pop()
            head = []
        elif word == ";" and not parentheses:
            head = []
        else:
            head.append(word)
    if scopes or parentheses:
        raise Unreadable(f"{text.count(chr(10)) + 1}: braces or parentheses are left open")


def opened(head):
    """What a brace after `head` opens: a namespace's name, "" for one that is transparent, None, or (type,)."""
    namespace = NAMESPACE.fullmatch(head)
    if namespace:
        return re.sub(r"\s", "", namespace["name"]) or None
    if re.fullmatch(r'extern\s+"C(\+\+)?"', head):
        return ""
    plain = re.sub(r"\[\[.*?\]\]|\b(alignas|__align__|__attribute__)\s*\((?:[^()]|\([^()]*\))*\)", " ", head)
    match = HEAD.fullmatch(plain.strip())
    if not match:
        if TYPE.match(plain.strip()) and not re.search("[(=]", plain):
            raise Unreadable(f"expected a type's name and bases before a brace, received `{head}`")
        return None
    return (re.sub(r"\s", "", match["name"] + (match["arguments"] or "")),)


def sources(root):
    return [path for folder in FOLDERS for path in sorted((root / folder).rglob("*")) if path.suffix in SUFFIXES]


def faults(root):
    """Yields "FILE:LINE: what is wrong" for everything below the folders of `root`."""
    places = defaultdict(list)
    for path in sources(root):
        try:
            for name, line in types_of(path.read_text(encoding="utf-8")):
                places[name].append((path, line))
        except Unreadable as error:
            yield f"{path}:{error}"
    for name, defined in places.items():
        (first, line), *others = defined
        for path, other_line in others:
            if path == first:  # its compiler saw both
                continue
            yield f"{path}:{other_line}: {name} is defined in {first}:{line}, too; give one of them another name or namespace"


# Trees of files, each with as many faults as there are.
PLANTED = {
    "two headers": {"src/espalier/tree/a.h": "namespace espalier {\nstruct A {\n  int a;\n};\n}",
                    "src/espalier/plan/a.h": "namespace espalier {\nenum class A : char { kOne };\n}"},
    "two sources": {"src/espalier/tree/a.cpp": "namespace espalier { class A final : public B<int, 2> { int a; }; }",
                    "src/espalier/plan/a.cpp": "namespace espalier {\ntemplate <class T>\nunion A { T a; };\n}"},
    "a source of tests": {"tests/a.h": "namespace espalier::testing { struct A {}; }",
                          "tests/b.cpp": "namespace espalier { namespace testing { struct A {}; } }"},
    "behind a function": {"bench/a.cpp": "namespace e { int f() { if (1) { return '{'; } } struct A {}; }",
                          "bench/b.cpp": "namespace e { const char* t = R\"({)\"; struct alignas(8) A {}; }"},
    "inside another namespace": {"tests/a.cpp": "namespace e::f { struct A {}; }",
                                 "tests/b.cpp": "namespace e { inline namespace f { struct [[nodiscard]] A {}; } }"},
    "of another class": {"tests/a.cpp": "namespace e { struct A::B {}; }",
                         "tests/b.cpp": "namespace e { class A::B { }; }"},
    "a macro before the name": {"tests/a.cpp": "namespace e { struct API A {}; }"},
    "braces that do not match": {"tests/a.cpp": "namespace e { struct A {}; "},
}
ALLOWED = {
    "anonymous": {"tests/a.cpp": "namespace e { namespace { struct A {}; } }", "tests/b.cpp": "namespace e { struct A {}; }"},
    "other namespaces": {"tests/a.cpp": "namespace e { struct A {}; }", "tests/b.cpp": "namespace e::f { struct A {}; }"},
    "in functions and classes": {"tests/a.cpp": "namespace e { void f() { struct A {}; } class B { struct A {}; }; }",
                                 "tests/b.cpp": "namespace e { struct A {}; }"},
    "declarations and variables": {"tests/a.cpp": "namespace e { struct A; const struct A a{1}; struct A f() { return {}; } }",
                                   "tests/b.cpp": "namespace e { struct A {}; } // struct A {};\n"},
    "in text and comments": {"tests/a.cpp": 'namespace e { struct A {}; const char* b = "struct A {"; int c = 1\'000; }',
                             "tests/b.cpp": "namespace e { /* struct A {}; */ }\n#define A struct A {\\\n}\n"},
    "specialisations": {"tests/a.cpp": "namespace e { template <class T> struct A {}; }",
                        "tests/b.cpp": "namespace e { template <> struct A<int> {}; }"},
    "lambdas": {"tests/a.cpp": "namespace e { auto a = f([] { struct A {}; return 1; }); }",
                "tests/b.cpp": "namespace e { struct A {}; }"},
}


def faults_of(tree):
    """The faults of files that are given by their text."""
    with tempfile.TemporaryDirectory() as scratch:
        for name, text in tree.items():
            path = Path(scratch, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return list(faults(Path(scratch)))


def self_test():
    """Returns the planted faults that were missed and the sound trees that were blamed."""
    return ([name for name, tree in PLANTED.items() if len(faults_of(tree)) != 1]
            + [name for name, tree in ALLOWED.items() if faults_of(tree)])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--self-test", action="store_true", help="demand that planted faults are found")
    arguments = parser.parse_args()
    if arguments.self_test:
        wrong = self_test()
        if wrong:
            print(f"check_types: the self-test misjudged: {', '.join(wrong)}", file=sys.stderr)
            return 1
    root = Path(__file__).resolve().parents[1]
    found = list(faults(root))
    for line in found:
        print(line, file=sys.stderr)
    types = sum(len(list(types_of(path.read_text(encoding="utf-8")))) for path in sources(root)) if not found else 0
    if not found and types == 0:
        print(f"check_types: no types below {root}", file=sys.stderr)
        return 1
    print(f"check_types: {types} types, {len(found)} faults"
          + (f", {len(PLANTED)} planted faults found" if arguments.self_test else ""))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
