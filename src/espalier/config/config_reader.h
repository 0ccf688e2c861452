// SPDX-License-Identifier: Apache-2.0
// Typed look-ups in a config.json.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

namespace espalier {

// Upper limits of sizes, several times those of any existing model. A file with larger ones is broken, and
// allocating its tensors could exhaust memory. They also keep the number of parameters and bytes within 64
// bits.
inline constexpr int64_t kMostLayers = 4096;
inline constexpr int64_t kMostHeads = 4096;
inline constexpr int64_t kMostHeadDim = 16'384;
inline constexpr int64_t kMostHidden = int64_t{1} << 18;
inline constexpr int64_t kMostIntermediate = int64_t{1} << 20;
inline constexpr int64_t kMostExperts = 65'536;
inline constexpr int64_t kMostVocabulary = int64_t{1} << 24;
inline constexpr int64_t kMostConvolution = 8;  // taps of ops/causal_conv1d
inline constexpr int64_t kMostPositions = std::numeric_limits<int32_t>::max();

/// One JSON object. Every look-up throws InputError naming file, key, expected and received value. null
/// counts as absent.
class ConfigReader {
 public:
  /// `json` must outlive this object. `prefix` comes before the keys in messages.
  ConfigReader(const nlohmann::json& json, std::string file, std::string prefix = "");

  const nlohmann::json* find(const std::string& key) const;  // nullptr if absent
  bool has(const std::string& key) const { return json_.contains(key); }

  int64_t positive_integer(const std::string& key, int64_t largest,
                           std::optional<int64_t> otherwise = {}) const {
    return integer(key, 1, largest, otherwise);
  }
  int64_t integer_from_0(const std::string& key, int64_t largest, int64_t otherwise) const {
    return integer(key, 0, largest, otherwise);
  }
  double positive_number(const std::string& key, std::optional<double> otherwise = {}) const;
  double non_negative_number(const std::string& key) const;
  bool boolean(const std::string& key, bool otherwise) const;
  std::string text(const std::string& key) const;  // "" if absent
  /// Refuses another text than `value`; a key that is absent is allowed.
  void require_text(const std::string& key, const std::string& value) const;

  [[noreturn]] void refuse(const std::string& key, const std::string& expected) const;

  /// Throws InputError for a key that is not in `known`, the keys of these families.
  void refuse_other_keys(const std::vector<std::string_view>& known, const std::string& families) const;

  const std::string& file() const { return file_; }

 private:
  int64_t integer(const std::string& key, int64_t least, int64_t largest,
                  std::optional<int64_t> otherwise) const;

  const nlohmann::json& json_;
  std::string file_;
  std::string prefix_;
};

}  // namespace espalier
