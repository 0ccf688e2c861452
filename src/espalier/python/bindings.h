// SPDX-License-Identifier: Apache-2.0
// The Python module espalier._core. Each source converts arguments and results and calls the library.
#pragma once

#include <nanobind/nanobind.h>

#include "espalier/base/check.h"
#include "espalier/base/interrupt.h"

namespace espalier::python {

/// Translates InputError and UsageError to those of espalier.errors, and InternalError to RuntimeError. From
/// now on messages name options as arguments, unless this process runs a command
/// (espalier.errors.IN_COMMAND).
void translate_errors();

/// Throws the exception of a Python signal handler, such as KeyboardInterrupt. Acquires the GIL, so long work
/// that has released it may call this.
void check_signals();

/// Iterates over an object that has a length and indices.
nanobind::object iterator_of(nanobind::handle sequence);

/// Calls a function that reads or writes files, without the GIL. A system call that a signal interrupts may
/// look like a fault of the file, so exceptions of signal handlers take precedence.
template <typename Call>
auto on_files(Call call) {
  try {
    const nanobind::gil_scoped_release release;
    return call();
  } catch (const InputError&) {
    check_signals();
    throw;
  }
}

/// A call guard for long work: releases the GIL and polls signals.
struct Interruptible {
  nanobind::gil_scoped_release release;
  InterruptScope scope{check_signals};
};

void bind_forest(nanobind::module_& module);
void bind_trajectories(nanobind::module_& module);
void bind_rows(nanobind::module_& module);
void bind_costs(nanobind::module_& module);
void bind_plan(nanobind::module_& module);
void bind_ranks(nanobind::module_& module);
void bind_inspect(nanobind::module_& module);
void bind_manifest(nanobind::module_& module);
void bind_commands(nanobind::module_& module);

}  // namespace espalier::python
