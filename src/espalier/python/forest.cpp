// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <string>

#include "espalier/base/check.h"
#include "espalier/base/units.h"
#include "espalier/plan/visible_intervals.h"
#include "espalier/python/arrays.h"
#include "espalier/python/bindings.h"
#include "espalier/python/trajectory_layout.h"
#include "espalier/tree/forest.h"
#include "espalier/tree/layout.h"

namespace espalier::python {
namespace {

Forest build(const Given<int64_t>& offsets, const Given<int32_t>& tokens,
             const std::optional<Given<uint64_t>>& merge_keys, const std::optional<Given<int64_t>>& tree_keys,
             bool most_leaves_first) {
  TokenSequences sequences{.offsets = span_of(offsets), .tokens = span_of(tokens)};
  if (merge_keys) sequences.merge_keys = span_of(*merge_keys);
  if (tree_keys) sequences.tree_keys = span_of(*tree_keys);
  sequences.release = check_signals;
  const nb::gil_scoped_release release;
  return build_forest(sequences, {},
                      most_leaves_first ? ChildOrder::kMostLeavesFirst : ChildOrder::kFirstReached);
}

TrajectoryLayout whole_layout(const Forest& forest) {
  std::vector<int64_t> trajectories(forest.num_trajectories());
  std::iota(trajectories.begin(), trajectories.end(), 0);
  return {make_layout(forest, whole_forest(forest)), std::move(trajectories), forest.end_node};
}

Array<int64_t> path(const TrajectoryLayout& layout, int64_t trajectory) {
  const auto found = std::lower_bound(layout.trajectories.begin(), layout.trajectories.end(), trajectory);
  ESPALIER_CHECK(found != layout.trajectories.end() && *found == trajectory,
                 "trajectory {}: expected one of the {} trajectories of this layout", trajectory,
                 with_commas(static_cast<int64_t>(layout.trajectories.size())));
  return take(path_tokens(layout, layout.end_run[found - layout.trajectories.begin()]));
}

using GivenBlocks = nb::ndarray<const int64_t, nb::shape<-1, 5>, nb::c_contig, nb::device::cpu>;

std::vector<ContextBlock> blocks_of(const GivenBlocks& blocks, const Given<int64_t>& positions) {
  ESPALIER_CHECK(positions.size() == blocks.shape(0),
                 "context_positions: expected {} numbers (one per context block), received {}",
                 blocks.shape(0), positions.size());
  std::vector<ContextBlock> context;
  for (size_t p = 0; p < blocks.shape(0); ++p) {
    const int64_t* block = blocks.data() + p * 5;
    context.push_back({.ancestor = block[0],
                       .column_begin = block[1],
                       .column_end = block[2],
                       .row_begin = block[3],
                       .row_end = block[4],
                       .position = positions.data()[p]});
  }
  return context;
}

using Intervals = nb::ndarray<nb::numpy, int32_t, nb::ndim<2>>;

Intervals matrix_of(VisibleIntervals intervals) {
  const auto rows = static_cast<size_t>(intervals.num_bounds);
  const size_t shape[] = {rows, intervals.bounds.size() / rows};
  return take_shaped(std::move(intervals.bounds), shape);
}

Intervals intervals_of(const Given<int32_t>& subtree_end, const std::optional<Given<int32_t>>& position,
                       int64_t sliding_window, const std::optional<GivenBlocks>& blocks,
                       const std::optional<Given<int64_t>>& positions) {
  ESPALIER_CHECK(blocks.has_value() == positions.has_value(),
                 "expected context_blocks and context_positions, received one");
  const auto context = blocks ? blocks_of(*blocks, *positions) : std::vector<ContextBlock>();
  VisibleIntervals found =
      visible_intervals({.subtree_end = span_of(subtree_end),
                         .position = position ? span_of(*position) : std::span<const int32_t>(),
                         .context = context,
                         .sliding_window = sliding_window});
  return matrix_of(std::move(found));
}

Intervals intervals_of_layout(const TrajectoryLayout& layout, int64_t sliding_window) {
  VisibleIntervals found = visible_intervals(
      {.subtree_end = layout.subtree_end, .position = layout.position_ids, .sliding_window = sliding_window});
  return matrix_of(std::move(found));
}

nb::dict counts(const std::map<int64_t, int64_t>& values) {
  nb::dict dict;
  for (const auto& [key, value] : values) dict[nb::cast(key)] = value;
  return dict;
}

nb::dict statistics(const Forest& forest) {
  const ForestStatistics s = forest_statistics(forest);
  nb::dict dict;
  dict["trajectories"] = s.num_trajectories;
  dict["trees"] = s.num_trees;
  dict["nodes"] = s.num_nodes;
  dict["leaves"] = s.num_leaves;
  dict["flat_tokens"] = s.flat_tokens;
  dict["tree_tokens"] = s.tree_tokens;
  dict["append_only_tokens"] = s.append_only_tokens;
  dict["flat_pairs"] = s.flat_pairs;
  dict["tree_pairs"] = s.tree_pairs;
  dict["append_only_pairs"] = s.append_only_pairs;
  dict["cached_token_ratio"] = s.cached_token_ratio;
  dict["por"] = s.por;
  dict["depth_nodes"] = s.max_depth_nodes;
  dict["depth_tokens"] = s.max_depth_tokens;
  dict["mean_branching"] = s.mean_branching;
  dict["max_branching"] = s.max_branching;
  dict["tokens_by_multiplicity"] = counts(s.tokens_by_multiplicity);
  dict["nodes_by_branching"] = counts(s.nodes_by_branching);
  return dict;
}

std::string forest_text(const Forest& forest) {
  const int64_t flat = forest.flat_tokens(), tree = forest.tree_tokens();
  const auto trees = std::count(forest.parent.begin(), forest.parent.end(), -1);
  return fmt::format("<espalier.Forest: {} in {}, {}; {} flat / {} tree tokens = {:.2f}x>",
                     count_of(forest.num_trajectories(), "trajectory", "trajectories"),
                     count_of(trees, "tree", "trees"), count_of(forest.num_nodes(), "node", "nodes"),
                     with_commas(flat), with_commas(tree),
                     tree == 0 ? 1.0 : static_cast<double>(flat) / static_cast<double>(tree));
}

std::string layout_text(const TrajectoryLayout& layout) {
  return fmt::format(
      "<espalier.Layout: {} in {}, {}>", count_of(layout.num_tokens(), "token", "tokens"),
      count_of(layout.num_runs(), "run", "runs"),
      count_of(static_cast<int64_t>(layout.trajectories.size()), "trajectory", "trajectories"));
}

// What pickles and copies are made of.

nb::tuple forest_state(nb::handle_t<Forest> self) {
  const Forest& forest = nb::cast<const Forest&>(self);
  const auto array = [self](const auto& values) { return view(std::span(values), self); };
  return nb::make_tuple(array(forest.tokens), array(forest.node_begin), array(forest.parent),
                        array(forest.subtree_last), array(forest.position), array(forest.multiplicity),
                        array(forest.end_node));
}

void restore_forest(Forest& self, const nb::tuple& state) {
  new (&self) Forest{.tokens = vector_of<int32_t>(state[0]),
                     .node_begin = vector_of<int64_t>(state[1]),
                     .parent = vector_of<int64_t>(state[2]),
                     .subtree_last = vector_of<int64_t>(state[3]),
                     .position = vector_of<int64_t>(state[4]),
                     .multiplicity = vector_of<int64_t>(state[5]),
                     .end_node = vector_of<int64_t>(state[6])};
}

nb::tuple layout_state(nb::handle_t<TrajectoryLayout> self) {
  const TrajectoryLayout& layout = nb::cast<const TrajectoryLayout&>(self);
  const auto array = [self](const auto& values) { return view(std::span(values), self); };
  return nb::make_tuple(array(layout.forest_token), array(layout.input_ids), array(layout.position_ids),
                        array(layout.subtree_end), array(layout.prev), array(layout.run_begin),
                        array(layout.run_parent), array(layout.trajectories), array(layout.end_run));
}

void restore_layout(TrajectoryLayout& self, const nb::tuple& state) {
  Layout layout{.forest_token = vector_of<int64_t>(state[0]),
                .input_ids = vector_of<int32_t>(state[1]),
                .position_ids = vector_of<int32_t>(state[2]),
                .subtree_end = vector_of<int32_t>(state[3]),
                .prev = vector_of<int32_t>(state[4]),
                .run_begin = vector_of<int64_t>(state[5]),
                .run_parent = vector_of<int64_t>(state[6])};
  new (&self) TrajectoryLayout(std::move(layout), vector_of<int64_t>(state[7]), vector_of<int64_t>(state[8]));
}

void bind_forest_class(nb::module_& module) {
  nb::class_<Forest>(
      module, "Forest",
      "The prefix trees of a set of trajectories, in preorder: the tokens of a node are contiguous, and its\n"
      "descendants follow it directly. `espalier.build` creates it. Arrays are read-only views.\n\n"
      "Examples:\n"
      "    >>> import espalier\n"
      "    >>> forest = espalier.build([[1, 2, 3, 4], [1, 2, 5]])\n"
      "    >>> forest.tokens.tolist(), forest.parent.tolist()\n"
      "    ([1, 2, 3, 4, 5], [-1, 0, 0])")
      .def_prop_ro("tokens", view_of<Forest>(&Forest::tokens),
                   "int32 [tree_tokens]: every distinct token once")
      .def_prop_ro("node_begin", view_of<Forest>(&Forest::node_begin),
                   "int64 [num_nodes + 1]: node n is tokens [node_begin[n], node_begin[n + 1])")
      .def_prop_ro("parent", view_of<Forest>(&Forest::parent),
                   "int64 [num_nodes]: the preceding node on the path, -1 at a root")
      .def_prop_ro("subtree_last", view_of<Forest>(&Forest::subtree_last),
                   "int64 [num_nodes]: one past the last node of the node's subtree")
      .def_prop_ro("position", view_of<Forest>(&Forest::position),
                   "int64 [num_nodes]: position of the node's first token on its root path")
      .def_prop_ro("multiplicity", view_of<Forest>(&Forest::multiplicity),
                   "int64 [num_nodes]: trajectories that pass through the node or end in it")
      .def_prop_ro("end_node", view_of<Forest>(&Forest::end_node),
                   "int64 [num_trajectories]: the node at whose end the trajectory ends")
      .def_prop_ro("num_nodes", &Forest::num_nodes, "Nodes of all trees.")
      .def_prop_ro("num_trajectories", &Forest::num_trajectories, "Rows that the forest was built from.")
      .def_prop_ro("tree_tokens", &Forest::tree_tokens, "Tokens without repetition.")
      .def_prop_ro("flat_tokens", &Forest::flat_tokens, "Tokens with repetition: all tokens of the rows.")
      .def("layout", &whole_layout, nb::call_guard<nb::gil_scoped_release>(),
           "The whole forest as one micro-batch: a Layout whose run k is node k.\n\n"
           "Raises:\n    InputError: It has more tokens than an int32 can count.")
      .def("statistics", &statistics, nb::sig("def statistics(self) -> dict[str, typing.Any]"),
           "How much the trajectories share, as a dict: trajectories, trees, nodes and leaves; tokens and "
           "visible\n"
           "(query, key) pairs flat, in the tree, and after append-only merging; cached_token_ratio (flat / "
           "tree), por\n"
           "(1 - tree / flat); depth and branching.")
      .def("__getstate__", &forest_state)
      .def("__setstate__", &restore_forest)
      .def("__repr__", &forest_text);
}

void bind_layout_class(nb::module_& module) {
  using Class = TrajectoryLayout;
  nb::class_<Class>(
      module, "Layout",
      "The T tokens of one micro-batch in preorder, and their visibility: token j sees token i if\n"
      "i <= j < subtree_end[i]. A run is a range of consecutive tokens of one root path; its descendants\n"
      "follow it directly. Arrays are read-only views.\n\n"
      "Examples:\n"
      "    >>> import espalier\n"
      "    >>> layout = espalier.build([[1, 2, 3, 4], [1, 2, 5]]).layout()\n"
      "    >>> layout.subtree_end.tolist()\n"
      "    [5, 5, 4, 4, 5]\n"
      "    >>> layout.path(1).tolist()\n"
      "    [0, 1, 4]")
      .def_prop_ro("forest_token", view_of<Class>(&Layout::forest_token),
                   "int64 [T]: index into Forest.tokens")
      .def_prop_ro("input_ids", view_of<Class>(&Layout::input_ids), "int32 [T]: the tokens")
      .def_prop_ro("position_ids", view_of<Class>(&Layout::position_ids),
                   "int32 [T]: position on the root path")
      .def_prop_ro("subtree_end", view_of<Class>(&Layout::subtree_end),
                   "int32 [T]: one past the last token of the subtree of the token's run")
      .def_prop_ro("prev", view_of<Class>(&Layout::prev),
                   "int32 [T]: the preceding token on the path, -1 at a root")
      .def_prop_ro("run_begin", view_of<Class>(&Layout::run_begin),
                   "int64 [num_runs + 1]: run k is tokens [run_begin[k], run_begin[k + 1])")
      .def_prop_ro("run_parent", view_of<Class>(&Layout::run_parent),
                   "int64 [num_runs]: the preceding run on the path, -1 at a root")
      .def_prop_ro("trajectories", view_of<Class>(&Class::trajectories),
                   "int64: the trajectories that are in this layout, ascending")
      .def_prop_ro("end_run", view_of<Class>(&Class::end_run),
                   "int64: for each of `trajectories`, the run at whose end its path leaves this layout")
      .def_prop_ro("multiplicity", view_of<Class>(&Class::multiplicity),
                   "int64 [T]: how many of `trajectories` pass through the token")
      .def_prop_ro("num_tokens", &Class::num_tokens, "T")
      .def_prop_ro("num_runs", &Class::num_runs, "Runs of all paths.")
      .def("path", &path, nb::arg("trajectory"),
           "int64 [length]: the indices of the trajectory's tokens in this layout, from its root.\n\n"
           "Args:\n    trajectory: Its number in the forest.\n\n"
           "Raises:\n    InputError: The trajectory is not in this layout.")
      .def(
          "paths", [](const Class& layout) { return take(all_path_tokens(layout, layout.end_run)); },
          "The paths of all `trajectories` as (offsets, indices): trajectory number k of them has\n"
          "indices[offsets[k]:offsets[k + 1]]. Both are int64.")
      .def("visible_intervals", &intervals_of_layout, nb::arg("sliding_window") = 0,
           "The keys that each token sees, as intervals: what attention libraries with interval masks "
           "take.\n\n"
           "Args:\n    sliding_window: 0 for none, else tokens see ancestors less than so many positions "
           "away.\n\n"
           "Returns:\n    int32 [F, T], F odd. Column i holds F increasing numbers f0, f1, ...: token i sees "
           "token j where\n"
           "    j < f0, or f1 <= j < f2, or f3 <= j < f4, and so on. This is `mask_func` of "
           "cudnn.flex_attention, without its\n"
           "    first dimension. F is at most 1 + 2 log2(leaves) for trees of `build(rows, "
           "most_leaves_first=True)`,\n"
           "    and 2 more for forests and windows.\n\n"
           "Examples:\n"
           "    >>> import espalier\n"
           "    >>> espalier.build([[1, 2, 3, 4], [1, 2, 5]]).layout().visible_intervals().tolist()\n"
           "    [[1, 2, 3, 4, 2], [1, 2, 3, 4, 4], [1, 2, 3, 4, 5]]")
      .def("__len__", &Class::num_tokens)
      .def("__getstate__", &layout_state)
      .def("__setstate__", &restore_layout)
      .def("__repr__", &layout_text);
}

}  // namespace

void bind_forest(nb::module_& module) {
  bind_forest_class(module);
  bind_layout_class(module);
  module.def("build_forest", &build, nb::arg("offsets").noconvert(), nb::arg("tokens").noconvert(),
             nb::arg("merge_keys").noconvert() = nb::none(), nb::arg("tree_keys").noconvert() = nb::none(),
             nb::arg("most_leaves_first") = false,
             "espalier.build of arrays: offsets int64 [R + 1], tokens int32 [N], merge_keys uint64 [N],\n"
             "tree_keys int64 [R].");
  module.def("visible_intervals", &intervals_of, nb::arg("subtree_end"), nb::arg("position") = nb::none(),
             nb::arg("sliding_window") = 0, nb::arg("context_blocks") = nb::none(),
             nb::arg("context_positions") = nb::none(),
             "Layout.visible_intervals of the arguments of espalier.ops.tree_attention: subtree_end and "
             "position int32 [T],\n"
             "context_blocks int64 [P, 5], context_positions int64 [P] of each block's first key. Keys are "
             "those of the\n"
             "context blocks, one block after another, then the tokens.");
}

}  // namespace espalier::python
