// SPDX-License-Identifier: Apache-2.0
#include "espalier/runtime/cuda_software.h"

#include <ATen/Context.h>
#include <dlfcn.h>
#include <fmt/format.h>
#include <unistd.h>

#include <charconv>
#include <fstream>
#include <string_view>

namespace espalier {
namespace {

// Calls functions of libcuda.so.1 by name (CUDA Driver API).
class Driver {
 public:
  Driver() : library_(dlopen("libcuda.so.1", RTLD_LAZY)) {}
  bool found() const { return library_ != nullptr; }

  /// Returns the status of the call; kNotFound for a missing function.
  template <typename... Args>
  int call(const char* name, Args... args) const {
    constexpr int kNotFound = 500;  // CUDA_ERROR_NOT_FOUND
    const auto function = reinterpret_cast<int (*)(Args...)>(dlsym(library_, name));
    return function == nullptr ? kNotFound : function(args...);
  }

  std::string error_name(int status) const {
    const char* name = nullptr;
    return call("cuGetErrorName", status, &name) == 0 && name != nullptr ? name
                                                                         : fmt::format("error {}", status);
  }

 private:
  void* library_;
};

CudaDevice describe_device(const Driver& driver, int index) {
  constexpr int kMajor = 75, kMinor = 76;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
  CudaDevice result{.name = "unknown CUDA device"};
  int device = 0, major = 0, minor = 0;
  if (driver.call("cuDeviceGet", &device, index) != 0) return result;
  char name[256] = {};
  if (driver.call("cuDeviceGetName", static_cast<char*>(name), static_cast<int>(sizeof(name)) - 1, device) ==
      0) {
    result.name = name;
  }
  size_t bytes = 0;
  if (driver.call("cuDeviceTotalMem_v2", &bytes, device) == 0) result.memory_bytes = bytes;
  if (driver.call("cuDeviceGetAttribute", &major, kMajor, device) == 0 &&
      driver.call("cuDeviceGetAttribute", &minor, kMinor, device) == 0) {
    result.compute_capability = 10 * major + minor;
  }
  return result;
}

std::string first_line(const std::string& path) {
  std::string line;
  std::ifstream file(path);
  std::getline(file, line);
  return line;
}

// The line `cuda: Optional[str] = '13.0'` of version.py in a Python package.
std::string cuda_of_package(const std::string& path) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const size_t begin = line.find('\''), end = line.rfind('\'');
    if (line.starts_with("cuda") && begin != std::string::npos && end > begin) {
      return line.substr(begin + 1, end - begin - 1);
    }
  }
  return "";
}

// "13.0" of "2.11.0+cu130", as in a LibTorch outside of Python packages.
std::string cuda_of_version(const std::string& version) {
  constexpr std::string_view kMark = "+cu";
  const size_t mark = version.find(kMark);
  if (mark == std::string::npos) return "";
  const std::string digits = version.substr(mark + kMark.size());
  if (digits.size() < 2 || digits.find_first_not_of("0123456789") != std::string::npos) return "";
  return fmt::format("{}.{}", digits.substr(0, digits.size() - 1), digits.back());
}

int major_of(const std::string& version) {
  int major = 0;
  std::from_chars(version.data(), version.data() + version.size(), major);
  return major;
}

}  // namespace

CudaDriver cuda_driver() {
  const Driver driver;
  CudaDriver result{.found = driver.found()};
  if (!result.found) return result;
  result.version = first_line("/sys/module/nvidia/version");
  driver.call("cuDriverGetVersion", &result.cuda);
  if (const int status = driver.call("cuInit", 0U); status != 0) {
    result.error = driver.error_name(status);
    return result;
  }
  int count = 0;
  if (const int status = driver.call("cuDeviceGetCount", &count); status != 0) {
    result.error = driver.error_name(status);
  }
  for (int index = 0; index < count; ++index) result.devices.push_back(describe_device(driver, index));
  return result;
}

LibTorchCuda libtorch_cuda() {
  Dl_info info{};
  LibTorchCuda result;
  if (dladdr(reinterpret_cast<void*>(&at::globalContext), &info) == 0 || info.dli_fname == nullptr) {
    return result;
  }
  const std::string library = info.dli_fname;
  const size_t slash = library.rfind('/');
  result.folder = slash == std::string::npos ? "." : library.substr(0, slash);
  result.found = ::access((result.folder + "/libtorch_cuda.so").c_str(), R_OK) == 0;
  result.version = cuda_of_package(result.folder + "/../version.py");
  if (result.version.empty())
    result.version = cuda_of_version(first_line(result.folder + "/../build-version"));
  return result;
}

std::string cuda_version_text(int cuda) {
  return cuda == 0 ? "unknown" : fmt::format("{}.{}", cuda / 1000, cuda % 1000 / 10);
}

std::string cuda_fault(const CudaDriver& driver, const LibTorchCuda& torch) {
  if (!torch.found)
    return fmt::format("LibTorch was built without CUDA: no libtorch_cuda.so in {}", torch.folder);
  if (!driver.found) return "no NVIDIA driver: there is no libcuda.so.1";
  if (driver.cuda != 0 && major_of(torch.version) > driver.cuda / 1000) {
    return fmt::format(
        "LibTorch was built with CUDA {}, the driver{} serves CUDA up to {}: a newer driver or a LibTorch "
        "for CUDA "
        "{} is needed",
        torch.version, driver.version.empty() ? "" : " " + driver.version, cuda_version_text(driver.cuda),
        cuda_version_text(driver.cuda));
  }
  if (!driver.error.empty() && driver.error != "CUDA_ERROR_NO_DEVICE") {
    return fmt::format("the NVIDIA driver does not start: {}", driver.error);
  }
  if (driver.devices.empty()) {
    return "no CUDA device is visible (see nvidia-smi and CUDA_VISIBLE_DEVICES)";
  }
  return "";
}

AutomaticDevice automatic_device(const CudaDriver& driver, const LibTorchCuda& torch) {
  std::string fault = cuda_fault(driver, torch);
  if (!fault.empty()) return {c10::kCPU, std::move(fault)};
  return {c10::Device(c10::kCUDA, 0), driver.devices.front().name};
}

}  // namespace espalier
