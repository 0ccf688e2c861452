// SPDX-License-Identifier: Apache-2.0
#include "espalier/qualify/awkward_forests.h"

#include <random>
#include <utility>

namespace espalier::qualify {
namespace {

// Appends a node of `size` tokens, with the nodes appended by `children` as its subtree.
template <class Children>
void node(std::vector<int32_t>& ends, int tokens, const Children& children) {
  const size_t begin = ends.size();
  ends.resize(begin + static_cast<size_t>(tokens));
  children();
  for (int i = 0; i < tokens; ++i) ends[begin + static_cast<size_t>(i)] = static_cast<int32_t>(ends.size());
}

void leaf(std::vector<int32_t>& ends, int tokens) {
  node(ends, tokens, [] {});
}

std::vector<int32_t> chain(int tokens) {
  std::vector<int32_t> ends;
  leaf(ends, tokens);
  return ends;
}

std::vector<int32_t> star(int prompt, int leaves, int tokens) {
  std::vector<int32_t> ends;
  node(ends, prompt, [&] {
    for (int i = 0; i < leaves; ++i) leaf(ends, tokens + i % 3);
  });
  return ends;
}

// Nodes of a single token, with a random number of children.
void single_tokens(std::vector<int32_t>& ends, std::minstd_rand& random, int depth) {
  node(ends, 1, [&] {
    const auto children = depth == 0 ? 0 : 1 + static_cast<int>(random() % 3);
    for (int i = 0; i < children; ++i) single_tokens(ends, random, depth - 1);
  });
}

// A path with a short branch at every node.
void deep(std::vector<int32_t>& ends, int levels) {
  node(ends, 1 + levels % 5, [&] {
    if (levels == 0) return;
    if (levels % 2 == 0) leaf(ends, 2);
    deep(ends, levels - 1);
    if (levels % 3 == 0) leaf(ends, 1);
  });
}

void broad(std::vector<int32_t>& ends, int levels) {
  node(ends, 3 + 2 * levels, [&] {
    for (int i = 0; levels > 0 && i < 5; ++i) broad(ends, levels - 1);
  });
}

// Nodes with one child: a trajectory ends where another continues.
void ending_inside(std::vector<int32_t>& ends, int levels) {
  node(ends, 7, [&] {
    if (levels == 0) return;
    ending_inside(ends, levels - 1);
    if (levels % 4 == 0) leaf(ends, 11);
  });
}

std::vector<int32_t> several_trees() {
  std::vector<int32_t> ends;
  for (int tree = 0; tree < 30; ++tree) {
    node(ends, 1 + tree % 7, [&] {
      for (int i = 0; i < tree % 4; ++i) leaf(ends, 1 + i);
    });
  }
  return ends;
}

// Nodes that end one before, at and one after the sizes of kernel tiles.
std::vector<int32_t> tile_borders() {
  std::vector<int32_t> ends;
  node(ends, 63, [&] {
    leaf(ends, 65);
    node(ends, 64, [&] {
      leaf(ends, 127);
      leaf(ends, 1);
    });
    leaf(ends, 128);
  });
  leaf(ends, 129);
  return ends;
}

template <class Grow>
std::vector<int32_t> grown(const Grow& grow) {
  std::vector<int32_t> ends;
  grow(ends);
  return ends;
}

AwkwardForest with_context(std::string name, std::vector<int32_t> ends) {
  const auto all = static_cast<int64_t>(ends.size()), half = all / 2;
  AwkwardForest forest{.name = std::move(name), .subtree_end = std::move(ends), .segment_sizes = {150, 90}};
  forest.context_blocks = {0, 0,   100, 0,    all,   // of all tokens
                           0, 110, 150, 20,   half,  // of some; keys between the blocks are not visible
                           1, 0,   64,  half, all,   //
                           1, 64,  65,  half, half + 1};
  return forest;
}

}  // namespace

std::vector<AwkwardForest> awkward_forests() {
  std::minstd_rand random(7);
  std::vector<AwkwardForest> forests{
      {.name = "one token", .subtree_end = chain(1)},
      {.name = "chain", .subtree_end = chain(300)},
      {.name = "star", .subtree_end = star(70, 40, 4)},
      {.name = "long prompt", .subtree_end = star(1000, 30, 5)},  // key blocks are cut into parts
      {.name = "single tokens", .subtree_end = grown([&](auto& ends) { single_tokens(ends, random, 8); })},
      {.name = "deep", .subtree_end = grown([](auto& ends) { deep(ends, 60); })},
      {.name = "wide", .subtree_end = grown([](auto& ends) { broad(ends, 3); })},
      {.name = "trajectories ending inside",
       .subtree_end = grown([](auto& ends) { ending_inside(ends, 30); })},
      {.name = "several trees", .subtree_end = several_trees()},
      {.name = "borders of tiles", .subtree_end = tile_borders()},
      {.name = "equal keys", .subtree_end = star(64, 16, 12), .period = 7},
      {.name = "sharp softmax", .subtree_end = star(130, 10, 9), .sharpness = 8}};
  forests.push_back(with_context("context of a chain", chain(130)));
  forests.push_back(with_context("context of a tree", tile_borders()));
  return forests;
}

}  // namespace espalier::qualify
