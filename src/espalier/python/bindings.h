// SPDX-License-Identifier: Apache-2.0
// The parts of the Python module espalier._core. Each file converts arguments and results, and calls the
// library.
#pragma once

#include <nanobind/nanobind.h>

#include "espalier/base/interrupt.h"

namespace espalier::python {

/// From here on InputError is espalier.errors.InputError in Python, in whose message flags of the command
/// line are arguments. An InternalError is a RuntimeError.
void translate_errors();

/// Throws what a signal handler of Python raises, such as KeyboardInterrupt. Takes the GIL, so long work that
/// has released it may call this from time to time.
void check_signals();

/// A call guard for long work: the GIL is released, and signals are looked at from time to time.
struct Interruptible {
  nanobind::gil_scoped_release release;
  InterruptScope scope{check_signals};
};

void bind_forest(nanobind::module_& module);
void bind_trajectories(nanobind::module_& module);
void bind_costs(nanobind::module_& module);
void bind_plan(nanobind::module_& module);
void bind_ranks(nanobind::module_& module);
void bind_inspect(nanobind::module_& module);

}  // namespace espalier::python
