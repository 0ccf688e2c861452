// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <string>

#include "espalier/ops/kernels/cuda/pointwise/pointwise.cuh"
#include "espalier/ops/kernels/cuda/pointwise/rms_norm.cuh"
#include "tests/ops/kernels/cuda/attention/elements.h"
#include "tests/test_seed.h"

namespace espalier::cuda {
namespace {

using testing::at_most_twice_the_plain_error;
using testing::draws_for;
using testing::emulate;
using testing::EmulatedLaunch;
using testing::ErrorFloor;
using testing::random_vector;
using testing::relative_error;
using testing::rounded;
using testing::squared_errors;
using testing::SquaredErrors;
using testing::test_seed;
using testing::to_double;
using testing::to_doubles;
using testing::unit_roundoff;
using testing::unwritten;

constexpr double kEps = 0.25;  // beside mean squares of 1: what does without it is found out

/// Ours against float64: results of float64 one by one, as exact as float64 is; those of other elements
/// together, by the rule of tests/error_ratio.h.
template <class Element>
class Judge {
 public:
  static constexpr bool kFloat64 = sizeof(Element) == sizeof(double);

  /// How many problems to judge that have so many independent values.
  static int64_t draws(int64_t values) { return kFloat64 ? 1 : draws_for(values); }

  /// Result is what the values were rounded to: Element, or what sums are kept in.
  template <class Result, class B>
  void add(const std::string& what, const std::vector<Result>& ours, const std::vector<B>& plain,
           const std::vector<double>& exact) {
    if constexpr (kFloat64) {
      EXPECT_LE(relative_error(ours, exact), 1e-14) << what;
    } else {
      Pool& pool = pools_[what];
      pool.errors += squared_errors(ours, plain, exact);
      pool.floor = {unit_roundoff<Result>()};
    }
  }
  void expect_right() const {
    for (const auto& [what, pool] : pools_) {
      EXPECT_TRUE(at_most_twice_the_plain_error(pool.errors, pool.floor)) << what;
    }
  }

 private:
  struct Pool {
    SquaredErrors errors;
    ErrorFloor floor{};
  };
  std::map<std::string, Pool> pools_;
};

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

template <class Element>
struct NormProblem {
  int64_t rows, width;
  bool has_addend, has_grad_sum;
  std::vector<Element> weight, x, addend, grad_y, grad_sum;

  NormProblem(uint64_t seed, int64_t num_rows, int64_t row_width, bool with_more)
      : rows(num_rows), width(row_width), has_addend(with_more), has_grad_sum(with_more) {
    std::mt19937_64 random(test_seed(seed));
    weight = random_vector<Element>(random, width);
    for (auto* tensor : {&x, &addend, &grad_y, &grad_sum}) {
      *tensor = random_vector<Element>(random, rows * width);
    }
  }
};

template <class Element>
struct NormResults {
  std::vector<Element> sum, y, grad_x;
  std::vector<AccumulatorOf<Element>> inverse, grad_weight;
};

/// Plain loops in Scalar, whose roundings to Element are those of the contract; Scalar float64 has none.
template <class Scalar, class Element>
struct Plain {
  std::vector<double> sum, y, inverse, grad_x, grad_weight;

  static double stored(Scalar value) {
    if constexpr (std::is_same_v<Scalar, double>) return value;
    return to_double(rounded<Element>(value));
  }

  explicit Plain(const NormProblem<Element>& given) : grad_weight(given.width) {
    const auto at = [](const std::vector<Element>& v, int64_t i) {
      return static_cast<Scalar>(to_double(v[i]));
    };
    std::vector<Scalar> weight_sums(given.width);
    for (int64_t row = 0; row < given.rows; ++row) {
      std::vector<Scalar> x(given.width), n(given.width), g(given.width);
      Scalar squares = 0, product = 0;
      for (int64_t i = 0; i < given.width; ++i) {
        const int64_t e = row * given.width + i;
        x[i] = at(given.x, e);
        if (given.has_addend) x[i] = static_cast<Scalar>(stored(x[i] + at(given.addend, e)));
        sum.push_back(x[i]);
        squares += x[i] * x[i];
      }
      const Scalar r = Scalar(1) / std::sqrt(squares / static_cast<Scalar>(given.width) + Scalar(kEps));
      inverse.push_back(r);
      for (int64_t i = 0; i < given.width; ++i) {
        const int64_t e = row * given.width + i;
        n[i] = x[i] * r;
        y.push_back(stored(static_cast<Scalar>(stored(n[i])) * at(given.weight, i)));
        weight_sums[i] += at(given.grad_y, e) * n[i];
        g[i] = at(given.grad_y, e) * at(given.weight, i);
        product += g[i] * n[i];
      }
      for (int64_t i = 0; i < given.width; ++i) {
        Scalar out = r * (g[i] - n[i] * product / static_cast<Scalar>(given.width));
        if (given.has_grad_sum) out += at(given.grad_sum, row * given.width + i);
        grad_x.push_back(stored(out));
      }
    }
    for (int64_t i = 0; i < given.width; ++i) grad_weight[i] = weight_sums[i];
  }
};

template <class Element, int N>
void emulate_forward(const RmsNormWork<Element>& work, uint64_t seed) {
  const int blocks = static_cast<int>((work.num_rows + work.teams.per_block() - 1) / work.teams.per_block());
  emulate({.blocks = {blocks, 1, 1},
           .threads = work.teams.threads,
           .shared_bytes = kTeamBufferBytes<AccumulatorOf<Element>>,
           .seed = seed},
          [&] { rms_norm_kernel<Element, N>(work); });
}

template <class Element, int N>
void emulate_backward(const RmsNormBackwardWork<Element>& work, uint64_t seed) {
  emulate({.blocks = {static_cast<int>(work.blocks()), 1, 1},
           .threads = work.teams.threads,
           .shared_bytes = backward_shared_bytes(work),
           .seed = seed},
          [&] { rms_norm_backward_kernel<Element, N>(work); });
}

/// rows_per_team: 0 for what the kernel's launch takes.
template <class Element>
NormResults<Element> run(const NormProblem<Element>& given, uint64_t seed = 1, int rows_per_team = 0,
                         bool want_x = true, bool want_weight = true) {
  using Scalar = AccumulatorOf<Element>;
  constexpr int N = kVectorSize<Element>;
  NormResults<Element> out;
  out.sum = unwritten<Element>(given.x.size());
  out.y = out.grad_x = out.sum;
  out.inverse = unwritten<Scalar>(given.rows);
  out.grad_weight = unwritten<Scalar>(given.width);
  const RmsNormForward<Element> forward{given.width,
                                        kEps,
                                        given.weight.data(),
                                        given.x.data(),
                                        given.has_addend ? given.addend.data() : nullptr,
                                        out.sum.data(),
                                        out.y.data(),
                                        out.inverse.data()};
  const RmsNormWork<Element> work{forward, given.rows, row_teams<Element>(given.width)};
  work.teams.vectors ? emulate_forward<Element, N>(work, seed) : emulate_forward<Element, 1>(work, seed);
  if (!given.has_addend) out.sum = given.x;

  const RmsNormBackward<Element> backward{given.width,
                                          given.weight.data(),
                                          out.sum.data(),
                                          out.inverse.data(),
                                          given.grad_y.data(),
                                          given.has_grad_sum ? given.grad_sum.data() : nullptr,
                                          want_x ? out.grad_x.data() : nullptr,
                                          nullptr};
  auto back = backward_work(backward, given.rows, static_cast<Scalar*>(nullptr));
  if (rows_per_team > 0) back.rows_per_team = rows_per_team;
  std::vector<Scalar> partials = unwritten<Scalar>(back.blocks() * given.width);
  if (want_weight) back.partials = partials.data();
  back.teams.vectors ? emulate_backward<Element, N>(back, seed) : emulate_backward<Element, 1>(back, seed);
  if (!want_weight) return out;
  const PartialSumsWork<Scalar> sums{partials.data(), back.blocks(), given.width, out.grad_weight.data()};
  emulate({.blocks = {static_cast<int>((given.width + 31) / 32), 1, 1},
           .threads = 1024,
           .shared_bytes = 32 * 33 * sizeof(double),
           .seed = seed},
          [&] { sum_partials_kernel(sums); });
  return out;
}

template <class Element>
void add_norm(const NormProblem<Element>& given, uint64_t seed, int rows_per_team, Judge<Element>& judge) {
  const NormResults<Element> ours = run(given, seed, rows_per_team);
  const Plain<double, Element> exact(given);
  const Plain<AccumulatorOf<Element>, Element> plain(given);
  judge.add("sum", ours.sum, plain.sum, exact.sum);
  judge.add("y", ours.y, plain.y, exact.y);
  judge.add("grad_x", ours.grad_x, plain.grad_x, exact.grad_x);
  // One value for each row: as many bits as a sum and one rounding leave.
  const double ulp = sizeof(Element) == 8 ? 0x1p-49 : 0x1p-23, input = sizeof(Element) == 2 ? 0x1p-8 : 0;
  EXPECT_LE(relative_error(ours.inverse, exact.inverse), 4 * ulp + (given.has_addend ? input : 0));
  judge.add("grad_weight", ours.grad_weight, plain.grad_weight, exact.grad_weight);
}

/// Norms of one shape. The gradient of the weights has one value for each column; the values of a row share
/// the rounding of its sums, beside which they have one of their own each: a row counts as eight.
template <class Element>
void expect_norms_right(uint64_t seed, int64_t rows, int64_t width, bool with_more) {
  SCOPED_TRACE(::testing::Message() << rows << " rows of " << width << ", " << sizeof(Element)
                                    << " bytes, from seed " << seed << " on, with more " << with_more);
  Judge<Element> judge;
  for (int64_t draw = Judge<Element>::draws(std::min(8 * rows, width)); draw > 0; --draw, ++seed) {
    add_norm(NormProblem<Element>(seed, rows, width, with_more), seed, static_cast<int>(seed % 3), judge);
  }
  judge.expect_right();
}

template <class Element>
class CudaRowMathTest : public ::testing::Test {};
using Elements = ::testing::Types<double, float, BFloat16>;
TYPED_TEST_SUITE(CudaRowMathTest, Elements);

TYPED_TEST(CudaRowMathTest, NormsEqualPlainLoops) {
  uint64_t seed = 0;
  for (const int64_t width : {1, 2, 63, 64, 65, 128, 256, 576, 1023, 1024, 4096}) {
    for (const int64_t rows : width < 600 ? std::vector<int64_t>{1, 70} : std::vector<int64_t>{3}) {
      for (const bool with_more : {false, true}) {
        expect_norms_right<TypeParam>(seed += 1000, rows, width, with_more);
      }
    }
  }
}

// With the bracket rounded before the product; a sum in another order moves the border of few roundings.
TEST(CudaRowMathTest, NormsRoundWhereTheContractSays) {
  const NormProblem<BFloat16> given(61, 20, 576, true);
  const NormResults<BFloat16> ours = run(given);
  const Plain<float, BFloat16> plain(given);
  int different = 0;
  for (size_t i = 0; i < ours.y.size(); ++i) different += to_double(ours.y[i]) != plain.y[i];
  EXPECT_LT(different, static_cast<int>(ours.y.size()) / 100);
}

// What a team does not hold is read twice.
TYPED_TEST(CudaRowMathTest, NormsOfRowsWiderThanATeamHolds) {
  const int64_t held = int64_t{kMaxTeam} * kHeld * kVectorSize<TypeParam>;
  expect_norms_right<TypeParam>(71, 3, held + 5 * kVectorSize<TypeParam>, true);
  expect_norms_right<TypeParam>(92, 2, int64_t{kMaxTeam} * kHeld + 3, true);
}

TYPED_TEST(CudaRowMathTest, NormsHaveTheSameBitsInEveryOrder) {
  for (const int64_t width : {64, 63, 1024, 2048}) {
    const NormProblem<TypeParam> given(81, 37, width, true);
    const auto first = run(given, 1, 3);
    for (const uint64_t seed : {2, 3}) {
      const auto again = run(given, seed, 3);
      EXPECT_TRUE(same_bits(first.y, again.y));
      EXPECT_TRUE(same_bits(first.grad_x, again.grad_x));
      EXPECT_TRUE(same_bits(first.grad_weight, again.grad_weight));
    }
  }
}

TYPED_TEST(CudaRowMathTest, NormGradientsThatNobodyWantsAreLeftOut) {
  const NormProblem<TypeParam> given(91, 9, 96, false);
  const auto both = run(given), x = run(given, 1, 0, true, false), weight = run(given, 1, 0, false, true);
  EXPECT_TRUE(same_bits(both.grad_x, x.grad_x));
  EXPECT_TRUE(same_bits(both.grad_weight, weight.grad_weight));
  EXPECT_TRUE(std::isnan(to_double(weight.grad_x[0])));
  EXPECT_TRUE(std::isnan(x.grad_weight[0]));
}

TYPED_TEST(CudaRowMathTest, NormsOfNoRowsHaveZeroGradients) {
  const auto none = run(NormProblem<TypeParam>(92, 0, 40, false));
  for (const auto sum : none.grad_weight) EXPECT_EQ(sum, 0);
}

template <class Element>
struct RotationProblem {
  int64_t tokens, heads, half;
  int64_t offset;  // of x, in elements
  std::vector<Element> x;
  std::vector<AccumulatorOf<Element>> cos, sin;
  Rotation<Element> rotation{};

  RotationProblem(uint64_t seed, int64_t num_tokens, int64_t num_heads, int64_t half_size, bool back,
                  int64_t first)
      : tokens(num_tokens), heads(num_heads), half(half_size), offset(first) {
    std::mt19937_64 random(test_seed(seed));
    const int64_t head_stride = 2 * half, token_stride = (heads + 2) * head_stride;
    x = random_vector<Element>(random, offset + tokens * token_stride);
    for (const auto angle : random_vector<double>(random, tokens * half, 100)) {
      cos.push_back(static_cast<AccumulatorOf<Element>>(std::cos(angle)));
      sin.push_back(static_cast<AccumulatorOf<Element>>(std::sin(angle)));
    }
    rotation = {heads, half,   x.data() + offset, token_stride, head_stride, cos.data(), sin.data(),
                back,  nullptr};
  }

  template <int N>
  std::vector<Element> run() {
    std::vector<Element> out = unwritten<Element>(tokens * heads * 2 * half);
    rotation.out = out.data();
    const auto work = rotation_work<Element, N>(rotation, tokens);
    const auto blocks = static_cast<int>((tokens + work.tokens_per_block - 1) / work.tokens_per_block);
    emulate({.blocks = {blocks, 1, 1}, .threads = kPointwiseThreads, .seed = 3},
            [&] { rotate_kernel<Element, N>(work, kPointwiseThreads); });
    return out;
  }

  template <class Scalar>
  std::vector<double> plain() const {
    std::vector<double> out;
    for (int64_t token = 0; token < tokens; ++token) {
      for (int64_t i = 0; i < heads * 2 * half; ++i) {
        const Element* row =
            rotation.x + token * rotation.token_stride + i / (2 * half) * rotation.head_stride;
        const int64_t at = i % (2 * half), pair = at % half;
        const auto a = static_cast<Scalar>(to_double(row[pair])),
                   b = static_cast<Scalar>(to_double(row[pair + half]));
        const auto c = static_cast<Scalar>(cos[token * half + pair]);
        const auto s =
            static_cast<Scalar>(rotation.back ? -sin[token * half + pair] : sin[token * half + pair]);
        const Scalar value = at < half ? a * c - b * s : b * c + a * s;
        out.push_back(std::is_same_v<Scalar, double> ? value : to_double(rounded<Element>(value)));
      }
    }
    return out;
  }
};

TYPED_TEST(CudaRowMathTest, RotationsEqualPlainLoops) {
  constexpr int N = kVectorSize<TypeParam>;
  uint64_t seed = 100;
  for (const int64_t half : {1, 8, 32, 40, 64, 128}) {
    for (const int64_t heads : {1, 9, 40}) {
      SCOPED_TRACE(::testing::Message()
                   << half << ", " << heads << " heads, from seed " << seed + 1 << " on");
      Judge<TypeParam> judge;
      const auto add = [&](const char* what, const auto& problem, const auto& ours) {
        judge.add(what, ours, problem.template plain<AccumulatorOf<TypeParam>>(),
                  problem.template plain<double>());
      };
      for (int64_t draw = 2 * judge.draws(13 * heads * 2 * half); draw > 0; --draw) {
        const bool back = ++seed % 2 == 0;
        RotationProblem<TypeParam> odd(seed, 13, heads, half, back, 1);
        add("single", odd, odd.template run<1>());
        if (half % N != 0) continue;
        RotationProblem<TypeParam> even(seed, 13, heads, half, back, 0);
        add("vectors", even, even.template run<N>());
      }
      judge.expect_right();
    }
  }
}

template <class Scalar>
struct PlainSwiglu {
  Scalar out, grad_gate, grad_up;

  PlainSwiglu(Scalar grad, Scalar gate, Scalar up) {
    const Scalar s = 1 / (1 + std::exp(-gate));
    out = gate * s * up;
    grad_up = grad * gate * s;
    grad_gate = grad * up * s * (1 + gate / (1 + std::exp(gate)));
  }
};

template <class Element>
void add_swiglu(uint64_t seed, int64_t count, Judge<Element>& judge) {
  using Scalar = AccumulatorOf<Element>;
  std::mt19937_64 random(test_seed(seed));
  const auto grad = random_vector<Element>(random, count), gate = random_vector<Element>(random, count, 4),
             up = random_vector<Element>(random, count);
  std::vector<Element> out = unwritten<Element>(count), grad_gate = out, grad_up = out;
  const EmulatedLaunch launch{.blocks = {static_cast<int>(pointwise_blocks<Element>(count)), 1, 1},
                              .threads = kPointwiseThreads,
                              .seed = 4};
  emulate(launch, [&] { swiglu_kernel(SwigluWork<Element>{gate.data(), up.data(), out.data(), count}); });
  emulate(launch, [&] {
    swiglu_backward_kernel(SwigluBackwardWork<Element>{
        {grad.data(), gate.data(), up.data(), grad_gate.data(), grad_up.data()}, count});
  });
  std::vector<Element> plain[3];
  std::vector<double> exact[3];
  for (int64_t i = 0; i < count; ++i) {
    const PlainSwiglu<Scalar> p(static_cast<Scalar>(to_double(grad[i])),
                                static_cast<Scalar>(to_double(gate[i])),
                                static_cast<Scalar>(to_double(up[i])));
    const PlainSwiglu<double> e(to_double(grad[i]), to_double(gate[i]), to_double(up[i]));
    plain[0].push_back(rounded<Element>(p.out)), exact[0].push_back(e.out);
    plain[1].push_back(rounded<Element>(p.grad_gate)), exact[1].push_back(e.grad_gate);
    plain[2].push_back(rounded<Element>(p.grad_up)), exact[2].push_back(e.grad_up);
  }
  judge.add("out", out, plain[0], exact[0]);
  judge.add("grad_gate", grad_gate, plain[1], exact[1]);
  judge.add("grad_up", grad_up, plain[2], exact[2]);
}

TYPED_TEST(CudaRowMathTest, SwigluEqualsPlainLoops) {
  using Element = TypeParam;
  for (const int64_t count : {1, 7, 8, 9, 513, 4096, 8195, 9000}) {
    SCOPED_TRACE(count);
    Judge<Element> judge;
    for (int64_t draw = 0; draw < judge.draws(count); ++draw) add_swiglu(1000 * draw + count, count, judge);
    judge.expect_right();
  }
}

TEST(CudaRowMathTest, SwigluOfExtremesIsFinite) {
  std::vector<float> gate{-INFINITY, -1000, -90, 0, 1000, INFINITY, NAN}, up(7, 1), out(7);
  emulate({.threads = kPointwiseThreads},
          [&] { swiglu_kernel(SwigluWork<float>{gate.data(), up.data(), out.data(), 7}); });
  EXPECT_TRUE(std::isnan(out[0]));  // -infinity times 0, as ATen has it
  EXPECT_EQ(out[1], 0);
  EXPECT_NEAR(out[2], 0, 1e-36);
  EXPECT_EQ(out[3], 0);
  EXPECT_EQ(out[4], 1000);
  EXPECT_EQ(out[5], INFINITY);
  EXPECT_TRUE(std::isnan(out[6]));
}

}  // namespace
}  // namespace espalier::cuda
