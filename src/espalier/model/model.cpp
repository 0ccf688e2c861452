// SPDX-License-Identifier: Apache-2.0
#include "espalier/model/model.h"

#include <ATen/ATen.h>

#include <cmath>

#include "espalier/ops/checks.h"

namespace espalier {

std::vector<at::Tensor> Model::gradients() const {
  std::vector<at::Tensor> gradients;
  for (const Parameter& parameter : parameters()) gradients.push_back(parameter.value.grad());
  return gradients;
}

void Model::zero_gradients() const {
  for (const Parameter& parameter : parameters()) at::Tensor(parameter.value).mutable_grad().reset();
}

void complete_gradient(const at::Tensor& parameter) {
  at::Tensor& gradient = at::Tensor(parameter).mutable_grad();
  if (!gradient.defined())
    gradient = at::zeros_like(parameter, detail::accumulator_dtype(parameter.scalar_type()));
}

double global_norm(std::vector<at::Tensor> gradients) {
  std::erase_if(gradients, [](const at::Tensor& gradient) { return !gradient.defined(); });
  if (gradients.empty()) return 0;
  const at::Tensor norms = at::stack(at::_foreach_norm(gradients, 2, at::kDouble)).cpu();
  double squares = 0;
  for (int64_t i = 0; i < norms.numel(); ++i) {
    const double norm = norms.const_data_ptr<double>()[i];
    squares += norm * norm;
  }
  return std::sqrt(squares);
}

}  // namespace espalier
