// SPDX-License-Identifier: Apache-2.0
#include "espalier/base/log_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "espalier/base/file.h"
#include "espalier/base/open_file.h"

namespace espalier {
namespace {

constexpr size_t kMaxWaitingBytes = size_t{16} << 20;

}  // namespace

LogFile::~LogFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void LogFile::append(std::string record) {
  if (waiting_bytes_ + record.size() > kMaxWaitingBytes) {
    ++num_dropped_;
  } else {
    waiting_bytes_ += record.size();
    waiting_.push_back(std::move(record));
  }
  while (!waiting_.empty()) {
    if (!write_front()) return;
    waiting_bytes_ -= waiting_.front().size();
    waiting_.pop_front();
    front_written_ = 0;
  }
  failure_.clear();
}

bool LogFile::close_if_removed() {
  if (descriptor_ < 0 || still_names(path_, descriptor_)) return false;
  ::close(std::exchange(descriptor_, -1));
  front_written_ = 0;
  return true;
}

bool LogFile::write_front() {
  if (descriptor_ < 0) {
    descriptor_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (descriptor_ < 0) {
      failure_ = system_message(errno);
      return false;
    }
  }
  const std::string& record = waiting_.front();
  while (front_written_ < record.size()) {
    const ssize_t written =
        ::write(descriptor_, record.data() + front_written_, record.size() - front_written_);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) {
      failure_ = system_message(errno);
      return false;
    }
    front_written_ += static_cast<size_t>(written);
  }
  return true;
}

}  // namespace espalier
