// SPDX-License-Identifier: Apache-2.0
#include "espalier/plan/ranks.h"

#include <fmt/format.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

#include "espalier/base/units.h"
#include "espalier/plan/planner.h"
#include "espalier/python/arrays.h"
#include "espalier/python/bindings.h"
#include "espalier/python/model_costs.h"

namespace espalier::python {
namespace {

std::string share_text(const RankShare& share) {
  return fmt::format("<espalier.RankShare: {}, {}>",
                     count_of(static_cast<int64_t>(share.trajectories.size()), "trajectory", "trajectories"),
                     count_of(share.tree_tokens, "tree token", "tree tokens"));
}

std::string plan_text(const RankPlan& plan) {
  return fmt::format(
      "<espalier.Distribution: {}, the slowest {:.1f}% over the mean; {}>",
      count_of(static_cast<int64_t>(plan.ranks.size()) * plan.context_parallel, "rank", "ranks"),
      100 * plan.imbalance(), count_of(plan.split_trees, "split tree", "split trees"));
}

const RankShare& share_at(const RankPlan& plan, int64_t rank) {
  if (rank < 0 || rank >= static_cast<int64_t>(plan.ranks.size())) throw nb::index_error("rank out of range");
  return plan.ranks[rank];
}

nb::tuple share_state(const RankShare& share) {
  return nb::make_tuple(take(std::vector(share.trajectories)), share.seconds, share.tree_tokens);
}

RankShare restored_share(nb::handle state) {
  return {.trajectories = vector_of<int64_t>(state[0]),
          .seconds = nb::cast<double>(state[1]),
          .tree_tokens = nb::cast<int64_t>(state[2])};
}

nb::tuple plan_state(const RankPlan& plan) {
  nb::list shares;
  for (const RankShare& share : plan.ranks) shares.append(share_state(share));
  return nb::make_tuple(shares, plan.split_trees, plan.repeated_tokens, plan.least_seconds,
                        plan.context_parallel);
}

RankPlan restored_plan(const nb::tuple& state) {
  RankPlan plan{.ranks = {},
                .context_parallel = nb::cast<int64_t>(state[4]),
                .split_trees = nb::cast<int64_t>(state[1]),
                .repeated_tokens = nb::cast<int64_t>(state[2]),
                .least_seconds = nb::cast<double>(state[3])};
  for (nb::handle share : nb::cast<nb::list>(state[0])) plan.ranks.push_back(restored_share(share));
  return plan;
}

}  // namespace

void bind_ranks(nb::module_& module) {
  nb::class_<RankShare>(
      module, "RankShare",
      "The share of one rank: a forest of its trajectories.\n\n"
      "Examples:\n"
      "    >>> import espalier\n"
      "    >>> share = espalier.distribute(espalier.build([[1, 2, 3, 4], [1, 2, 5]]), ranks=2)[0]\n"
      "    >>> share.trajectories.size, share.tree_tokens\n"
      "    (1, 4)")
      .def_prop_ro("trajectories", view_of<RankShare>(&RankShare::trajectories),
                   "int64: trajectories of the whole forest, ascending; empty if the rank is idle.")
      .def_ro("seconds", &RankShare::seconds,
              "Predicted for forward and backward; without a model up to a common factor.")
      .def_ro("tree_tokens", &RankShare::tree_tokens, "Tokens of the rank's own forest.")
      .def("__getstate__", &share_state)
      .def("__setstate__",
           [](RankShare& share, const nb::tuple& state) { new (&share) RankShare(restored_share(state)); })
      .def("__repr__", &share_text);
  nb::class_<RankPlan>(
      module, "Distribution",
      "The trajectories of each rank. It has a length, and index r gives the RankShare of "
      "rank r.\n\n"
      "Examples:\n"
      "    >>> import espalier\n"
      "    >>> shares = espalier.distribute(espalier.build([[1, 2, 3, 4], [1, 2, 5]]), ranks=2)\n"
      "    >>> shares.split_trees, shares.repeated_tokens\n"
      "    (1, 2)")
      .def_prop_ro("imbalance", &RankPlan::imbalance, "The slowest rank's seconds over the mean, less 1.")
      .def_prop_ro("seconds", &RankPlan::seconds, "Of the slowest rank.")
      .def_ro("least_seconds", &RankPlan::least_seconds, "A lower bound for every distribution.")
      .def_ro("context_parallel", &RankPlan::context_parallel, "Ranks that have each share together.")
      .def_ro("split_trees", &RankPlan::split_trees, "Trees that are on several ranks.")
      .def_ro(
          "repeated_tokens", &RankPlan::repeated_tokens,
          "Prefix tokens that are encoded more than once: the tokens of all ranks less those of the forest.")
      .def("__len__", [](const RankPlan& plan) { return plan.ranks.size(); })
      .def("__iter__", &iterator_of, nb::sig("def __iter__(self) -> collections.abc.Iterator[RankShare]"))
      .def("__getitem__", &share_at, nb::arg("rank"), nb::rv_policy::reference_internal)
      .def("__getstate__", &plan_state)
      .def("__setstate__",
           [](RankPlan& plan, const nb::tuple& state) { new (&plan) RankPlan(restored_plan(state)); })
      .def("__repr__", &plan_text);
  module.def(
      "distribute",
      [](const Forest& forest, int64_t ranks, const ModelCosts* costs, int64_t context_parallel,
         double bandwidth) {
        const TimeModel model = costs == nullptr ? common_costs().time : costs->time;
        const auto bytes_per_token =
            static_cast<double>(4 * model.cost.context_per_token());  // of bfloat16, twice
        return distribute(forest, ranks, model, context_parallel, bytes_per_token / bandwidth);
      },
      nb::arg("forest"), nb::arg("ranks"), nb::arg("costs").none(), nb::arg("context_parallel"),
      nb::arg("bandwidth"), nb::call_guard<Interruptible>(), "Implements espalier.distribute.");
}

}  // namespace espalier::python
