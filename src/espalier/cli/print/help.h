// SPDX-License-Identifier: Apache-2.0
// How --help looks: flags in groups, each with what stands for its value, its meaning and its default.
#pragma once

#include <CLI/CLI.hpp>

#include <string>
#include <vector>

namespace espalier::cli {

/// While it lives, the options that are added to a command stand in this group of its help.
class HelpGroup {
 public:
  HelpGroup(CLI::App* command, const std::string& name);
  ~HelpGroup();
  HelpGroup(const HelpGroup&) = delete;
  HelpGroup& operator=(const HelpGroup&) = delete;

 private:
  CLI::App* command_;
  std::string before_;
};

/// The groups of several commands.
inline constexpr const char* kDataGroup = "Model and data";
inline constexpr const char* kObjectiveGroup = "Objective";
inline constexpr const char* kPlanGroup = "Plan";
inline constexpr const char* kMachineGroup = "Machine and precision";
inline constexpr const char* kOutputGroup = "Output";
inline constexpr const char* kOtherGroup = "Other";

class HelpFormat : public CLI::Formatter {
 public:
  HelpFormat();
  std::string make_description(const CLI::App* app) const override;
  std::string make_usage(const CLI::App* app, std::string name) const override;
  std::string make_group(std::string group, bool is_positional,
                         std::vector<const CLI::Option*> options) const override;
  std::string make_option(const CLI::Option* option, bool is_positional) const override;
  std::string make_subcommand(const CLI::App* command) const override;
  std::string make_footer(const CLI::App* app) const override;
};

}  // namespace espalier::cli
