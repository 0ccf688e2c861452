// SPDX-License-Identifier: Apache-2.0
#include "espalier/cli/commands/commands.h"

#include <utility>

namespace espalier::cli {

void add_all_commands(std::deque<Command>* all, const std::function<std::string()>& version) {
  std::string group;
  const auto add = [&](Command command) {
    command.group = group;
    all->push_back(std::move(command));
  };
  group = "From chats or rollouts to a plan";
  add(python_command("prepare"));
  add(python_command("import"));
  add(inspect_command());
  add(plan_command());
  add(python_command("export"));
  group = "Training";
  add(train_command(version));
  add(python_command("rerun"));
  add(python_command("launch"));
  add(python_command("serve"));
  add(python_command("logprobs"));
  add(python_command("merge"));
  add(python_command("sample"));
  group = "Proof and measurement";
  add(verify_command());
  add(bench_command());
  add(device_command());
  group = "Random data and models";
  add(synth_command());
  add(python_command("init"));
  group = "Shell";
  add(completion_command(all));
  add(man_command(all, version));
}

}  // namespace espalier::cli
