// SPDX-License-Identifier: Apache-2.0
#include "espalier/base/messages.h"

#include <memory>
#include <mutex>

namespace espalier {
namespace {

std::mutex listener_mutex;
std::shared_ptr<const Listener> current;  // nullptr: nobody listens

// A listener may wait for a lock that another thread holds while it sends a message, so none is held here
// during a call.
std::shared_ptr<const Listener> listener() {
  const std::lock_guard lock(listener_mutex);
  return current;
}

}  // namespace

void listen(Listener listener) {
  auto next = std::make_shared<const Listener>(std::move(listener));
  const std::lock_guard lock(listener_mutex);
  current.swap(next);
}

void send_line(const std::string& text) {
  if (const auto to = listener(); to && to->line) to->line(text);
}

void send_progress(const std::string& work, double fraction, const std::string& detail) {
  if (const auto to = listener(); to && to->progress) to->progress(work, fraction, detail);
}

void send_end() {
  if (const auto to = listener(); to && to->end) to->end();
}

}  // namespace espalier
