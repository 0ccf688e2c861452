// SPDX-License-Identifier: Apache-2.0
#include "espalier/python_engine/ranks.h"

#include <c10/util/Exception.h>

#include "espalier/base/check.h"
#include "espalier/cli/commands/commands.h"
#include "espalier/cli/train_on_rank.h"
#include "espalier/distributed/process_group.h"
#include "espalier/runtime/out_of_memory.h"

namespace espalier::python_engine {

int train_on_rank(const std::vector<std::string>& arguments, const std::string& process_group,
                  const std::string& version) {
  const std::unique_ptr<Group> group = espalier::process_group(process_group);
  try {
    const int status = cli::train_on_rank(arguments, *group, version);
    group->check_equal("the exit status", std::to_string(status));  // also waits for those that still save
    return status;
  } catch (const cli::UsageError& error) {
    throw InputError(error.what());
  } catch (const c10::Error& error) {
    throw std::runtime_error(out_of_memory_message(error).value_or(error.what_without_backtrace()));
  }
}

void fail_ranks(const std::string& message) {
  espalier::fail_ranks(message);
}

bool waits_for_ranks() {
  return espalier::waits_for_ranks();
}

}  // namespace espalier::python_engine
