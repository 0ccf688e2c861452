# SPDX-License-Identifier: Apache-2.0
"""Hooks of mkdocs.yml: pages that lie outside of docs/, and the reference of commands and of Python.

README.md and docs/ link to one another by paths that GitHub follows too. A link to a page of the site becomes one inside of the site;
one to another file of the repository becomes a link to ESPALIER_REPOSITORY, or its text alone where that is not set.
"""

import posixpath
import re
import subprocess
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = {"examples/README.md": "examples.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md",
           "SECURITY.md": "security.md", "README.md": "index.md"}  # fmt: skip
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[([^][]*(?:\[[^][]*\][^][]*)*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")
PICTURE = re.compile(r'(src|srcset)="(images/[^"]+)"')
FLAG = re.compile(r"^  (-\S.*?)(?:\s{2,}(\S.*))?$")
RESULTS = {f"bench/results/{path.name}": f"results/{path.name}" for path in sorted((ROOT / "bench/results").glob("*.md"))}
FIGURES = {str(path.relative_to(ROOT)): str(path.relative_to(ROOT / "bench")) for path in sorted((ROOT / "bench/results").glob("*/*.svg"))}
FIGURE = re.compile(r"(!\[[^]]*\])\(\.\./(bench/results/[^)]+\.svg)\)")


def on_files(files, config):
    for source, target in {**OUTSIDE, **RESULTS}.items():
        if files.get_file_from_path(target) is None:
            files.append(File.generated(config, target, content=(ROOT / source).read_text(encoding="utf-8")))
            if source in RESULTS:  # reached from other pages, not from the navigation
                files.get_file_from_path(target).inclusion = type(files.get_file_from_path("index.md").inclusion).NOT_IN_NAV
    for source, target in FIGURES.items():
        if files.get_file_from_path(target) is None:
            files.append(File.generated(config, target, content=(ROOT / source).read_bytes()))
    return files


def on_page_markdown(markdown, page, config, **_):
    uri = page.file.src_uri
    if uri == "reference/commands.md":
        markdown = "# Commands\n\nFrom the help of each command. Every flag may also stand in a TOML file that `--config` names.\n\n" + commands()
    if uri == "reference/python.md":
        markdown += "\n" + "\n".join(python_names())
    markdown = PICTURE.sub(lambda match: f'{match[1]}="{posixpath.relpath(match[2], page.url or ".")}"', markdown)
    markdown = FIGURE.sub(lambda match: f"{match[1]}({posixpath.relpath(FIGURES[match[2]], posixpath.dirname(uri) or '.')})", markdown)
    sources = {target: source for source, target in {**OUTSIDE, **RESULTS}.items() if source != "README.md"}
    source = sources.get(uri, f"docs/{uri}")
    parts, end = [], 0
    for fence in [*FENCED.finditer(markdown), None]:  # links in code stay
        prose = markdown[end : fence.start() if fence else None]
        parts.append(LINK.sub(lambda match: site_link(match, source, uri, config["repo_url"]), prose))
        if fence:
            parts.append(fence[0])
            end = fence.end()
    return "".join(parts)


def site_link(match, source, uri, repository):
    """A link of the document `source` as the page `uri` of the site has it."""
    text, target, anchor = match[1], match[2], match[3] or ""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    page = {**OUTSIDE, **RESULTS}.get(path, path.removeprefix("docs/") if path.startswith("docs/") else None)
    if page:
        return f"[{text}]({posixpath.relpath(page, posixpath.dirname(uri) or '.')}{anchor})"
    return f"[{text}]({repository.rstrip('/')}/blob/main/{path}{anchor})" if repository else text


def help_of(*words):
    done = subprocess.run([ROOT / "bin/espalier", *words, "--help"], capture_output=True, text=True, cwd=ROOT, check=True)
    return done.stdout


def commands():
    """The reference of commands, a table of flags for each group of each."""
    names = re.findall(r"^  ([a-z]+) {2,}\S", help_of(), re.MULTILINE)
    assert len(names) > 10, names
    return "\n".join(f"## {name}\n\n{command(help_of(name))}\n" for name in names)


def command(text):
    if text.startswith("usage:"):  # of the commands written in Python
        return f"```text\n{text.strip()}\n```\n"
    lines, table = [], False
    for line in text.splitlines():
        flag = FLAG.match(line)
        if flag:
            if not table:
                lines += ["", "| flag | meaning |", "|---|---|"]
            table = True
            lines.append(f"| `{cell(flag[1])}` | {cell(flag[2] or '')} |")
        elif table and line.startswith(" " * 20):
            lines[-1] = lines[-1].removesuffix(" |") + f" {cell(line.strip())} |"
        elif line.startswith("Usage:"):
            lines.append(f"`{line.removeprefix('Usage: ')}`")
        elif re.fullmatch(r"\S[^.]*:", line):
            lines, table = [*lines, "", f"**{line.removesuffix(':')}**"], False
        else:
            lines, table = [*lines, *([""] if table else []), f"    {line}" if line.startswith("  ") else line], False
    return "\n".join(lines)


def cell(text):
    return text.replace("|", "\\|").replace("<", "&lt;") if "`" not in text else text.replace("|", "\\|")


def python_names():
    """Directives of mkdocstrings, from what the package and its modules export."""
    stub = (ROOT / "python/espalier/__init__.pyi").read_text(encoding="utf-8")
    yield "## espalier\n"
    for module, name in re.findall(r"^from \.(\S+) import (\w+) as \w+$", stub, re.MULTILINE):
        yield directive(f"espalier.{module}.{name}", f"espalier.{name}")
    for package in re.findall(r"^from \. import (\w+) as \w+$", stub, re.MULTILINE):
        source = source_of(f"espalier.{package}")
        yield f"## espalier.{package}\n"
        for name in re.findall(r'"(\w+)"', re.search(r"^__all__ = (\[.*?\])", source, re.MULTILINE | re.DOTALL)[1]):
            found = re.search(rf"^from (\.+)([\w.]+) import .*\b{name}\b", source, re.MULTILINE)
            if re.search(rf"^(?:def|class) {name}\b", source, re.MULTILINE) or not found:
                where = f"espalier.{package}"
            else:
                inside = found[1] == "." and (ROOT / "python/espalier" / package).is_dir()
                where = f"espalier.{package + '.' if inside else ''}{found[2]}"
            yield directive(f"{where}.{name}", f"espalier.{package}.{name}")


def directive(where, name):
    """That for one object, which is defined as `where` and public as `name`."""
    module, _, own = where.rpartition(".")
    if re.search(rf"^{own} = core\.{own}$", source_of(module), re.MULTILINE):
        where = f"espalier._core.{own}"
    return f"\n::: {where}\n    options:\n      heading: {name}\n      toc_label: {name}\n"


def source_of(module):
    path = ROOT / "python" / module.replace(".", "/")
    return next(each for each in (path / "__init__.py", path.with_suffix(".py")) if each.exists()).read_text(encoding="utf-8")
