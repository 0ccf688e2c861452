# SPDX-License-Identifier: Apache-2.0
"""`espalier man`: the manual page in man(7) format."""

import argparse
from collections.abc import Sequence

from .command import run_command
from .command_line import ArgumentParser, print_whole
from .help_data import read_commands
from .version import version_text

DESCRIPTION = "Write the manual page to standard output."
EPILOG = "Example: espalier man | man -l -"

ESCAPES = str.maketrans({"\\": "\\e", "-": "\\-", "'": "\\(aq", "`": "\\(ga", "^": "\\(ha", "~": "\\(ti"})
LINE = 70  # characters


def escaped(text):
    """Text for troff, so that every character is printed and copied literally."""
    text = text.translate(ESCAPES)
    return "\\&" + text if text.startswith(".") else text  # a dot at the start of a line begins a request


def bold(text):
    return f"\\fB{escaped(text)}\\fR"


def italic(text):
    return f"\\fI{escaped(text)}\\fR"


def prose(text):
    """Paragraphs. Indented lines are not wrapped; other line breaks are kept."""
    page = ""
    verbatim, paragraph = False, True
    for line in text.splitlines():
        set_in = line.startswith(" ")
        if verbatim and not set_in:
            page += ".fi\n"
        if not line:
            page += ".PP\n"
        else:
            if set_in and not verbatim:
                page += ".nf\n"
            if not (set_in or verbatim or paragraph):
                page += ".br\n"
            page += escaped(line) + "\n"
        verbatim, paragraph = set_in, not line
    return page + ".fi\n" if verbatim else page


def names_and_value(flag):
    value = italic(flag.value) if flag.value else ""
    if len(value) > LINE:
        value = value.replace("|", "|\\:")  # a place where a line may end
    parts = [", ".join(map(bold, flag.names)), value, "..." if flag.several else ""]
    return " ".join(filter(None, parts))


def entry(flag):
    notes = (" (required)" if flag.required else "") + (f" (default: {flag.default_value})" if flag.default_value else "")
    return f".TP\n{names_and_value(flag)}\n{escaped(flag.help + notes)}\n"


def usage(command):
    needed = [f"{bold(flag.names[-1])} {italic(flag.value)}" for flag in command.flags if flag.names and flag.required]
    arguments = [names_and_value(flag) for flag in command.flags if not flag.names]
    return " ".join([bold("espalier " + command.name), *needed, f"[{italic('flags')}]", *arguments]) + "\n"


def section(command):
    page = f".SS {escaped('espalier ' + command.name)}\n{usage(command)}.PP\n{prose(command.summary + '.')}"
    if command.description:
        page += ".PP\n" + prose(command.description)
    group = ""
    for flag in command.flags:
        if flag.group != group:
            page += f".PP\n{bold(flag.group + ':')}\n"
        group = flag.group
        page += entry(flag)
    return page + (".PP\n" + prose(command.closing) if command.closing else "")


def manual_page(version, program, commands):
    """`version`: the name of the program and its version."""
    return (f'.TH ESPALIER 1 "" "{escaped(version)}" "User Commands"\n'
            ".SH NAME\nespalier \\- train language models on trees of tokens\n"
            f".SH SYNOPSIS\n{bold('espalier')} {italic('command')} [{italic('flags')}]\n"
            f".SH DESCRIPTION\n{prose(program.summary)}.PP\n{prose(program.closing)}"
            f".SH FLAGS\n{''.join(map(entry, program.flags))}"
            f".SH COMMANDS\n{''.join(map(section, commands))}")  # fmt: skip


def parser() -> ArgumentParser:
    """No flags but --help."""
    return ArgumentParser(prog="espalier man", description=DESCRIPTION, epilog=EPILOG,
                          formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    parser().parse_args(arguments)
    version = version_text().partition("\n")[0]
    return run_command("man", lambda: print_whole(manual_page(version, *read_commands())))
