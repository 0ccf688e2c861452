// SPDX-License-Identifier: Apache-2.0
#include "espalier/plan/key_reads.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "espalier/base/check.h"
#include "espalier/plan/range_minimum.h"

namespace espalier {
namespace {

struct Range {
  int64_t begin, end;
};

/// Keys of one rank that the same queries see, all of them. Numbers are those of the whole micro-batches.
struct VisibleKeys {
  int64_t source;
  const TokenDivision* division;  // of the source
  int64_t owner;
  Range keys, queries;
  int64_t position;  // of the first key; the others follow on the path
};

struct AllKeys {
  std::vector<VisibleKeys> visible;
  int64_t own_source = 0;  // the number of ancestors
};

AllKeys all_keys(const DividedMicroBatch& batch) {
  AllKeys result;
  for (size_t b = 0; b < batch.context.size(); ++b) {
    const ContextBlock& block = batch.context[b];
    if (b > 0 && block.ancestor != batch.context[b - 1].ancestor) ++result.own_source;
    const TokenDivision& division = batch.divisions[block.ancestor];
    division.visit(block.column_begin, block.column_end, [&](int64_t owner, int64_t begin, int64_t end) {
      const int64_t position = block.position + begin - block.column_begin;
      result.visible.push_back(
          {result.own_source, &division, owner, {begin, end}, {block.row_begin, block.row_end}, position});
    });
  }
  if (!batch.context.empty()) ++result.own_source;
  const Layout& layout = batch.layout;
  for (int64_t run = 0; run < layout.num_runs(); ++run) {
    const int64_t run_begin = layout.run_begin[run], subtree_end = layout.subtree_end[run_begin];
    batch.own.visit(run_begin, layout.run_begin[run + 1], [&](int64_t owner, int64_t begin, int64_t end) {
      if (end == subtree_end) return;  // seen by one another alone
      result.visible.push_back({result.own_source,
                                &batch.own,
                                owner,
                                {begin, end},
                                {end, subtree_end},
                                layout.position_ids[begin]});
    });
  }
  return result;
}

/// What a rank reads, by owner: keys by their numbers on their owner, queries by those on the reader.
std::vector<VisibleKeys> read_by(int64_t rank, const AllKeys& all, const DividedMicroBatch& batch,
                                 int64_t window, int64_t chunk) {
  std::optional<RangeMinimum<int32_t>> least;  // of the positions of the rank's tokens
  if (window > 0 || chunk > 0) {
    std::vector<int32_t> positions;
    for (const int64_t token : batch.own.tokens(rank)) positions.push_back(batch.layout.position_ids[token]);
    least.emplace(positions);
  }
  std::vector<VisibleKeys> result;
  for (VisibleKeys each : all.visible) {
    if (each.source == all.own_source && each.owner == rank)
      continue;  // as the forest of its own tokens has it
    each.queries = {batch.own.before(rank, each.queries.begin), batch.own.before(rank, each.queries.end)};
    if (each.queries.begin == each.queries.end) continue;
    if (least) {
      const int64_t nearest = (*least)(each.queries.begin, each.queries.end);
      const int64_t in_window = window > 0 ? nearest - window + 1 : 0;
      const int64_t in_chunk = chunk > 0 ? nearest / chunk * chunk : 0;
      const int64_t skipped = std::max<int64_t>(0, std::max(in_window, in_chunk) - each.position);
      each.keys.begin += skipped;
      each.position += skipped;
      if (each.keys.begin >= each.keys.end) continue;
    }
    const int64_t size = each.keys.end - each.keys.begin;
    each.keys.begin = each.division->before(each.owner, each.keys.begin);
    each.keys.end = each.keys.begin + size;
    result.push_back(each);
  }
  std::ranges::stable_sort(result, {}, &VisibleKeys::owner);
  return result;
}

/// Sets blocks and positions.
void set_blocks(const std::vector<VisibleKeys>& read, int64_t rank, int64_t own_source, KeyReads* reads) {
  int64_t received = 0;
  for (const VisibleKeys& each : read) {
    const bool is_here = each.owner == rank;
    const int64_t size = each.keys.end - each.keys.begin;
    const int64_t begin = is_here ? each.keys.begin : received;
    if (!is_here) received += size;
    reads->blocks.insert(reads->blocks.end(), {is_here ? each.source : own_source, begin, begin + size,
                                               each.queries.begin, each.queries.end});
    reads->positions.push_back(each.position);
  }
}

}  // namespace

KeyReads key_reads(const DividedMicroBatch& batch, int64_t rank, int64_t window, int64_t chunk) {
  ESPALIER_CHECK(rank >= 0 && rank < batch.ranks, "rank: expected one of {}, received {}", batch.ranks, rank);
  ESPALIER_ASSERT(batch.layout.num_tokens() == batch.own.ranges().back().end);
  const AllKeys all = all_keys(batch);
  KeyReads reads{.send = std::vector<int64_t>(batch.ranks), .receive = std::vector<int64_t>(batch.ranks)};
  reads.picks.resize(all.own_source + 1);
  std::vector<std::pair<int64_t, int64_t>> sent;  // (source, number in its picks)
  for (int64_t reader = 0; reader < batch.ranks; ++reader) {
    const std::vector<VisibleKeys> read = read_by(reader, all, batch, window, chunk);
    if (reader == rank) set_blocks(read, rank, all.own_source, &reads);
    int64_t received = 0;
    for (const auto& [source, division, owner, keys, queries, position] : read) {
      if (owner == reader) continue;
      const int64_t size = keys.end - keys.begin;
      received += size;
      if (reader == rank) reads.receive[owner] += size;
      if (owner != rank) continue;
      reads.send[reader] += size;
      for (int64_t key = keys.begin; key < keys.end; ++key) {
        sent.emplace_back(source, std::ssize(reads.picks[source]));
        reads.picks[source].push_back(key);
      }
    }
    reads.most_received = std::max(reads.most_received, received);
  }
  if (std::ranges::is_sorted(sent)) return reads;
  std::vector<int64_t> before(reads.picks.size() + 1);  // picks of earlier sources
  for (size_t s = 0; s < reads.picks.size(); ++s) before[s + 1] = before[s] + std::ssize(reads.picks[s]);
  for (const auto& [source, pick] : sent) reads.order.push_back(before[source] + pick);
  return reads;
}

}  // namespace espalier
