// SPDX-License-Identifier: Apache-2.0
// Options, each described once, beside the struct that it fills. From the description come flags with their
// help, keys of TOML files, keyword arguments of Python, checks of values, and what a run keeps of them.
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

/// The file names that the value of an option may be completed to.
enum class PathKind { kNone, kFile, kFolder };

/// What users are told of an option.
struct OptionText {
  std::vector<std::string>
      names{};          // such as -o and --out, short ones first; none: an argument without a flag
  std::string value{};  // what stands for its value, such as FILE; empty: it takes none
  std::vector<std::string> words{};  // the values that it accepts, where they are words
  std::string default_value{};       // empty: none, or told by the help
  std::string help{};
  std::string group{};  // of options that stand together in the help
  PathKind path = PathKind::kNone;
  bool required = false;
  bool several = false;  // several values may follow it
};

/// Groups of options of several modules.
inline constexpr const char* kDataGroup = "Model and data";
inline constexpr const char* kMachineGroup = "Machine and precision";
inline constexpr const char* kOutputGroup = "Output";

enum class OptionKind { kFlag, kWhole, kReal, kText };

/// What else is known of an option. NaN and infinity are never accepted.
struct OptionTraits {
  double least = std::numeric_limits<double>::lowest(), most = std::numeric_limits<double>::max();
  double above = -std::numeric_limits<double>::infinity(), below = std::numeric_limits<double>::infinity();
  bool bytes = false;  // as text such as 8GiB; numbers without a unit below this many are refused, because
  int64_t fewest_bare = 0;  // it was forgotten
  char letter = '\0';       // of a short name, as in -o
  std::string shown{};      // for its value: words with | between them, others in capitals; or a name
  PathKind path = PathKind::kNone;
  std::string group{};  // where it is not that of the list
  bool required = false;
  bool hidden = false;        // from help
  bool stands_alone = false;  // an argument without a flag
  bool has_commas = false;    // a list in one text
  bool shows_default = true;
  std::string derived{};    // says how its default follows from other options; a run keeps the value in force
  std::string excludes{};   // the name of another option
  bool may_change = false;  // in a run that goes on
  std::function<void(const std::string& text)> check{};  // throws InputError for texts that are wrong
  std::function<void()> then{};                          // called once the option is set
};

/// Where the value of an option is kept.
struct OptionTarget {
  /// Throws InputError for texts that stand for no value. Of several the last one counts, but for lists.
  std::function<void(const std::vector<std::string>& texts, const OptionTraits& traits)> set;
  std::function<nlohmann::ordered_json()> value;  // the present one; null: none
};

class Option {
 public:
  /// Its default is the present value.
  Option(const std::string& name, OptionKind kind, OptionTarget target, const std::string& help,
         OptionTraits traits = {});

  const std::string& name() const { return name_; }  // without dashes
  OptionKind kind() const { return kind_; }
  const OptionText& text() const { return text_; }
  const OptionTraits& traits() const { return traits_; }
  bool is_list() const { return text_.several || traits_.has_commas; }

  /// Throws InputError naming the option, with what was expected and received.
  void set(std::vector<std::string> texts);
  bool is_given() const { return !given_.empty(); }
  nlohmann::ordered_json value() const { return target_.value(); }
  /// The value as a run keeps it: a number, true or false, text or a list of texts. Null: there is none.
  nlohmann::ordered_json kept() const;
  /// Throws InputError where the present value, a number, is out of range.
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

/// Names of options and texts of their values, in the order in which they were given.
using NamedTexts = std::vector<std::pair<std::string, std::string>>;

class OptionList {
 public:
  /// Options that are added from here on stand in this group.
  void group(const std::string& name) { group_ = name; }

  /// `target` has to live as long as the list: a bool, which is a flag, int, int64_t, uint64_t, double, text
  /// or path, or a list of int32_t, double or text.
  template <class Target>
  void add(const std::string& name, Target* target, const std::string& help, OptionTraits traits = {});

  /// One of a few words. `target` has their values, or is an optional of them.
  template <class Target, class Value, size_t kCount>
  void add(const std::string& name, Target* target, const std::array<Word<Value>, kCount>& words,
           const std::string& help, OptionTraits traits = {});

  /// Any other text.
  void add(Option option);

  const Option* find(const std::string& name) const;  // null: there is none
  const Option& at(const std::string& name) const;
  const std::deque<Option>& all() const { return options_; }
  std::vector<std::string> names() const;

  /// Sets options in the order of the list, whatever the order of the texts: those that follow from another
  /// option stand after it. Throws InputError as Option::set does, and for options that exclude one another.
  void set(const NamedTexts& texts);

  /// Option::value of those that may not change in a run that goes on.
  nlohmann::ordered_json settings() const;
  void check() const;

  /// [{"name", "kind": "flag" | "whole" | "real" | "text", "value", "words", "default", "list", "group",
  /// "help"}]
  nlohmann::ordered_json description() const;

 private:
  std::string group_ = "Options";
  std::deque<Option> options_;  // which stay where they are
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
