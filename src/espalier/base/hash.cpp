// SPDX-License-Identifier: Apache-2.0
#include "espalier/base/hash.h"

#include <fcntl.h>
#include <unistd.h>
#include <xxhash.h>

#include <cerrno>
#include <new>
#include <system_error>
#include <vector>

#include "espalier/base/check.h"

namespace espalier {

struct Hasher::State {
  XXH3_state_t* xxh = XXH3_createState();
  State() {
    if (xxh == nullptr) throw std::bad_alloc();
    ESPALIER_ASSERT(XXH3_128bits_reset(xxh) == XXH_OK);
  }
  ~State() { XXH3_freeState(xxh); }
  State(const State&) = delete;
  State& operator=(const State&) = delete;
};

Hasher::Hasher() : state_(std::make_unique<State>()) {}
Hasher::~Hasher() = default;

void Hasher::add(std::span<const std::byte> bytes) {
  ESPALIER_ASSERT(XXH3_128bits_update(state_->xxh, bytes.data(), bytes.size()) == XXH_OK);
}

std::string Hasher::digits() const {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(state_->xxh));
  std::string text;
  for (const unsigned char byte : canonical.digest) text += fmt::format("{:02x}", byte);
  return text;
}

std::string hash_file(const std::filesystem::path& path) {
  // Reading a file that shrinks ends early; reading a mapping of it would raise SIGBUS.
  const auto check = [&](bool fine) {
    ESPALIER_CHECK(fine, "cannot read {}: {}", path.string(), std::generic_category().message(errno));
  };
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  check(descriptor >= 0);
  const struct Closer {
    int descriptor;
    ~Closer() { ::close(descriptor); }
  } closer{descriptor};
  Hasher hasher;
  std::vector<std::byte> block(size_t{1} << 20);
  while (true) {
    const ssize_t count = ::read(descriptor, block.data(), block.size());
    if (count < 0 && errno == EINTR) continue;
    check(count >= 0);
    if (count == 0) return hasher.digits();
    hasher.add(std::span(block).first(static_cast<size_t>(count)));
  }
}

}  // namespace espalier
