// SPDX-License-Identifier: Apache-2.0
// Random attention problems for kernels in the emulator, and what they should give: in float64, and densely
// in the precision of the kernels.
#pragma once

#include <cmath>
#include <string>
#include <vector>

#include "tests/ops/kernels/cuda/attention/attention_problems.h"
#include "tests/ops/kernels/cuda/attention/elements.h"
#include "tests/test_seed.h"

namespace espalier::testing {

/// [tokens, heads, dim] in one of several layouts; what lies between and beyond is NaN.
template <class Element>
struct HeadTensor {
  int64_t tokens = 0, heads = 0, dim = 0, token_stride = 0, head_stride = 0;
  std::vector<Element> elements;

  HeadTensor() = default;
  HeadTensor(int64_t num_tokens, int64_t num_heads, int64_t head_dim, uint64_t layout)
      : tokens(num_tokens), heads(num_heads), dim(head_dim) {
    switch (layout % 3) {
      case 0:
        token_stride = heads * dim;
        head_stride = dim;
        break;
      case 1:  // a part of a row of something larger
        token_stride = heads * dim + 24;
        head_stride = dim;
        break;
      default:
        token_stride = dim;
        head_stride = tokens * dim + 8;
    }
    elements.assign(tokens * token_stride + heads * head_stride + 8, Element{0x7fff});
  }

  Element& at(int64_t t, int64_t h, int64_t d) { return elements[t * token_stride + h * head_stride + d]; }
  double value(int64_t t, int64_t h, int64_t d) const {
    return simt::emulator::to_float(elements[t * token_stride + h * head_stride + d]);
  }
  cuda::TokenHeadsData data() { return {elements.data(), token_stride, head_stride}; }
};

/// Dense [tokens, heads, dim].
struct Values {
  int64_t heads = 0, dim = 0;
  std::vector<double> numbers;

  Values() = default;
  Values(int64_t tokens, int64_t num_heads, int64_t head_dim)
      : heads(num_heads), dim(head_dim), numbers(tokens * num_heads * head_dim) {}
  double* row(int64_t t, int64_t h) { return numbers.data() + (t * heads + h) * dim; }
};

template <class Element>
Values values(const HeadTensor<Element>& tensor) {
  Values result(tensor.tokens, tensor.heads, tensor.dim);
  for (int64_t t = 0; t < tensor.tokens; ++t) {
    for (int64_t h = 0; h < tensor.heads; ++h) {
      for (int64_t d = 0; d < tensor.dim; ++d) result.row(t, h)[d] = tensor.value(t, h, d);
    }
  }
  return result;
}

struct CaseOptions {
  int head_dim = 64;
  int key_heads = 1;
  int group = 1;
  std::vector<int32_t> ends = {};
  int num_rectangles = 0;
  int max_context_keys = 100;
};

template <class Element>
struct AttentionCase {
  int64_t tokens, heads, key_heads, dim;
  float scale;
  std::vector<int32_t> ends;
  std::vector<ContextRectangle> rectangles;
  HeadTensor<Element> q, grad_out;
  std::vector<HeadTensor<Element>> k, v;  // of the forest, then of each segment

  AttentionCase(const CaseOptions& options, uint64_t seed)
      : tokens(static_cast<int64_t>(options.ends.size())),
        heads(options.key_heads * options.group),
        key_heads(options.key_heads),
        dim(options.head_dim),
        scale(1 / std::sqrt(static_cast<float>(options.head_dim))),
        ends(options.ends) {
    std::mt19937_64 random(test_seed(seed));
    rectangles = random_rectangles(random, ends.size(), options.num_rectangles, options.max_context_keys);
    const auto fill = [&](HeadTensor<Element>& tensor, int64_t begin, int64_t end) {
      std::normal_distribution<float> normal;
      for (int64_t t = begin; t < end; ++t) {
        for (int64_t h = 0; h < tensor.heads; ++h) {
          for (int64_t d = 0; d < dim; ++d) {
            tensor.at(t, h, d) = {simt::emulator::round_to_bits(normal(random), Element{})};
          }
        }
      }
    };
    q = {tokens, heads, dim, random()};
    grad_out = {tokens, heads, dim, random()};
    fill(q, 0, tokens);
    fill(grad_out, 0, tokens);
    // Segments in the order of their numbers; what no rectangle names stays NaN.
    std::vector<std::pair<int64_t, int64_t>> named(1 + rectangles.size());
    named[0] = {0, tokens};
    for (const ContextRectangle& r : rectangles) named[1 + r.segment] = {r.key_begin, r.key_end};
    for (const auto& [begin, end] : named) {
      for (auto* list : {&k, &v}) {
        list->emplace_back(end + (list->empty() ? 0 : 2), key_heads, dim, random());
        fill(list->back(), begin, end);
      }
    }
  }

  struct Key {
    int64_t source, key;
  };
  std::vector<Key> seen_by(int64_t query) const {
    std::vector<Key> result;
    for (int64_t i = 0; i <= query; ++i) {
      if (visible(ends, query, i)) result.push_back({0, i});
    }
    for (const ContextRectangle& r : rectangles) {
      if (query < r.query_begin || query >= r.query_end) continue;
      for (int64_t key = r.key_begin; key < r.key_end; ++key) result.push_back({1 + r.segment, key});
    }
    return result;
  }
};

struct AttentionValues {
  Values out, lse, grad_q;
  std::vector<Values> grad_k, grad_v;
};

/// Row by row in Scalar; with an Element, P, dS and results are rounded to it where the kernels do so.
template <class Scalar, bool kRounded, class Element>
AttentionValues dense_attention(const AttentionCase<Element>& c) {
  const auto round = [](Scalar x) -> Scalar {
    if (!kRounded) return x;
    return simt::emulator::to_float(Element{simt::emulator::round_to_bits(static_cast<float>(x), Element{})});
  };
  AttentionValues result{
      {c.tokens, c.heads, c.dim}, {c.tokens, c.heads, 1}, {c.tokens, c.heads, c.dim}, {}, {}};
  Values q = values(c.q), grad_out = values(c.grad_out);
  std::vector<Values> k, v;
  for (size_t s = 0; s < c.k.size(); ++s) {
    k.push_back(values(c.k[s]));
    v.push_back(values(c.v[s]));
    result.grad_k.emplace_back(c.k[s].tokens, c.key_heads, c.dim);
    result.grad_v.emplace_back(c.k[s].tokens, c.key_heads, c.dim);
  }
  const auto dot = [&](const double* a, const double* b) {
    Scalar sum = 0;
    for (int64_t d = 0; d < c.dim; ++d) sum += static_cast<Scalar>(a[d]) * static_cast<Scalar>(b[d]);
    return sum;
  };
  const Scalar scale = c.scale;
  for (int64_t j = 0; j < c.tokens; ++j) {
    const auto keys = c.seen_by(j);
    for (int64_t h = 0; h < c.heads; ++h) {
      const int64_t key_head = h / (c.heads / c.key_heads);
      std::vector<Scalar> scores;
      Scalar maximum = -INFINITY, sum = 0;
      for (const auto& [s, i] : keys) {
        scores.push_back(scale * dot(q.row(j, h), k[s].row(i, key_head)));
        maximum = std::max(maximum, scores.back());
      }
      std::vector<Scalar> out(c.dim), grad_q(c.dim);
      for (size_t n = 0; n < keys.size(); ++n) {
        const Scalar p = std::exp(scores[n] - maximum);
        sum += p;
        const double* value = v[keys[n].source].row(keys[n].key, key_head);
        for (int64_t d = 0; d < c.dim; ++d) out[d] += round(p) * static_cast<Scalar>(value[d]);
      }
      const Scalar lse = maximum + std::log(sum);
      *result.lse.row(j, h) = lse;
      for (int64_t d = 0; d < c.dim; ++d) result.out.row(j, h)[d] = round(out[d] / sum);
      const Scalar delta = dot(grad_out.row(j, h), result.out.row(j, h));
      for (size_t n = 0; n < keys.size(); ++n) {
        const auto [s, i] = keys[n];
        const Scalar p = std::exp(scores[n] - lse);
        const Scalar ds = p * (dot(grad_out.row(j, h), v[s].row(i, key_head)) - delta);
        for (int64_t d = 0; d < c.dim; ++d) {
          result.grad_v[s].row(i, key_head)[d] += round(p) * grad_out.row(j, h)[d];
          result.grad_k[s].row(i, key_head)[d] += scale * round(ds) * q.row(j, h)[d];
          grad_q[d] += scale * round(ds) * static_cast<Scalar>(k[s].row(i, key_head)[d]);
        }
      }
      for (int64_t d = 0; d < c.dim; ++d) result.grad_q.row(j, h)[d] = round(grad_q[d]);
    }
  }
  for (auto* list : {&result.grad_k, &result.grad_v}) {
    for (Values& gradient : *list) {
      for (double& number : gradient.numbers) number = round(number);
    }
  }
  return result;
}

/// The larger of two ratios by the rule of tests/error_ratio.h: of all errors of `got` over those of `dense`,
/// and half that of the largest one of each, which shows a single wrong value, but is one draw and so a
/// matter of luck. A gradient of scores may cancel to nothing, where only what float32 sums of its terms
/// leave is to be seen.
inline double error_ratio(const Values& got, const Values& dense, const Values& exact, double roundoff) {
  const ErrorFloor floor{roundoff, /*absolute=*/2e-6};
  SquaredErrors all, largest{.num_values = 1};
  for (size_t i = 0; i < exact.numbers.size(); ++i) {
    SquaredErrors one;
    one.add(got.numbers[i], dense.numbers[i], exact.numbers[i]);
    if (!std::isfinite(one.ours)) return INFINITY;
    all += one;
    largest.ours = std::max(largest.ours, one.ours);
    largest.plain = std::max(largest.plain, one.plain);
    largest.exact = std::max(largest.exact, one.exact);
  }
  return std::max(error_ratio(all, floor), error_ratio(largest, floor) / 2);
}

/// A random forest of a shape that the seed names.
inline std::vector<int32_t> random_ends(uint64_t seed, int max_nodes, int max_node_tokens) {
  std::mt19937_64 random(test_seed(seed));
  return random_subtree_end(random, static_cast<ForestShape>(seed % kNumForestShapes), max_nodes,
                            max_node_tokens);
}

/// Two branches of one root, and the same with other finite numbers in all that the second branch neither
/// sees nor is seen by.
template <class Element>
struct Neighbours {
  static constexpr int64_t kRoot = 70, kBranch = 60, kEnd = kRoot + 2 * kBranch;
  AttentionCase<Element> before, after;

  explicit Neighbours(const CaseOptions& options) : before(with_branches(options), 3), after(before) {
    for (HeadTensor<Element>* tensor : {&after.q, &after.grad_out, &after.k[0], &after.v[0]}) {
      for (int64_t t = kRoot; t < kRoot + kBranch; ++t) {
        for (int64_t h = 0; h < tensor->heads; ++h) {
          for (int64_t d = 0; d < tensor->dim; ++d) {
            const float other = -3 * static_cast<float>(tensor->value(t, h, d)) + 1;
            tensor->at(t, h, d) = {simt::emulator::round_to_bits(other, Element{})};
          }
        }
      }
    }
  }
  /// Does the second branch have the same numbers, and the first one others?
  static bool left_alone(const Values& a, const Values& b) {
    const int64_t row = a.heads * a.dim;
    const auto same = [&](int64_t begin, int64_t end) {
      return std::equal(a.numbers.begin() + begin * row, a.numbers.begin() + end * row,
                        b.numbers.begin() + begin * row);
    };
    return same(kRoot + kBranch, kEnd) && !same(kRoot, kRoot + kBranch);
  }

 private:
  static CaseOptions with_branches(CaseOptions options) {
    options.ends.assign(kRoot, kEnd);
    options.ends.insert(options.ends.end(), kBranch, kRoot + kBranch);
    options.ends.insert(options.ends.end(), kBranch, kEnd);
    return options;
  }
};

/// Tiles that a schedule lists, by what is in them.
struct ListedTiles {
  int64_t full = 0, partial = 0;
  int64_t cut = 0;  // of fewer keys than a tile has
  int64_t context = 0;

  void count(const cuda::TileSchedule& schedule) {
    for (int32_t q = 0; q < schedule.inputs.num_query_blocks(); ++q) {
      for (cuda::TileWalk walk(schedule, q); !walk.done(); walk.advance()) {
        const bool is_full =
            classify(walk.block(), schedule.query_begin(q), schedule.query_end(q)) == TileClass::kFull;
        ++(is_full ? full : partial);
        cut += walk.block().num_keys() < schedule.inputs.sizes.keys;
        context += walk.block().segment >= 0;
      }
    }
  }
  bool all_hit() const { return full > 0 && partial > 0 && cut > 0 && context > 0; }
};

}  // namespace espalier::testing
