// SPDX-License-Identifier: Apache-2.0
// The subcommands of `espalier`. Each add_* declares flags and help on `app` and sets a callback that does
// the work; a callback reports failure by throwing (exit code 1) or through *exit_code.
#pragma once

#include <CLI/CLI.hpp>

namespace espalier::cli {

void add_bench(CLI::App& app, int* exit_code);
void add_completion(CLI::App& app, int* exit_code);
void add_device(CLI::App& app, int* exit_code);
void add_export(CLI::App& app, int* exit_code);
void add_import(CLI::App& app, int* exit_code);
void add_init(CLI::App& app, int* exit_code);
void add_inspect(CLI::App& app, int* exit_code);
void add_logprobs(CLI::App& app, int* exit_code);
void add_man(CLI::App& app, int* exit_code);
void add_merge(CLI::App& app, int* exit_code);
void add_plan(CLI::App& app, int* exit_code);
void add_prepare(CLI::App& app, int* exit_code);
void add_sample(CLI::App& app, int* exit_code);
void add_synth(CLI::App& app, int* exit_code);
void add_train(CLI::App& app, int* exit_code);
void add_verify(CLI::App& app, int* exit_code);

}  // namespace espalier::cli
