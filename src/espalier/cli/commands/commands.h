// SPDX-License-Identifier: Apache-2.0
// The subcommands of `espalier`.
#pragma once

#include <deque>
#include <functional>
#include <string>

#include "espalier/cli/commands/command.h"

namespace espalier::cli {

/// Appends all commands in the order of the help. `version` gives the text of --version.
void add_all_commands(std::deque<Command>* all, const std::function<std::string()>& version);

Command bench_command();
Command completion_command(const std::deque<Command>* all);
Command device_command();
Command export_command();
Command import_command();
Command init_command();
Command inspect_command();
Command launch_command();
Command logprobs_command();
Command man_command(const std::deque<Command>* all, const std::function<std::string()>& version);
Command merge_command();
Command plan_command();
Command prepare_command();
Command sample_command();
Command synth_command();
Command train_command();
Command verify_command();

}  // namespace espalier::cli
