// SPDX-License-Identifier: Apache-2.0
// Attention over a forest in preorder on a GPU, fused (docs/math.md, "Attention by tiles"), with mma.sync and
// cp.async: compute capability 8.0 and later. Does not use LibTorch or CUDA headers. Pointers are to GPU
// memory unless noted. Does not allocate, synchronise or read GPU memory.
#pragma once

#include <algorithm>
#include <cstdint>

#include "espalier/ops/kernels/key_block.h"

namespace espalier::cuda {

enum class ElementKind : uint8_t { kBFloat16, kFloat16 };

/// [tokens, heads, head_dim], contiguous in the last dimension. Data must be aligned to 16 bytes; strides, in
/// elements, positive multiples of 8. 256 times the token stride must fit 32 bits.
struct TokenHeadsData {
  void* data;
  int64_t token_stride;
  int64_t head_stride;
};

/// Keys and values of one segment, [tokens, key heads, head_dim]: an element of an array on the GPU, of which
/// the first is the forest's own and entry 1 + s is context segment s.
struct KeySource {
  TokenHeadsData k;
  TokenHeadsData v;
};

/// Outputs of backward, likewise: gradients in the problem's element type of every key in some rectangle;
/// others are not written.
struct KeyGradients {
  TokenHeadsData grad_k;
  TokenHeadsData grad_v;
};

struct AttentionProblem {
  ElementKind element;
  int32_t num_tokens;
  int32_t num_heads;
  int32_t num_key_heads;  // divides num_heads
  int32_t head_dim;
  float softmax_scale;         // positive
  const int32_t* subtree_end;  // [num_tokens], of a forest in preorder
  TokenHeadsData q;
  const KeySource* sources;
  // Sorted by sort_rectangles; on the host, and a copy on the GPU. Ranges must not be empty; query ranges
  // nested or disjoint; a key must not be in two rectangles.
  const ContextRectangle* host_rectangles;
  const ContextRectangle* rectangles;
  int32_t num_rectangles;
  bool deterministic;  // backward without atomics: bitwise reproducible
  // Memory for schedules, which depend only on forest, rectangles and sizes, aligned to 256 bytes, and
  // whether an earlier call of this pass (forward or backward) has filled it.
  void* schedules;
  bool scheduled;

  int32_t group() const { return num_heads / num_key_heads; }
};

struct AttentionOutputs {
  TokenHeadsData out;
  float* lse;  // [num_heads, num_tokens], natural log
};

struct AttentionGradients {
  TokenHeadsData grad_out;
  TokenHeadsData out;  // of forward, as is lse
  const float* lse;
  TokenHeadsData grad_q;
  const KeyGradients* grad_sources;
};

/// Sorts by query_begin ascending, then query_end descending.
inline void sort_rectangles(ContextRectangle* rectangles, int32_t count) {
  std::stable_sort(rectangles, rectangles + count, [](const ContextRectangle& a, const ContextRectangle& b) {
    return a.query_begin != b.query_begin ? a.query_begin < b.query_begin : a.query_end > b.query_end;
  });
}

/// Whether there are kernels of this head dimension for a GPU with this compute capability (10 major + minor)
/// and shared memory per block (device.h): 99 KiB of it at 64, 163 KiB at 128, 145 KiB at 256.
bool serves_head_dim(int32_t head_dim, int compute_capability, int64_t shared_bytes);

/// Bytes that a call needs of the problem's `schedules`, and of scratch (aligned to 256, uninitialised).
struct AttentionMemory {
  int64_t schedules;
  int64_t scratch;
};
AttentionMemory forward_memory(const AttentionProblem& problem);
AttentionMemory backward_memory(const AttentionProblem& problem);

/// On `stream`, a cudaStream_t of the current device. Throw std::runtime_error if a launch fails.
void attend(const AttentionProblem& problem, const AttentionOutputs& outputs, void* scratch, void* stream);
void attend_backward(const AttentionProblem& problem, const AttentionGradients& gradients, void* scratch,
                     void* stream);

}  // namespace espalier::cuda
