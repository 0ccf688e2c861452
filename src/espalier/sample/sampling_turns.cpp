// SPDX-License-Identifier: Apache-2.0
// Whose turn it is: which prompts of which client are encoded and begin, and what goes on after a failure.
#include <algorithm>
#include <iterator>
#include <map>
#include <unordered_set>
#include <utility>

#include "espalier/sample/sampling.h"
#include "espalier/sample/sampling_state.h"

namespace espalier {
namespace {

constexpr int64_t kSharedPassTokens = 512;  // of a pass while other clients wait for its end
constexpr int64_t kLeastShare = 64;         // tokens of a client in a pass of several
constexpr int64_t kMostPauses = 16;         // of a sequence, after which it fails
constexpr int64_t kMostReturns = 4;         // of the room of a prompt, after which it fails
constexpr int64_t kCalmSteps = 64;          // after a failure, until more sequences are tried

}  // namespace

// All clients, another one first each time. `last`: the one that was first the last time.
std::vector<std::pair<int64_t, Sampling::Client*>> Sampling::in_turn(int64_t* last) {
  std::vector<std::pair<int64_t, Client*>> turns;
  for (auto& [id, client] : clients_) turns.emplace_back(id, &client);
  std::ranges::rotate(turns, std::ranges::upper_bound(turns, *last, {}, &decltype(turns)::value_type::first));
  if (!turns.empty()) *last = turns.front().first;
  return turns;
}

std::map<int64_t, int64_t> Sampling::live_by_client() const {
  std::map<int64_t, int64_t> live;
  for (const Sequence& each : live_) ++live[each.prompt->client];
  return live;
}

// Sequences of a client in a step.
int64_t Sampling::share() const {
  const int64_t places = std::min(batch_size_, places_), clients = std::max<int64_t>(1, std::ssize(clients_));
  return (places + clients - 1) / clients;
}

// Gives prompts room in their turn, as long as what is held for their client has few enough tokens.
void Sampling::admit() {
  for (auto& [id, client] : clients_) {
    if (client.waiting.empty()) continue;
    std::unordered_set<const PrefixNode*> held;
    int64_t tokens = 0;
    const auto hold = [&](const Prompt& prompt) {
      const PrefixNode* node = prompt.prefix.get();
      for (; !node->is_root() && held.insert(node).second; node = node->parent.get()) tokens += node->size();
    };
    for (const auto* prompts : {&client.encoding, &client.ready}) {
      for (const auto& prompt : *prompts) hold(*prompt);
    }
    for (const Sequence& sequence : live_) {
      if (sequence.prompt->client == id) hold(*sequence.prompt);
    }
    for (; !client.waiting.empty(); client.waiting.pop_front()) {
      Prompt& next = *client.waiting.front();
      const bool is_first = held.empty();
      const Prefix root = memory_.tree->root(next.weights.number);
      next.prefix = memory_.tree->add(root, next.tokens, std::min(pass_tokens_, token_budget_));
      hold(next);
      if (tokens > token_budget_ / std::ssize(clients_) && !is_first) {
        next.prefix.reset();
        break;
      }
      if (!next.paused && next.returns == 0) {
        next.kept_tokens = next.prefix->end();
        for (const Prefix& node : next.unencoded(*memory_.tree)) next.kept_tokens -= node->size();
        memory_.counts->kept_prompt_tokens += next.kept_tokens;
      }
      client.encoding.push_back(std::move(client.waiting.front()));
    }
  }
}

// Clients whose sequences are sampled get as much time as those whose prompts are encoded.
bool Sampling::encodes_now() {
  int64_t encoding = 0, sampled = 0;
  const std::map<int64_t, int64_t> live = live_by_client();
  for (const auto& [id, client] : clients_) {
    if (!client.encoding.empty()) {
      ++encoding;
    } else if (live.contains(id)) {
      ++sampled;
    }
  }
  if (encoding == 0 || sampled == 0) {
    encoded_seconds_ = decoded_seconds_ = 0;
    return encoding > 0;
  }
  return encoded_seconds_ * static_cast<double>(sampled) <= decoded_seconds_ * static_cast<double>(encoding);
}

struct Sampling::Pass {
  struct Entry {
    Prefix node;
    const Prompt* prompt;
  };
  std::map<std::pair<int64_t, std::vector<int32_t>>, Entry> by_path{};  // of each weights; which is preorder
  std::unordered_set<const PrefixNode*> nodes{};
  std::vector<std::shared_ptr<Prompt>> prompts{};
  int64_t tokens = 0;
  bool is_scored = false;
};

// Takes prompts of a client with at most `room` tokens, or the first of one that has more. Shared ones count
// once.
void Sampling::take(const Client& client, int64_t room, Pass* pass) {
  int64_t tokens = 0;
  for (const std::shared_ptr<Prompt>& prompt : client.encoding) {
    if (prompt->is_alone && !pass->prompts.empty()) return;
    pass->is_scored |= prompt->options.prompt_logprobs;
    pass->prompts.push_back(prompt);
    for (Prefix node : prompt->unencoded(*memory_.tree)) {
      if (pass->nodes.contains(node.get())) continue;
      if (tokens > 0 && tokens + node->size() > room) return;
      if (node->size() > room && !node->is_encoded()) node = memory_.tree->divide(node, room);
      tokens += node->size();
      pass->tokens += node->size();
      pass->nodes.insert(node.get());
      const auto path = prompt->tokens.begin() + node->end();
      pass->by_path[{prompt->weights.number, {prompt->tokens.begin(), path}}] = {node, prompt.get()};
      if (tokens >= room) return;
    }
    if (prompt->is_alone) return;
  }
}

void Sampling::encode_some() {
  std::vector<Client*> clients;
  for (const auto& [id, client] : in_turn(&first_encoded_)) {
    if (!client->encoding.empty()) clients.push_back(client);
  }
  const int64_t limit = clients_.size() > 1 ? std::min(pass_tokens_, kSharedPassTokens) : pass_tokens_;
  const int64_t most = std::min(limit, token_budget_), count = std::ssize(clients);
  const int64_t each = count == 1 ? most : std::max(kLeastShare, most / count);
  Pass pass;
  for (const Client* client : clients) {
    if (pass.tokens >= most || (!pass.prompts.empty() && pass.prompts.front()->is_alone)) break;
    take(*client, std::min(each, most - pass.tokens), &pass);
  }
  std::vector<Prefix> nodes;
  std::vector<accumulating::AdapterMapsPtr> adapters;
  for (const auto& [path, entry] : pass.by_path) {
    nodes.push_back(entry.node);
    adapters.push_back(entry.prompt->weights.adapter);
  }
  const std::exception_ptr error = error_of([&] {
    if (!nodes.empty()) encode(decoder_, nodes, adapters, pass.is_scored, memory_.tree.get());
  });
  if (error) {
    // Each is tried again by itself, so that one that cannot be encoded fails alone.
    nodes.clear();
    pass.by_path.clear();
    if (pass.prompts.size() == 1 && pass.prompts.front()->is_alone) fail(*pass.prompts.front(), error);
    for (const auto& prompt : pass.prompts) prompt->is_alone = true;
    pass.prompts.clear();
    memory_.tree->drop_unused();
    return;
  }
  memory_.counts->encoded_prompt_tokens += pass.tokens;
  memory_.tree->trim();
  for (Client* client : clients) {
    while (!client->encoding.empty() && client->encoding.front()->unencoded(*memory_.tree).empty()) {
      client->ready.push_back(std::move(client->encoding.front()));
      client->encoding.pop_front();
    }
  }
}

// Of each client in turn, until it has its share or nothing that is ready. Paused ones are live at once.
std::vector<Sampling::Sequence> Sampling::next_sequences() {
  std::vector<Sequence> sequences;
  std::map<int64_t, int64_t> places = live_by_client();
  const int64_t most = share();
  const auto turns = in_turn(&first_begun_);
  for (bool is_full = false; !is_full;) {
    is_full = true;
    for (const auto& [id, client] : turns) {
      if (client->ready.empty() || places[id] >= most) continue;
      is_full = false;
      ++places[id];
      const std::shared_ptr<Prompt> prompt = client->ready.front();
      if (const std::shared_ptr<Sequence> paused = std::exchange(prompt->paused, nullptr)) {
        client->ready.pop_front();
        paused->prompt = prompt;
        if (paused->completion.tokens.empty()) {
          sequences.push_back(std::move(*paused));
        } else {
          go_live(std::move(*paused));
        }
        continue;
      }
      const int64_t sample = prompt->begun++;
      if (prompt->begun == prompt->options.samples) client->ready.pop_front();
      memory_.counts->flat_prompt_tokens += prompt->prefix->end();
      sequences.push_back({{.row = prompt->row, .sample = sample, .kept_tokens = prompt->kept_tokens},
                           prompt,
                           Rng(prompt->options.seed, (static_cast<uint64_t>(prompt->place) << 32) |
                                                         static_cast<uint64_t>(sample))});
    }
  }
  return sequences;
}

// Takes sequences out of the live ones, those of clients that have more than their share: the last that had a
// turn.
std::vector<Sampling::Sequence> Sampling::take_resting() {
  std::map<int64_t, std::vector<int64_t>> steps;  // by client
  for (const Sequence& each : live_) steps[each.prompt->client].push_back(each.stepped);
  const int64_t most = share();
  std::map<int64_t, std::pair<int64_t, int64_t>>
      last;  // step with which one may go on, and how many of that step
  for (auto& [id, own] : steps) {
    if (std::ssize(own) <= most) continue;
    std::ranges::sort(own);
    last[id] = {own[most - 1], std::ranges::count(own.begin(), own.begin() + most, own[most - 1])};
  }
  std::vector<Sequence> active, resting;
  for (Sequence& each : live_) {
    const auto limit = last.find(each.prompt->client);
    const bool goes_on = limit == last.end() || each.stepped < limit->second.first ||
                         (each.stepped == limit->second.first && limit->second.second-- > 0);
    (goes_on ? active : resting).push_back(std::move(each));
  }
  live_ = std::move(active);
  return resting;
}

// Takes room back from prompts of which samples have not begun. Returns whether there were any. One that
// comes back too often is what has no room.
bool Sampling::take_room_back(const std::exception_ptr& error) {
  std::vector<std::shared_ptr<Prompt>> returned, failed;
  for (auto& [id, client] : clients_) {
    for (auto* prompts : {&client.encoding, &client.ready}) {
      for (; !prompts->empty(); prompts->pop_back()) {
        const std::shared_ptr<Prompt>& prompt = prompts->back();
        prompt->prefix.reset();
        client.waiting.push_front(prompt);
        returned.push_back(prompt);
        if (++prompt->returns > kMostReturns) failed.push_back(prompt);
      }
    }
  }
  for (const auto& prompt : failed) fail(*prompt, error);
  return !returned.empty();
}

// After a pass that failed: sequences wait for their turn again, fewer at a time. What they have sampled
// stays, and is encoded with their prompts. One that fails by itself, or too often, is what fails.
void Sampling::pause(std::vector<Sequence> sequences, const std::exception_ptr& error) {
  const bool is_alone = !take_room_back(error) && sequences.size() == 1 && live_.empty();
  if (live_.empty()) {
    tails_ = {};
    places_ = is_alone ? batch_size_ : std::max<int64_t>(1, std::ssize(sequences) / 2);
    calm_steps_ = 0;
  }
  std::vector<std::shared_ptr<Prompt>> failed;
  for (auto sequence = sequences.rbegin(); sequence != sequences.rend(); ++sequence) {
    const auto prompt = std::make_shared<Prompt>(*sequence->prompt);
    prompt->prefix.reset();
    std::vector<int32_t>& tokens = sequence->completion.tokens;
    if (std::ssize(tokens) > prompt->folded + 1) sequence->pauses = 0;  // it has got further since
    if (!tokens.empty()) {
      prompt->tokens.insert(prompt->tokens.end(), tokens.begin() + prompt->folded, tokens.end() - 1);
      prompt->folded = std::ssize(tokens) - 1;
    }
    const bool fails = ++sequence->pauses > (is_alone ? 1 : kMostPauses);
    sequence->slot = -1;
    sequence->last.reset();
    sequence->prompt.reset();
    prompt->paused = std::make_shared<Sequence>(std::move(*sequence));
    clients_[prompt->client].waiting.push_front(prompt);
    if (fails) failed.push_back(prompt);
  }
  sequences.clear();
  memory_.tree->drop_unused();
  for (const auto& prompt : failed) fail(*prompt, error);
}

void Sampling::have_more_places() {
  if (places_ >= batch_size_) return;
  if (live_.empty()) {
    places_ = batch_size_;
  } else if (++calm_steps_ >= kCalmSteps) {
    places_ *= 2;
    calm_steps_ = 0;
  }
}

// Takes a prompt away. Returns the numbers of its samples that were not done.
std::vector<int64_t> Sampling::end(int64_t row, int64_t client) {
  std::vector<int64_t> samples;
  Client& own = clients_[client];
  for (auto* prompts : {&own.waiting, &own.encoding, &own.ready}) {
    std::erase_if(*prompts, [&](const auto& each) {
      if (each->row != row) return false;
      if (each->paused) {
        samples.push_back(each->paused->completion.sample);
      } else {
        for (int64_t sample = each->begun; sample < each->options.samples; ++sample)
          samples.push_back(sample);
      }
      return true;
    });
  }
  std::erase_if(live_, [&](const Sequence& each) {
    if (each.prompt->row != row) return false;
    samples.push_back(each.completion.sample);
    tails_.free_slots.push_back(each.slot);
    return true;
  });
  if (live_.empty()) tails_ = {};
  memory_.tree->trim();
  return samples;
}

int64_t Sampling::remove(int64_t row, int64_t client) {
  const int64_t ended = std::ssize(end(row, client));
  forget_idle_clients();
  return ended;
}

// Ends all completions of a prompt with an error.
void Sampling::fail(const Prompt& prompt, const std::exception_ptr& error) {
  const int64_t row = prompt.row;  // the prompt may go
  for (const int64_t sample : end(row, prompt.client))
    done_.push_back({.row = row, .sample = sample, .error = error});
}

// Sequences that have an error are no longer live.
void Sampling::fail_broken(const std::vector<Sequence>& sequences) {
  for (const Sequence& each : sequences) {
    if (!each.completion.error) continue;
    done_.push_back(
        {.row = each.prompt->row, .sample = each.completion.sample, .error = each.completion.error});
    fail(*each.prompt, each.completion.error);
  }
}

void Sampling::forget_idle_clients() {
  const std::map<int64_t, int64_t> live = live_by_client();
  std::erase_if(clients_,
                [&](const auto& each) { return each.second.is_empty() && !live.contains(each.first); });
}

}  // namespace espalier
