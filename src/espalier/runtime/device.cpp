// SPDX-License-Identifier: Apache-2.0
#include "espalier/runtime/device.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#include <torch/version.h>
#include <unistd.h>

#include <charconv>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <string_view>

#include "espalier/base/check.h"
#include "espalier/base/option_names.h"

namespace espalier {
namespace {

// The folder of this process's LibTorch.
std::string libtorch_folder() {
  Dl_info info{};
  const bool found = dladdr(reinterpret_cast<void*>(&at::globalContext), &info) != 0;
  ESPALIER_ASSERT(found && info.dli_fname != nullptr);
  const std::string library = info.dli_fname;
  const size_t slash = library.rfind('/');
  return slash == std::string::npos ? "." : library.substr(0, slash);
}

// Loads LibTorch's CUDA libraries, which register themselves. They are not linked.
void load_libtorch_cuda(at::Device device) {
  const std::string library = libtorch_folder() + "/libtorch_cuda.so";
  ESPALIER_CHECK(::access(library.c_str(), R_OK) == 0,
                 "{} {}: expected a LibTorch with CUDA, received one without: there is no {}",
                 named("device"), device.str(), library);
  ESPALIER_CHECK(dlopen(library.c_str(), RTLD_LAZY | RTLD_GLOBAL) != nullptr, "{} {}: cannot load {}",
                 named("device"), device.str(), dlerror());
}

// Required for in-place accumulation of float32 results of bfloat16 products.
void check_libtorch_version(at::Device device) {
  constexpr int kMinor = 11;
  ESPALIER_CHECK(TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= kMinor),
                 "{} {}: expected a build with LibTorch 2.{} or later, received one with {}", named("device"),
                 device.str(), kMinor, TORCH_VERSION);
}

// cuBLAS reads its environment variable when it starts.
void make_deterministic() {
  ::setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
  // Our operators write all memory that they allocate.
  at::globalContext().setDeterministicFillUninitializedMemory(false);
}

// Disables TF32 and reduced-precision accumulation.
void keep_full_precision() {
  ::setenv("NVIDIA_TF32_OVERRIDE", "0", /*overwrite=*/1);  // read by CUDA libraries when they start
  at::Context& context = at::globalContext();
  context.setAllowTF32CuBLAS(false);
  context.setAllowTF32CuDNN(false);
  context.setAllowFP16ReductionCuBLAS(false);
  context.setAllowBF16ReductionCuBLAS(false);
}

// Uses the driver API, without CUDA headers or libraries.
std::string cuda_name(int index) {
  using Init = int (*)(unsigned flags);
  using Get = int (*)(int* device, int ordinal);
  using GetName = int (*)(char* name, int size, int device);
  void* driver = dlopen("libcuda.so.1", RTLD_LAZY);
  if (driver == nullptr) return "unknown CUDA device";
  const auto init = reinterpret_cast<Init>(dlsym(driver, "cuInit"));
  const auto get = reinterpret_cast<Get>(dlsym(driver, "cuDeviceGet"));
  const auto get_name = reinterpret_cast<GetName>(dlsym(driver, "cuDeviceGetName"));
  char name[256] = {};
  int device = 0;
  const bool known = init && get && get_name && init(0) == 0 && get(&device, index) == 0 &&
                     get_name(name, sizeof(name) - 1, device) == 0;
  return known ? name : "unknown CUDA device";
}

}  // namespace

at::Device parse_device(const std::string& name) {
  constexpr std::string_view kCuda = "cuda:";
  if (name == "cpu") return at::kCPU;
  if (name == "cuda") return {at::kCUDA, 0};
  int index = -1;
  if (name.starts_with(kCuda)) {
    const char* end = name.data() + name.size();
    const auto [last, error] = std::from_chars(name.data() + kCuda.size(), end, index);
    if (error != std::errc() || last != end) index = -1;
  }
  ESPALIER_CHECK(index >= 0 && index <= std::numeric_limits<c10::DeviceIndex>::max(),
                 "{}: expected cpu, cuda or cuda:N, received `{}`", named("device"), name);
  return {at::kCUDA, static_cast<c10::DeviceIndex>(index)};
}

void open_device(at::Device device, bool deterministic) {
  if (!device.is_cuda()) return;
  check_libtorch_version(device);
  load_libtorch_cuda(device);
  const c10::impl::VirtualGuardImpl cuda(at::kCUDA);
  const int visible = cuda.deviceCount();
  ESPALIER_CHECK(visible > 0, "{} {}: no CUDA device is visible (see nvidia-smi and CUDA_VISIBLE_DEVICES)",
                 named("device"), device.str());
  ESPALIER_CHECK(device.index() < visible, "{}: expected an index from 0 to {}, received cuda:{}",
                 named("device"), visible - 1, static_cast<int>(device.index()));
  keep_full_precision();
  if (deterministic) make_deterministic();
  at::globalContext().lazyInitDevice(at::kCUDA);
  cuda.setDevice(device);
}

void synchronize(at::Device device) {
  if (device.is_cuda()) c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

std::string cpu_name(std::istream& cpuinfo) {
  for (std::string line; std::getline(cpuinfo, line);) {
    if (!line.starts_with("model name")) continue;
    const size_t begin = line.find_first_not_of(": \t", std::string_view("model name").size());
    if (begin != std::string::npos) return line.substr(begin);
  }
  return "unknown CPU";
}

std::string device_name(at::Device device) {
  if (device.is_cuda()) return cuda_name(device.index());
  std::ifstream cpuinfo("/proc/cpuinfo");
  return cpu_name(cpuinfo);
}

std::vector<at::Tensor> upload(const std::vector<at::Tensor>& host, at::Device device) {
  if (device.is_cpu()) return host;
  constexpr int64_t kAlignment = 64;
  std::vector<int64_t> begins;
  int64_t size = 0;
  for (const at::Tensor& tensor : host) {
    begins.push_back(size);
    if (!tensor.defined()) continue;
    TORCH_CHECK(tensor.is_cpu() && tensor.is_contiguous(), "upload: expected contiguous tensors on the CPU");
    size += (static_cast<int64_t>(tensor.nbytes()) + kAlignment - 1) / kAlignment * kAlignment;
  }
  const at::Tensor packed =
      at::empty({size}, at::TensorOptions().dtype(at::kByte).pinned_memory(device.is_cuda()));
  auto* bytes = packed.mutable_data_ptr<uint8_t>();
  for (size_t i = 0; i < host.size(); ++i) {
    if (!host[i].defined() || host[i].numel() == 0) continue;
    std::memcpy(bytes + begins[i], host[i].const_data_ptr(), host[i].nbytes());
  }
  const at::Tensor moved = packed.to(device, /*non_blocking=*/true);
  std::vector<at::Tensor> result;
  for (size_t i = 0; i < host.size(); ++i) {
    at::Tensor& tensor = result.emplace_back();
    if (!host[i].defined()) continue;
    const at::Tensor part = moved.slice(0, begins[i], begins[i] + static_cast<int64_t>(host[i].nbytes()));
    tensor = part.view(host[i].scalar_type()).view(host[i].sizes());
  }
  return result;
}

at::Tensor download(const at::Tensor& tensor) {
  if (!tensor.is_cuda()) return tensor;
  const at::Tensor host = at::empty(tensor.sizes(), tensor.options().device(at::kCPU).pinned_memory(true));
  host.copy_(tensor.contiguous(), /*non_blocking=*/true);
  return host;
}

}  // namespace espalier
