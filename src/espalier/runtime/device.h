// SPDX-License-Identifier: Apache-2.0
// Devices: initialisation, synchronisation, copies.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <iosfwd>
#include <string>
#include <vector>

namespace espalier {

/// "cpu", "cuda" (the first CUDA device that is visible) or "cuda:N", with its index; throws InputError for
/// anything else. Does not check that the device exists.
at::Device parse_device(const std::string& name);

/// Initialises a device and makes it current. No-op for the CPU. For CUDA:
///   loads libtorch_cuda from the folder of libtorch_cpu, which is slow and therefore not linked;
///   disables TF32 and reduced-precision accumulation, overriding the environment;
///   with `deterministic` makes results bitwise reproducible (ops/ reads
///   at::globalContext().deterministicAlgorithms()).
/// Throws InputError if this LibTorch has no CUDA, no device is visible, or the index is out of range. Call
/// before any computation: LibTorch checks only once whether CUDA is available.
void open_device(at::Device device, bool deterministic = false);

/// Waits until the device has finished all queued work.
void synchronize(at::Device device);

/// The name of the device: of the CPU as given by the system, or such as "NVIDIA H200".
std::string device_name(at::Device device);

/// The CPU's name in /proc/cpuinfo; "unknown CPU" if missing or empty.
std::string cpu_name(std::istream& cpuinfo);

/// Copies contiguous host tensors to `device` in one asynchronous copy through pinned memory, in the current
/// stream. Undefined ones stay undefined. Returns the tensors themselves for the CPU.
std::vector<at::Tensor> upload(const std::vector<at::Tensor>& host, at::Device device);

/// Copies a tensor to pinned host memory asynchronously; returns a CPU tensor itself. The values are valid
/// after synchronize(), and for later work in the current stream.
at::Tensor download(const at::Tensor& tensor);

}  // namespace espalier
