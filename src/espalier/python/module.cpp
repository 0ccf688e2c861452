// SPDX-License-Identifier: Apache-2.0
#include <nanobind/nanobind.h>

#include "espalier/python/bindings.h"

nanobind::object espalier::python::iterator_of(nanobind::handle sequence) {
  return nanobind::steal(PySeqIter_New(sequence.ptr()));
}

NB_MODULE(_core, module) {
  module.doc() = "The compiled part of Espalier that does not need LibTorch.";
  module.attr("__version__") = ESPALIER_VERSION;
  espalier::python::translate_errors();
  espalier::python::bind_forest(module);
  espalier::python::bind_trajectories(module);
  espalier::python::bind_rows(module);
  espalier::python::bind_costs(module);
  espalier::python::bind_plan(module);
  espalier::python::bind_ranks(module);
  espalier::python::bind_inspect(module);
  espalier::python::bind_manifest(module);
  espalier::python::bind_commands(module);
}
