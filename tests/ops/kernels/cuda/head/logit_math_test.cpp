// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/kernels/cuda/head/logit_math.cuh"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "tests/ops/kernels/cuda/attention/elements.h"
#include "tests/test_seed.h"

namespace espalier::cuda {
namespace {

using testing::at_most_twice_the_plain_error;
using testing::draws_for;
using testing::emulate;
using testing::kBFloat16Roundoff;
using testing::kFloat32Roundoff;
using testing::random_vector;
using testing::rounded;
using testing::squared_errors;
using testing::SquaredErrors;
using testing::test_seed;
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
    std::mt19937_64 random(test_seed(seed));
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

/// Errors of the logits in one block, or in blocks, over several problems.
struct Errors {
  SquaredErrors logprob, lse, grads;

  void add(const Results& ours, const Plain<float>& plain, const Plain<double>& exact) {
    logprob += squared_errors(ours.logprob, plain.logprob, exact.logprob);
    lse += squared_errors(ours.lse, plain.lse, exact.lse);
    grads += squared_errors(ours.grads, plain.grads, exact.grads);
  }
  void expect_right() const {
    EXPECT_TRUE(at_most_twice_the_plain_error(logprob, {kFloat32Roundoff})) << "logprob";
    EXPECT_TRUE(at_most_twice_the_plain_error(lse, {kFloat32Roundoff})) << "lse";
    EXPECT_TRUE(at_most_twice_the_plain_error(grads, {kBFloat16Roundoff})) << "grads";
  }
};

/// Problems whose errors are judged together: rows are few, and all that a row has shares the rounding of its
/// lse.
class Judge {
 public:
  void add(const Problem& given, int64_t width) {
    const Plain<double> exact(given);
    const Plain<float> plain(given);
    in_one_block_.add(run(given, given.vocabulary), plain, exact);
    in_blocks_.add(run(given, width), plain, exact);
  }
  void expect_right() const {
    {
      SCOPED_TRACE("in one block");
      in_one_block_.expect_right();
    }
    SCOPED_TRACE("in blocks");
    in_blocks_.expect_right();
  }

 private:
  Errors in_one_block_, in_blocks_;
};

TEST(CudaLogitMathTest, EqualsPlainLoops) {
  uint64_t seed = 0;
  using Sizes = std::vector<int64_t>;
  for (const Sizes& vocabularies : {Sizes{2}, Sizes{3}, Sizes{63}, Sizes{64}, Sizes{65}, Sizes{576},
                                    Sizes{1023}, Sizes{4096, 8192, 8193, 20'003}}) {
    SCOPED_TRACE(::testing::Message()
                 << "from seed " << seed + 1 << " on, vocabulary " << vocabularies.front());
    Judge judge;
    for (int64_t draw = draws_for(8 * std::ssize(vocabularies)); draw > 0; --draw) {
      for (const int64_t vocabulary : vocabularies) {
        for (const int64_t rows : {1, 7}) {
          judge.add(Problem(++seed, rows, vocabulary, 3 * rows), std::max<int64_t>(1, vocabulary * 2 / 5));
        }
      }
    }
    judge.expect_right();
  }
}

TEST(CudaLogitMathTest, TakesARowWithManyEdgesAndRowsWithNone) {
  Judge judge;
  for (int64_t draw = 0; draw < draws_for(1); ++draw) {
    const int64_t columns = draw == 0 ? 900 : 60, edges = draw == 0 ? 1500 : 150;
    Problem given(3100 + draw, 3, columns, edges);
    given.edge_begin = {0, 0, edges, edges};
    judge.add(given, columns * 4 / 9);
    const Results ours = run(given, columns);
    for (int64_t i = 0; i < columns; ++i) EXPECT_EQ(to_double(ours.grads[i]), 0);
  }
  judge.expect_right();
}

TEST(CudaLogitMathTest, VocabularyOfOneHasNoLossAndNoGradient) {
  const Results ours = run(Problem(32, 3, 1, 4), 1);
  for (const float logprob : ours.logprob) EXPECT_EQ(logprob, 0);
  for (const BFloat16 grad : ours.grads) EXPECT_LE(std::fabs(to_double(grad)), 1e-6);
}

// All of which float32 holds exactly: what is wrong comes from softmax alone. Float32 has 1/16 there.
TEST(CudaLogitMathTest, ExtremeLogitsAreAsExactAsOthers) {
  Judge judge;
  for (int64_t draw = 0; draw < draws_for(5); ++draw) {
    Problem given(3300 + draw, 5, 3001, 20);
    for (int64_t r = 0; r < given.rows; ++r) {
      for (int64_t i = 0; i < given.vocabulary; ++i) {
        float& logit = given.logits[r * given.vocabulary + i];
        logit = std::round(logit * 8) / 8 + (r % 2 == 0 ? 1e6F : -1e6F);
      }
    }
    judge.add(given, 1000);
  }
  judge.expect_right();
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
