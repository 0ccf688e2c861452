// SPDX-License-Identifier: Apache-2.0
// espalier man: the manual page in man(7) format.
#include <fmt/ranges.h>

#include <cctype>
#include <map>
#include <sstream>
#include <string_view>

#include "espalier/base/output.h"
#include "espalier/cli/commands/commands.h"
#include "espalier/cli/print/command_text.h"

namespace espalier::cli {
namespace {

// Escapes text for troff, so that every character is printed and copied literally.
std::string escaped(std::string_view text) {
  static const std::map<char, std::string_view> kEscapes{{'\\', "\\e"},  {'-', "\\-"},   {'\'', "\\(aq"},
                                                         {'`', "\\(ga"}, {'^', "\\(ha"}, {'~', "\\(ti"}};
  std::string result;
  for (const char c : text) {
    const auto escape = kEscapes.find(c);
    result += escape == kEscapes.end() ? std::string_view(&c, 1) : escape->second;
  }
  // A dot at the start of a line begins a request.
  return result.starts_with('.') ? "\\&" + result : result;
}

std::string bold(std::string_view text) {
  return "\\fB" + escaped(text) + "\\fR";
}

std::string italic(std::string_view text) {
  return "\\fI" + escaped(text) + "\\fR";
}

// Formats paragraphs. Indented lines are not wrapped; other line breaks are kept.
std::string prose(const std::string& text) {
  std::string page;
  std::istringstream lines(text);
  bool verbatim = false, paragraph = true;
  for (std::string line; std::getline(lines, line);) {
    const bool set_in = line.starts_with(' ');
    if (verbatim && !set_in) page += ".fi\n";
    if (line.empty()) {
      page += ".PP\n";
    } else {
      if (set_in && !verbatim) page += ".nf\n";
      if (!set_in && !verbatim && !paragraph) page += ".br\n";
      page += escaped(line) + "\n";
    }
    verbatim = set_in;
    paragraph = line.empty();
  }
  return verbatim ? page + ".fi\n" : page;
}

std::string names_and_value(const OptionText& flag) {
  std::vector<std::string> names;
  for (const std::string& name : flag.names) names.push_back(bold(name));
  std::string text = fmt::format("{}", fmt::join(names, ", "));
  if (!flag.value.empty()) text += (names.empty() ? "" : " ") + italic(flag.value);
  return flag.several ? text + " ..." : text;
}

std::string entry(const OptionText& flag) {
  std::string notes = flag.required ? " (required)" : "";
  if (!flag.default_value.empty()) notes += fmt::format(" (default: {})", flag.default_value);
  return fmt::format(".TP\n{}\n{}\n", names_and_value(flag), escaped(flag.help + notes));
}

std::string usage(const CommandText& command) {
  std::string needed, arguments;
  for (const OptionText& flag : command.flags) {
    if (flag.names.empty()) {
      arguments += " " + names_and_value(flag);
    } else if (flag.required) {
      needed += fmt::format(" {} {}", bold(flag.names.back()), italic(flag.value));
    }
  }
  return fmt::format("{}{} [{}]{}\n", bold("espalier " + command.name), needed, italic("flags"), arguments);
}

std::string section(const CommandText& command) {
  std::string page = fmt::format(".SS {}\n{}.PP\n{}", escaped("espalier " + command.name), usage(command),
                                 prose(command.summary + "."));
  if (!command.description.empty()) page += ".PP\n" + prose(command.description);
  std::string group;
  for (const OptionText& flag : command.flags) {
    if (flag.group != group) page += ".PP\n" + bold(flag.group + ":") + "\n";
    group = flag.group;
    page += entry(flag);
  }
  if (!command.closing.empty()) page += ".PP\n" + prose(command.closing);
  return page;
}

// `version`: the text of --version, whose first line names the program and its version.
std::string manual_page(const std::vector<CommandText>& commands, const std::string& version) {
  const CommandText& program = commands.front();
  std::string page = fmt::format(".TH ESPALIER 1 \"\" \"{}\" \"User Commands\"\n",
                                 escaped(version.substr(0, version.find('\n'))));
  page += ".SH NAME\nespalier \\- train language models on trees of tokens\n";
  page += fmt::format(".SH SYNOPSIS\n{} {} [{}]\n", bold("espalier"), italic("command"), italic("flags"));
  page += ".SH DESCRIPTION\n" + prose(program.summary) + ".PP\n" + prose(program.closing);
  page += ".SH FLAGS\n";
  for (const OptionText& flag : program.flags) page += entry(flag);
  page += ".SH COMMANDS\n";
  for (size_t i = 1; i < commands.size(); ++i) page += section(commands[i]);
  return page;
}

}  // namespace

Command man_command(const std::deque<Command>* all, const std::function<std::string()>& version) {
  return {.name = "man",
          .summary = "Write the manual page to standard output",
          .closing = "Example: espalier man | man -l -",
          .run =
              [all, version](const OptionList&) {
                print_output("{}", manual_page(command_texts(*all), version()));
                return 0;
              },
          .has_config = false};
}

}  // namespace espalier::cli
