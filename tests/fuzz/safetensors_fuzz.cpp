// SPDX-License-Identifier: Apache-2.0
// Any bytes as a safetensors file: refused with InputError, or every tensor's bytes can be read.
#include <numeric>

#include "espalier/base/check.h"
#include "espalier/base/safetensors.h"
#include "tests/fuzz/input_file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace espalier;
  const fuzz::InputFile input(data, size);
  try {
    const SafetensorsFile file(input.path());
    uint64_t sum = 0;
    for (const TensorView& tensor : file.tensors()) {
      fuzz::require(static_cast<int64_t>(tensor.bytes.size()) ==
                    tensor.num_elements() * dtype_bytes(tensor.dtype));
      fuzz::require(file.find(tensor.name) == &tensor);
      for (const std::byte byte : tensor.bytes) sum += static_cast<uint64_t>(byte);
    }
    fuzz::require(sum <= 255 * size);  // so that the reading is not optimised away
  } catch (const InputError&) {
  }
  return 0;
}
