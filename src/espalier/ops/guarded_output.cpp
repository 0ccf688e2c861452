// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/guarded_output.h"

#include <ATen/ATen.h>

#include <vector>

namespace espalier {
namespace {

// Larger than the widest store of kernels, and a multiple of the allocator's alignment.
constexpr int64_t kGuardBytes = 1024;
constexpr int kPattern = 0xa5;

struct Guarded {
  at::Tensor bytes;  // guard, output, guard
  int64_t output_bytes;
};

thread_local std::vector<Guarded>* guarded = nullptr;

bool is_whole(const at::Tensor& guard) {
  return guard.eq(kPattern).all().item<bool>();
}

}  // namespace

OutputGuards::OutputGuards() {
  TORCH_CHECK(guarded == nullptr, "OutputGuards: expected one at a time, received a second");
  guarded = new std::vector<Guarded>;
}

OutputGuards::~OutputGuards() {
  delete guarded;
  guarded = nullptr;
}

int64_t OutputGuards::broken() const {
  int64_t count = 0;
  for (const auto& [bytes, output_bytes] : *guarded) {
    const bool whole =
        is_whole(bytes.slice(0, 0, kGuardBytes)) && is_whole(bytes.slice(0, kGuardBytes + output_bytes));
    count += whole ? 0 : 1;
  }
  return count;
}

int64_t OutputGuards::size() const {
  return static_cast<int64_t>(guarded->size());
}

bool outputs_have_guards() {
  return guarded != nullptr;
}

at::Tensor output_like(at::IntArrayRef sizes, const at::TensorOptions& options, bool zeroed) {
  if (guarded == nullptr) return zeroed ? at::zeros(sizes, options) : at::empty(sizes, options);
  const auto dtype = c10::typeMetaToScalarType(options.dtype());
  const int64_t bytes = c10::multiply_integers(sizes) * static_cast<int64_t>(c10::elementSize(dtype));
  const at::Tensor buffer = at::full({bytes + 2 * kGuardBytes}, kPattern, options.dtype(at::kByte));
  guarded->push_back({buffer, bytes});
  const at::Tensor output = buffer.slice(0, kGuardBytes, kGuardBytes + bytes).view(dtype).view(sizes);
  return zeroed ? output.zero_() : output;
}

}  // namespace espalier
