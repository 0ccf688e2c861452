// SPDX-License-Identifier: Apache-2.0
// The device that tensors live on: opening it, waiting for it, copies to and from it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <iosfwd>
#include <string>
#include <vector>

namespace espalier {

/// "cpu", "cuda" (the first CUDA device that is visible) or "cuda:N", with its index; throws InputError for
/// any other word. Does not ask whether there is such a device.
at::Device parse_device(const std::string& name);

/// Makes a device ready, and the current one of its kind. Nothing to do for the CPU. For CUDA:
///   loads libtorch_cuda from the folder of libtorch_cpu, so that nobody else pays for it;
///   turns off TF32 and sums of products in less than float32, whatever the environment says;
///   with `deterministic` makes the operators give bitwise identical results in every run (ops/ reads
///   at::globalContext().deterministicAlgorithms()).
/// Throws InputError when this LibTorch has no CUDA, when no device is visible, or when the index is beyond
/// those that are. Call before anything is computed: LibTorch asks only once whether there is CUDA.
void open_device(at::Device device, bool deterministic = false);

/// Waits until the device has done all that it was given.
void synchronize(at::Device device);

/// What the device calls itself: the CPU's name as the system gives it, or such as "NVIDIA H200".
std::string device_name(at::Device device);

/// The CPU's name in what Linux's /proc/cpuinfo says; "unknown CPU" where it has none, or an empty one.
std::string cpu_name(std::istream& cpuinfo);

/// Contiguous tensors on the host, as they are on `device`: in one copy, through pinned memory, in the order
/// of the current stream, without waiting. Undefined ones stay undefined. For the CPU the tensors themselves.
std::vector<at::Tensor> upload(const std::vector<at::Tensor>& host, at::Device device);

/// The tensor in pinned host memory; of a tensor on the CPU, itself. Does not wait: the values are there
/// after synchronize(), and in time for whatever the current stream does next.
at::Tensor download(const at::Tensor& tensor);

}  // namespace espalier
