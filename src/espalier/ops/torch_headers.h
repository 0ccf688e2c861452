// SPDX-License-Identifier: Apache-2.0
// The LibTorch headers of the precompiled header: all that ops, model and train use.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>
