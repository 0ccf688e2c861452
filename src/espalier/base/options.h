// SPDX-License-Identifier: Apache-2.0
// Options, each described once, beside the struct that it fills. Flags and their help, TOML keys, Python
// keyword arguments, range checks and the settings stored with a training run are made from the description.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "espalier/base/words.h"

namespace espalier {

/// How shells complete the value of an option.
enum class PathKind { kNone, kFile, kFolder };

/// What the help shows of an option.
struct OptionText {
  std::string value{};               // placeholder of the value, such as FILE; empty: it takes no value
  std::vector<std::string> words{};  // the accepted values, if they are words
  std::string default_value{};       // empty: none, or described in the help
  std::string help{};
  std::string group{};  // heading in the help
  PathKind path = PathKind::kNone;
  bool required = false;
  bool several = false;  // it takes one or more values
};

/// Groups that several modules use.
inline constexpr const char* kDataGroup = "Model and data";
inline constexpr const char* kMachineGroup = "Machine and precision";
inline constexpr const char* kOutputGroup = "Output";

enum class OptionKind { kFlag, kWhole, kReal, kText };

/// Properties of an option. NaN and infinity are never accepted.
struct OptionTraits {
  double least = std::numeric_limits<double>::lowest(), most = std::numeric_limits<double>::max();
  double above = -std::numeric_limits<double>::infinity(), below = std::numeric_limits<double>::infinity();
  bool bytes = false;       // a size such as 8GiB
  int64_t fewest_bare = 0;  // sizes: smaller numbers without a unit are refused: the unit was forgotten
  char letter = '\0';       // short name, such as o for -o
  std::string shown{};      // placeholder of the value: words separated by |, or a name in capitals
  PathKind path = PathKind::kNone;
  std::string group{};  // replaces the list's current group
  bool required = false;
  bool hidden = false;      // from help
  bool has_commas = false;  // a comma-separated list
  bool shows_default = true;
  std::string derived{};    // describes a default that depends on other options; runs store the actual value
  std::string excludes{};   // the name of an option that cannot be combined with it
  bool may_change = false;  // when a training run is resumed
  std::function<void(const std::string& text)> check{};  // throws InputError for invalid text
  std::function<void()> then{};                          // called after the option is set
};

/// Access to the variable that holds the value of an option.
struct OptionTarget {
  /// Sets a list from all texts, any other value from the last one. Throws InputError for invalid text.
  std::function<void(const std::vector<std::string>& texts, const OptionTraits& traits)> set;
  std::function<nlohmann::ordered_json()> value;  // the current value; null: none
};

class Option {
 public:
  /// The current value of `target` becomes the default.
  Option(const std::string& name, OptionKind kind, OptionTarget target, const std::string& help,
         OptionTraits traits = {});

  const std::string& name() const { return name_; }  // without dashes
  OptionKind kind() const { return kind_; }
  const OptionText& text() const { return text_; }
  const OptionTraits& traits() const { return traits_; }
  bool is_list() const { return text_.several || traits_.has_commas; }

  /// Throws InputError naming the option, the expected and the received value.
  void set(std::vector<std::string> texts);
  bool is_given() const { return !given_.empty(); }
  nlohmann::ordered_json value() const { return target_.value(); }
  /// The value as training runs store it: a number, a bool, text, a list of texts, or null for none.
  nlohmann::ordered_json kept() const;
  /// Throws InputError if the current value is a number out of range.
  void check() const;

 private:
  friend class OptionList;

  std::string name_;
  OptionKind kind_;
  OptionTarget target_;
  OptionText text_;
  OptionTraits traits_;
  std::string default_;
  std::vector<std::string> given_;
};

/// (name, text of the value) of options, in the order given.
using NamedTexts = std::vector<std::pair<std::string, std::string>>;

class OptionList {
 public:
  /// Sets the group of the options that are added from now on.
  void group(const std::string& name) { group_ = name; }

  /// `target` must outlive the list. Types: bool (a flag), int, int64_t, uint64_t, double, std::string,
  /// std::filesystem::path, or a vector of int32_t, double or std::string.
  template <class Target>
  void add(const std::string& name, Target* target, const std::string& help, OptionTraits traits = {});

  /// An option that accepts the given words. `target` is a Value or std::optional<Value>.
  template <class Target, class Value, size_t kCount>
  void add(const std::string& name, Target* target, const std::array<Word<Value>, kCount>& words,
           const std::string& help, OptionTraits traits = {});

  void add(Option option);

  const Option* find(const std::string& name) const;  // nullptr if absent
  const Option& at(const std::string& name) const;
  const std::deque<Option>& all() const { return options_; }
  std::vector<std::string> names() const;

  /// Sets options in the order of the list, not of the texts: an option that depends on another comes after
  /// it. Throws InputError like Option::set, and for options that exclude one another.
  void set(const NamedTexts& texts);

  /// The values of the options that must not change when a training run is resumed.
  nlohmann::ordered_json settings() const;
  void check() const;

  /// For each option: name, letter, kind ("flag", "whole", "real" or "text"), value (its placeholder), words,
  /// default, list, path ("file", "folder" or ""), required, hidden, group and help.
  nlohmann::ordered_json description() const;

 private:
  std::string group_ = "Options";
  std::deque<Option> options_;  // a deque keeps pointers to its elements valid
};

template <class Target, class Value, size_t kCount>
void OptionList::add(const std::string& name, Target* target, const std::array<Word<Value>, kCount>& words,
                     const std::string& help, OptionTraits traits) {
  const auto set = [=](const std::vector<std::string>& texts, const OptionTraits&) {
    *target = parse_word(words, name, texts.back());
  };
  const auto value = [=]() -> nlohmann::ordered_json {
    if constexpr (std::is_same_v<Target, Value>) {
      return word_of(words, *target);
    } else {
      return *target ? nlohmann::ordered_json(word_of(words, **target)) : nlohmann::ordered_json();
    }
  };
  for (const auto& word : words) {
    if (!traits.shown.empty()) traits.shown += '|';
    traits.shown += word.word;
  }
  add({name, OptionKind::kText, {set, value}, help, std::move(traits)});
}

}  // namespace espalier
