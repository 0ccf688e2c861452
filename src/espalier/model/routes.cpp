// SPDX-License-Identifier: Apache-2.0
#include "espalier/model/routes.h"

#include <c10/util/Exception.h>

namespace espalier {
namespace {

Routes* recorded = nullptr;
const Routes* replayed = nullptr;
size_t next = 0;  // of `replayed`

void check_free() {
  TORCH_CHECK(recorded == nullptr && replayed == nullptr,
              "RecordRoutes, ReplayRoutes: expected none, received a second one");
}

}  // namespace

RecordRoutes::RecordRoutes(Routes* routes) {
  check_free();
  recorded = routes;
}

RecordRoutes::~RecordRoutes() {
  recorded = nullptr;
}

ReplayRoutes::ReplayRoutes(const Routes& routes) {
  check_free();
  replayed = &routes;
  next = 0;
}

ReplayRoutes::~ReplayRoutes() {
  replayed = nullptr;
}

std::optional<at::Tensor> next_route() {
  if (replayed == nullptr) return std::nullopt;
  return replayed->at(next++);
}

void record_route(const at::Tensor& experts) {
  if (recorded != nullptr) recorded->push_back(experts);
}

}  // namespace espalier
