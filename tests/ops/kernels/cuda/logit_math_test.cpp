#include "espalier/ops/kernels/cuda/logit_math.cuh"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "tests/ops/kernels/cuda/elements.h"

namespace espalier::cuda {
namespace {

using testing::emulate;
using testing::random_vector;
using testing::relative_error;
using testing::rounded;
using testing::to_double;
using testing::unwritten;

struct Problem {
  int64_t rows, vocabulary;
  std::vector<float> logits;  // [rows, vocabulary]
  std::vector<int64_t> edge_begin, edge_target;
  std::vector<float> edge_grad;

  /// Rows without an edge, rows with several, and edges that repeat are all likely.
  Problem(uint64_t seed, int64_t num_rows, int64_t num_columns, int64_t num_edges, double size = 3)
      : rows(num_rows), vocabulary(num_columns) {
    std::mt19937_64 random(seed);
    logits = random_vector<float>(random, rows * vocabulary, size);
    std::vector<int64_t> edge_row;
    for (int64_t e = 0; e < num_edges; ++e) {
      edge_row.push_back(static_cast<int64_t>(random() % rows));
      edge_target.push_back(static_cast<int64_t>(random() % vocabulary));
    }
    std::ranges::sort(edge_row);
    for (int64_t r = 0; r <= rows; ++r) {
      edge_begin.push_back(std::ranges::lower_bound(edge_row, r) - edge_row.begin());
    }
    edge_grad = random_vector<float>(random, num_edges);
  }
};

struct Results {
  std::vector<float> logprob;
  std::vector<double> lse;
  std::vector<BFloat16> grads;  // [rows, vocabulary]
};

/// A copy of columns [begin, end) as a block of logits, padded with NaN.
std::vector<float> block_of(const Problem& given, int64_t begin, int64_t end, int64_t stride) {
  std::vector<float> block = unwritten<float>(given.rows * stride);
  for (int64_t r = 0; r < given.rows; ++r) {
    std::copy_n(given.logits.data() + r * given.vocabulary + begin, end - begin, block.data() + r * stride);
  }
  return block;
}

/// In blocks of `width` columns.
Results run(const Problem& given, int64_t width, uint64_t seed = 1) {
  const auto num_edges = static_cast<int64_t>(given.edge_target.size());
  Results out{unwritten<float>(num_edges), unwritten<double>(given.rows),
              unwritten<BFloat16>(given.rows * given.vocabulary)};
  std::vector<float> maximum = unwritten<float>(given.rows), value = unwritten<float>(num_edges);
  std::vector<double> sum = unwritten<double>(given.rows);
  const auto in_blocks = [&](const auto& visit) {
    for (int64_t begin = 0; begin < given.vocabulary; begin += width) {
      const int64_t end = std::min(begin + width, given.vocabulary), stride = (end - begin + 3) / 4 * 4 + 4;
      std::vector<float> logits = block_of(given, begin, end, stride);
      visit(LogitBlockRows{logits.data(), stride, given.rows, end - begin, begin, given.edge_begin.data(),
                           given.edge_target.data()},
            end == given.vocabulary);
    }
  };
  const auto launch = [&](const auto& kernel) {
    emulate({.blocks = {static_cast<int>(given.rows), 1, 1},
             .threads = kLogitThreads,
             .shared_bytes = kLogitSharedBytes,
             .seed = seed},
            kernel);
  };
  in_blocks([&](const LogitBlockRows& block, bool is_last) {
    const AddExpsWork work{block,
                           {maximum.data(), sum.data(), out.logprob.data(), out.lse.data()},
                           block.column_begin == 0,
                           is_last};
    launch([&] { add_exps_kernel(work); });
  });
  in_blocks([&](const LogitBlockRows& block, bool) {
    const DifferentiateWork work{block, {given.edge_grad.data(), out.lse.data(), value.data()}};
    launch([&] { differentiate_kernel<BFloat16>(work); });
    for (int64_t r = 0; r < block.num_rows; ++r) {
      std::memcpy(out.grads.data() + r * given.vocabulary + block.column_begin,
                  block.logits + r * block.stride, block.num_columns * sizeof(BFloat16));
    }
  });
  return out;
}

/// Plain loops in float64 or, as a reference of what float32 costs, in float32.
template <class Scalar>
struct Plain {
  std::vector<double> logprob, lse, grads;

  explicit Plain(const Problem& given) : logprob(given.edge_target.size()) {
    for (int64_t r = 0; r < given.rows; ++r) {
      const float* row = given.logits.data() + r * given.vocabulary;
      const auto maximum = static_cast<Scalar>(*std::max_element(row, row + given.vocabulary));
      Scalar sum = 0, total = 0;
      for (int64_t i = 0; i < given.vocabulary; ++i) sum += std::exp(static_cast<Scalar>(row[i]) - maximum);
      lse.push_back(maximum + std::log(sum));
      std::vector<Scalar> grad(given.vocabulary);
      for (int64_t e = given.edge_begin[r]; e < given.edge_begin[r + 1]; ++e) {
        logprob[e] = (static_cast<Scalar>(row[given.edge_target[e]]) - maximum) - std::log(sum);
        total += static_cast<Scalar>(given.edge_grad[e]);
        grad[given.edge_target[e]] += static_cast<Scalar>(given.edge_grad[e]);
      }
      for (int64_t i = 0; i < given.vocabulary; ++i) {
        const Scalar value =
            grad[i] - std::exp((static_cast<Scalar>(row[i]) - maximum) - std::log(sum)) * total;
        grads.push_back(std::is_same_v<Scalar, double> ? value : to_double(rounded<BFloat16>(value)));
      }
    }
  }
};

void expect_right(const Problem& given, int64_t width) {
  SCOPED_TRACE(::testing::Message() << given.rows << " rows of " << given.vocabulary << ", "
                                    << given.edge_target.size() << " edges, blocks of " << width);
  const Results ours = run(given, width);
  const Plain<double> exact(given);
  const Plain<float> plain(given);
  // The errors of a few numbers are chance: beside twice the plain ones, two units in the last place.
  EXPECT_LE(relative_error(ours.logprob, exact.logprob),
            std::max(2 * relative_error(plain.logprob, exact.logprob), 2 * 0x1p-24));
  EXPECT_LE(relative_error(ours.lse, exact.lse), std::max(2 * relative_error(plain.lse, exact.lse), 0x1p-24));
  EXPECT_LE(relative_error(ours.grads, exact.grads), 2 * relative_error(plain.grads, exact.grads) + 1e-30);
}

TEST(CudaLogitMathTest, EqualsPlainLoops) {
  uint64_t seed = 0;
  for (const int64_t vocabulary : {2, 3, 63, 64, 65, 576, 1023, 4096, 8192, 8193, 20'003}) {
    for (const int64_t rows : {1, 7}) {
      const Problem given(++seed, rows, vocabulary, 3 * rows);
      SCOPED_TRACE(seed);
      expect_right(given, vocabulary);
      expect_right(given, std::max<int64_t>(1, vocabulary * 2 / 5));
    }
  }
}

TEST(CudaLogitMathTest, TakesARowWithManyEdgesAndRowsWithNone) {
  Problem given(31, 3, 900, 1500);
  given.edge_begin = {0, 0, 1500, 1500};
  expect_right(given, 900);
  expect_right(given, 400);
  const Results ours = run(given, 900);
  for (int64_t i = 0; i < 900; ++i) EXPECT_EQ(to_double(ours.grads[i]), 0);
}

TEST(CudaLogitMathTest, VocabularyOfOneHasNoLossAndNoGradient) {
  const Results ours = run(Problem(32, 3, 1, 4), 1);
  for (const float logprob : ours.logprob) EXPECT_EQ(logprob, 0);
  for (const BFloat16 grad : ours.grads) EXPECT_LE(std::fabs(to_double(grad)), 1e-6);
}

// All of which float32 holds exactly: what is wrong comes from softmax alone. Float32 has 1/16 there.
TEST(CudaLogitMathTest, ExtremeLogitsAreAsExactAsOthers) {
  Problem given(33, 5, 3001, 20);
  std::mt19937_64 random(34);
  for (int64_t r = 0; r < given.rows; ++r) {
    for (int64_t i = 0; i < given.vocabulary; ++i) {
      float& logit = given.logits[r * given.vocabulary + i];
      logit = std::round(logit * 8) / 8 + (r % 2 == 0 ? 1e6F : -1e6F);
    }
  }
  expect_right(given, 3001);
  expect_right(given, 1000);
}

TEST(CudaLogitMathTest, HasTheSameBitsInEveryOrder) {
  const Problem given(35, 4, 9001, 30);
  const Results first = run(given, 4096, 1);
  for (const uint64_t seed : {2, 3}) {
    const Results again = run(given, 4096, seed);
    EXPECT_EQ(first.logprob, again.logprob);
    EXPECT_EQ(first.lse, again.lse);
    EXPECT_EQ(std::memcmp(first.grads.data(), again.grads.data(), first.grads.size() * sizeof(BFloat16)), 0);
  }
}

// Without edges a row's gradient is 0 and its lse what it is.
TEST(CudaLogitMathTest, TargetsOutsideTheVocabularyHaveNoGradient) {
  Problem given(36, 2, 50, 4);
  given.edge_begin = {0, 2, 4};
  given.edge_target = {3, 50, -1, 7};
  const Results ours = run(given, 50);
  EXPECT_TRUE(std::isfinite(ours.logprob[0]));
  EXPECT_TRUE(std::isnan(ours.logprob[1]));
  EXPECT_TRUE(std::isnan(ours.logprob[2]));
}

}  // namespace
}  // namespace espalier::cuda
