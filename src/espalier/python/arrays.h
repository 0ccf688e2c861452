// SPDX-License-Identifier: Apache-2.0
// C++ arrays as NumPy arrays, without copies.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "espalier/base/csr.h"

namespace espalier::python {

namespace nb = nanobind;

template <typename T>
using ReadOnlyArray = nb::ndarray<nb::numpy, const T, nb::ndim<1>>;
template <typename T>
using Array = nb::ndarray<nb::numpy, T, nb::ndim<1>>;

/// An argument from Python: contiguous, one-dimensional, in CPU memory, of exactly this type.
template <typename T>
using Given = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <typename T>
std::span<const T> span_of(const Given<T>& array) {
  return {array.data(), array.size()};
}

/// A copy of a Python array of exactly this type.
template <typename T>
std::vector<T> vector_of(nb::handle array) {
  const auto given = nb::cast<Given<T>>(array, /*convert=*/false);
  return {given.data(), given.data() + given.size()};
}

/// A read-only view of values, which `owner` keeps alive.
template <typename T>
ReadOnlyArray<T> view(std::span<const T> values, nb::handle owner) {
  static const T nothing{};  // NumPy needs a pointer even for empty arrays
  return ReadOnlyArray<T>(values.empty() ? &nothing : values.data(), {values.size()}, owner);
}

/// A writable array of this shape that takes ownership of `values`.
template <typename T, size_t kDims>
nb::ndarray<nb::numpy, T, nb::ndim<kDims>> take_shaped(std::vector<T> values, const size_t (&shape)[kDims]) {
  if (values.empty()) values.reserve(1);
  auto held = std::make_unique<std::vector<T>>(std::move(values));
  std::vector<T>& array = *held;
  nb::capsule owner(&array, [](void* pointer) noexcept { delete static_cast<std::vector<T>*>(pointer); });
  held.release();
  return {array.data(), kDims, shape, owner};
}

template <typename T>
Array<T> take(std::vector<T> values) {
  const size_t shape[] = {values.size()};
  return take_shaped(std::move(values), shape);
}

template <typename T>
std::pair<Array<int64_t>, Array<T>> take(Csr<T> rows) {
  return {take(std::move(rows.offsets)), take(std::move(rows.values))};
}

/// The getter of a property that views a member of the object.
template <typename Class, typename Base, typename T>
auto view_of(std::vector<T> Base::* member) {
  return [member](nb::handle_t<Class> self) {
    return view(std::span<const T>(nb::cast<const Class&>(self).*member), self);
  };
}

}  // namespace espalier::python
