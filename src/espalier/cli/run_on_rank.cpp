// SPDX-License-Identifier: Apache-2.0
#include "espalier/cli/program.h"

#include <c10/util/Exception.h>

#include <memory>

#include "espalier/base/mapped_file_guard.h"
#include "espalier/base/output.h"
#include "espalier/cli/commands/commands.h"
#include "espalier/cli/flags/arguments.h"
#include "espalier/cli/signals.h"
#include "espalier/distributed/group.h"
#include "espalier/distributed/process_group.h"
#include "espalier/runtime/out_of_memory.h"
#include "espalier/runtime/tensor_memory.h"

namespace espalier::cli {
namespace {

Command command_of(const std::string& name, const Group* group, const std::string& version) {
  if (name == "verify") return verify_command(group);
  return train_command([version] { return version; }, group);
}

int run(const std::vector<std::string>& arguments, const Group& group, const std::string& version) {
  Command command = command_of(arguments.front(), &group, version);
  // Arguments that ask for help are those of a process by itself.
  if (!set_options(&command, {arguments.begin() + 1, arguments.end()})) return 0;
  const int exit_code = command.run(command.options);
  check_mapped_files();
  flush_output();
  group.check_equal("the exit status", std::to_string(exit_code));  // also waits for those that still save
  return exit_code;
}

}  // namespace

void prepare_command(bool tells) {
  if (!tells) silence_output();
  prepare_process();
  count_tensor_memory();
  reuse_freed_memory();
}

int run_on_rank(const std::vector<std::string>& arguments, const std::string& process_group,
                const std::string& version, const std::function<std::string(int64_t ranks)>& split_ranks) {
  const std::unique_ptr<Group> group = espalier::process_group(process_group, split_ranks);
  prepare_command(group->is_first());
  try {
    return run(arguments, *group, version);
  } catch (const UsageError& error) {
    throw InputError(error.what());
  } catch (const c10::Error& error) {
    throw std::runtime_error(text_of(error));
  }
}

}  // namespace espalier::cli
