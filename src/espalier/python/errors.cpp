// SPDX-License-Identifier: Apache-2.0
#include <string_view>

#include "espalier/base/check.h"
#include "espalier/commands/command.h"
#include "espalier/python/bindings.h"

namespace espalier::python {

namespace nb = nanobind;

void translate_errors() {
  nb::object errors = nb::module_::import_("espalier.errors");
  nb::register_exception_translator(
      [](const std::exception_ptr& thrown, void* payload) {
        try {
          std::rethrow_exception(thrown);
        } catch (const InputError& error) {
          const bool is_usage = dynamic_cast<const commands::UsageError*>(&error) != nullptr;
          const nb::object make =
              nb::handle(static_cast<PyObject*>(payload)).attr(is_usage ? "usage_error" : "library_error");
          // File names need not be UTF-8.
          const std::string_view text = error.what();
          const nb::object message =
              nb::steal(PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
          if (!message.is_valid()) return;  // which has set an error itself
          const nb::object raised =
              nb::steal(PyObject_CallFunctionObjArgs(make.ptr(), message.ptr(), nullptr));
          if (raised.is_valid()) PyErr_SetObject(raised.type().ptr(), raised.ptr());
        }
      },
      errors.release().ptr());
}

void check_signals() {
  const nb::gil_scoped_acquire acquire;
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

}  // namespace espalier::python
