// SPDX-License-Identifier: Apache-2.0
#include "espalier/runtime/device.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <sstream>

#include "espalier/base/check.h"
#include "tests/base/message_of.h"

namespace espalier::testing {
namespace {

TEST(Device, WordsParse) {
  EXPECT_EQ(parse_device("cpu"), at::Device(at::kCPU));
  EXPECT_EQ(parse_device("cuda"), at::Device(at::kCUDA, 0));
  EXPECT_EQ(parse_device("cuda:0"), at::Device(at::kCUDA, 0));
  EXPECT_EQ(parse_device("cuda:3"), at::Device(at::kCUDA, 3));
}

TEST(Device, OtherWordsAreRefused) {
  for (const char* word : {"", "tpu", "CPU", "cpu:0", "cuda:", "cuda:x", "cuda:-1", "cuda:1x", "cuda: 1",
                           "cuda:300", "cuda:99999999999", "meta", "cuda0"}) {
    const std::string message = message_of<InputError>([&] { parse_device(word); });
    EXPECT_EQ(message, fmt::format("--device: expected cpu, cuda or cuda:N, received `{}`", word));
  }
}

TEST(Device, CpuNamesMayBeEmptyOrMissing) {
  const auto name_in = [](const std::string& text) {
    std::istringstream cpuinfo(text);
    return cpu_name(cpuinfo);
  };
  EXPECT_EQ(name_in("processor\t: 0\nmodel name\t: AMD EPYC 9B14\nflags\t\t: fpu\n"), "AMD EPYC 9B14");
  for (const char* text : {"", "processor\t: 0\n", "model name\t:\n", "model name\t: \n", "model name",
                           "model name\t:\nmodel name\t:\n"}) {
    EXPECT_EQ(name_in(text), "unknown CPU") << text;
  }
}

// LibTorch asks once in a process whether it has CUDA, and any backward pass makes it ask. GoogleTest runs
// the suites of this ending before all others, and their tests in the order of the file: the one that loads
// libtorch_cuda comes last.
TEST(DeviceDeathTest, TheCpuNeedsNoOpening) {
  open_device(at::kCPU, /*deterministic=*/true);
  EXPECT_FALSE(at::globalContext().deterministicAlgorithms());
  EXPECT_FALSE(c10::impl::hasDeviceGuardImpl(at::kCUDA));
  synchronize(at::kCPU);
  EXPECT_FALSE(device_name(at::kCPU).empty());
}

TEST(DeviceDeathTest, WhatIsMissingIsSaidInOneLine) {
  const std::string message = message_of<InputError>([] { open_device({at::kCUDA, 100}); });
  EXPECT_EQ(message.find('\n'), std::string::npos);
  if (message.find("libtorch_cuda.so") != std::string::npos) {
    EXPECT_NE(message.find("received one without"), std::string::npos) << message;
  } else if (c10::impl::VirtualGuardImpl(at::kCUDA).deviceCount() == 0) {
    EXPECT_EQ(message,
              "--device cuda:100: no CUDA device is visible (see nvidia-smi and CUDA_VISIBLE_DEVICES)");
    EXPECT_TRUE(at::globalContext().hasCUDART());  // the library has made itself known
  } else {
    EXPECT_NE(message.find("expected an index from 0 to "), std::string::npos) << message;
    EXPECT_NE(message.find("received cuda:100"), std::string::npos) << message;
  }
}

TEST(Device, UploadKeepsShapesAndTypes) {
  const std::vector<at::Tensor> host{
      at::arange(7, at::kLong),  at::ones({3, 5}, at::kDouble), at::Tensor(),
      at::zeros({5}, at::kBool), at::empty({0}, at::kLong),     at::ones({1}, at::kInt)};
  const std::vector<at::Tensor> there = upload(host, at::kMeta);
  ASSERT_EQ(there.size(), host.size());
  for (size_t i = 0; i < host.size(); ++i) {
    ASSERT_EQ(there[i].defined(), host[i].defined()) << i;
    if (!host[i].defined()) continue;
    EXPECT_TRUE(there[i].is_meta()) << i;
    EXPECT_EQ(there[i].sizes(), host[i].sizes()) << i;
    EXPECT_EQ(there[i].scalar_type(), host[i].scalar_type()) << i;
    EXPECT_EQ(there[i].storage_offset() * static_cast<int64_t>(there[i].element_size()) % 64, 0) << i;
  }
  const std::vector<at::Tensor> here = upload(host, at::kCPU);
  for (size_t i = 0; i < host.size(); ++i) EXPECT_TRUE(here[i].is_same(host[i])) << i;
  EXPECT_TRUE(download(host[0]).is_same(host[0]));
}

TEST(Device, UploadRefusesWhatIsNotContiguous) {
  EXPECT_THROW(upload({at::ones({2, 3}).t()}, at::kMeta), c10::Error);
}

}  // namespace
}  // namespace espalier::testing
