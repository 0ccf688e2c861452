// SPDX-License-Identifier: Apache-2.0
// Safetensors names of the element types of packed files.
#pragma once

#include <cstdint>

namespace espalier {

template <typename T>
constexpr const char* dtype_of();
template <>
constexpr const char* dtype_of<uint8_t>() {
  return "U8";
}
template <>
constexpr const char* dtype_of<int32_t>() {
  return "I32";
}
template <>
constexpr const char* dtype_of<int64_t>() {
  return "I64";
}
template <>
constexpr const char* dtype_of<float>() {
  return "F32";
}
template <>
constexpr const char* dtype_of<double>() {
  return "F64";
}

}  // namespace espalier
