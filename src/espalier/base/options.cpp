// SPDX-License-Identifier: Apache-2.0
#include "espalier/base/options.h"
#include "espalier/base/option_names.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <sstream>
#include <string_view>
#include <system_error>

#include "espalier/base/units.h"

namespace espalier {
namespace {

constexpr double kLowest = std::numeric_limits<double>::lowest(),
                 kHighest = std::numeric_limits<double>::max();

std::vector<std::string> parts(const std::string& text, char separator) {
  std::vector<std::string> all;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) all.push_back(part);
  return all;
}

bool is_in(double value, const OptionTraits& traits) {
  return value >= traits.least && value <= traits.most && value > traits.above && value < traits.below;
}

std::string expected(const OptionTraits& traits, bool is_whole, double received) {
  if (is_whole) {
    return received > traits.most ? fmt::format("a whole number of at most {:.0f}", traits.most)
                                  : fmt::format("a whole number of at least {:.0f}", traits.least);
  }
  if (std::isfinite(traits.below))
    return fmt::format("a number from {:g} to below {:g}", traits.least, traits.below);
  if (traits.most != kHighest) return fmt::format("a number from {:g} to {:g}", traits.least, traits.most);
  if (std::isfinite(traits.above)) return fmt::format("a finite number above {:g}", traits.above);
  return traits.least == kLowest ? "a finite number"
                                 : fmt::format("a finite number of at least {:g}", traits.least);
}

[[noreturn]] void refuse(const std::string& what, const std::string& received) {
  throw InputError(fmt::format("expected {}, received {}", what, received));
}

void read(const std::string& text, const OptionTraits& traits, double* value) {
  char* end = nullptr;
  const double number = std::strtod(text.c_str(), &end);
  const bool is_number =
      !text.empty() && end == text.c_str() + text.size() && std::isspace(text.front()) == 0;
  if (!is_number || !is_in(number, traits)) refuse(expected(traits, /*is_whole=*/false, number), text);
  *value = number;
}

// Plain decimal digits only, because 010 and 0x10 are ambiguous.
template <class Whole>
void read(const std::string& text, const OptionTraits& traits, Whole* value) {
  const std::string_view digits = std::string_view(text).substr(text.starts_with('-') ? 1 : 0);
  const bool is_plain = digits.size() == 1 || !digits.starts_with('0');
  const char* end = text.data() + text.size();
  Whole number = 0;
  const auto [last, error] = std::from_chars(text.data(), end, number);
  if (error == std::errc::result_out_of_range && last == end) {
    refuse(fmt::format("a whole number of at most {}", std::numeric_limits<Whole>::max()), text);
  }
  const bool is_number = error == std::errc() && last == end;
  if (!is_plain || (!is_number && traits.least == kLowest)) {
    refuse("a whole number in plain decimal digits", text);
  }
  const auto real = static_cast<double>(number);
  if (!is_number || !is_in(real, traits)) refuse(expected(traits, /*is_whole=*/true, real), text);
  *value = number;
}

void read(const std::string& text, const OptionTraits&, bool* value) {
  constexpr auto kWords = std::to_array<Word<bool>>({{"true", true},
                                                     {"false", false},
                                                     {"1", true},
                                                     {"0", false},
                                                     {"yes", true},
                                                     {"no", false},
                                                     {"on", true},
                                                     {"off", false}});
  if (!has_word(kWords, text)) refuse("true or false", text);
  *value = parse_word(kWords, "", text);
}

void read(const std::string& text, const OptionTraits&, std::string* value) {
  *value = text;
}

void read(const std::string& text, const OptionTraits&, std::filesystem::path* value) {
  *value = text;
}

template <class Target>
struct Element {
  using Type = Target;
  static constexpr bool kIsList = false;
};
template <class Item>
struct Element<std::vector<Item>> {
  using Type = Item;
  static constexpr bool kIsList = true;
};

template <class Value>
constexpr OptionKind kind_of() {
  if (std::is_same_v<Value, bool>) return OptionKind::kFlag;
  if (std::is_integral_v<Value>) return OptionKind::kWhole;
  return std::is_floating_point_v<Value> ? OptionKind::kReal : OptionKind::kText;
}

std::string plain_text(const nlohmann::ordered_json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_number_float()) return fmt::format("{:g}", value.get<double>());
  if (value.is_number()) return value.dump();
  std::vector<std::string> texts;
  if (value.is_array()) std::ranges::transform(value, std::back_inserter(texts), plain_text);
  return fmt::format("{}", fmt::join(texts, ","));
}

// Values of text options stay text even if they look like numbers ("007"), and so do lists of numbers.
nlohmann::ordered_json typed(OptionKind kind, const std::string& text) {
  if (kind == OptionKind::kText) return text;
  int64_t whole = 0;
  const char* end = text.data() + text.size();
  const auto [last, error] = std::from_chars(text.data(), end, whole);
  if (error == std::errc() && last == end) return whole;
  if (kind == OptionKind::kWhole) return text;  // beyond 63 bits
  char* stop = nullptr;
  const double real = std::strtod(text.c_str(), &stop);
  return stop == end ? nlohmann::ordered_json(real) : nlohmann::ordered_json(text);
}

std::string bytes_of(const std::string& text, int64_t fewest_bare) {
  const std::optional<int64_t> bytes = parse_bytes(text);
  if (!bytes) refuse("a size such as 8GiB or 500MB", text);
  const bool without_unit = std::isdigit(static_cast<unsigned char>(text.back())) != 0;
  ESPALIER_CHECK(!without_unit || *bytes == 0 || *bytes >= fewest_bare,
                 "expected a size with its unit, such as {0}GiB or {0}MB, received {0}, which is {1}", text,
                 count_of(*bytes, "byte", "bytes"));
  return std::to_string(*bytes);
}

// Capital letters are placeholders, such as N in cuda:N.
bool is_literal(const std::string& text) {
  return !text.empty() &&
         std::ranges::none_of(text, [](unsigned char c) { return std::isupper(c) || std::isspace(c); });
}

}  // namespace

Option::Option(const std::string& name, OptionKind kind, OptionTarget target, const std::string& help,
               OptionTraits traits)
    : name_(name), kind_(kind), target_(std::move(target)), traits_(std::move(traits)) {
  constexpr std::array kShown{"", "N", "X", "TEXT"};
  if (traits_.shows_default) default_ = plain_text(target_.value());
  text_ = {.default_value = default_,
           .help = help,
           .group = traits_.group,
           .path = traits_.path,
           .required = traits_.required};
  text_.value = !traits_.shown.empty()            ? traits_.shown
                : text_.path == PathKind::kFile   ? "FILE"
                : text_.path == PathKind::kFolder ? "DIR"
                : traits_.bytes                   ? "SIZE"
                                                  : kShown.at(static_cast<size_t>(kind));
  if (traits_.has_commas) text_.value += ",...";
  if (traits_.shown.find('|') != std::string::npos) text_.words = parts(traits_.shown, '|');
  std::erase_if(text_.words, [](const std::string& word) { return !is_literal(word); });
  if (traits_.bytes && default_ != "0") text_.default_value = human_bytes(std::stod(default_));
  if (!traits_.derived.empty()) text_.default_value = traits_.derived;
}

void Option::set(std::vector<std::string> texts) {
  if (traits_.has_commas) texts = parts(fmt::format("{}", fmt::join(texts, ",")), ',');
  try {
    for (std::string& text : texts) {
      if (traits_.bytes) text = bytes_of(text, traits_.fewest_bare);
      if (traits_.check) traits_.check(text);
    }
    target_.set(texts, traits_);
    if (traits_.then) traits_.then();
  } catch (const InputError& error) {
    const std::string_view fault = error.what();
    throw InputError(fault.starts_with(named(name_) + ": ") ? std::string(fault)
                     : fault.starts_with(name_ + ": ")
                         ? named(name_) + std::string(fault.substr(name_.size()))
                         : fmt::format("{}: {}", named(name_), fault));
  }
  given_ = std::move(texts);
}

nlohmann::ordered_json Option::kept() const {
  if (!traits_.derived.empty() || kind_ == OptionKind::kFlag) return value();
  if (text_.several && given_.size() > 1) return given_;
  if (!given_.empty()) return typed(kind_, fmt::format("{}", fmt::join(given_, ",")));
  return default_.empty() ? nlohmann::ordered_json() : typed(kind_, default_);
}

void Option::check() const {
  const nlohmann::ordered_json present = value();
  if (!present.is_number() || (kind_ != OptionKind::kWhole && kind_ != OptionKind::kReal)) return;
  const auto number = present.get<double>();
  ESPALIER_CHECK(is_in(number, traits_), "{}: expected {}, received {}", named(name_),
                 expected(traits_, kind_ == OptionKind::kWhole, number), number);
}

template <class Target>
void OptionList::add(const std::string& name, Target* target, const std::string& help, OptionTraits traits) {
  using Value = typename Element<Target>::Type;
  const auto set = [target](const std::vector<std::string>& texts, const OptionTraits& traits) {
    if constexpr (Element<Target>::kIsList) {
      Target values;
      for (const std::string& text : texts) read(text, traits, &values.emplace_back());
      *target = std::move(values);
    } else {
      read(texts.back(), traits, target);
    }
  };
  const auto value = [target]() -> nlohmann::ordered_json {
    if constexpr (std::is_same_v<Target, std::filesystem::path>) {
      return target->string();
    } else {
      return *target;
    }
  };
  Option option(name, kind_of<Value>(), {set, value}, help, std::move(traits));
  option.text_.several = Element<Target>::kIsList && !option.traits_.has_commas;
  add(std::move(option));
}

template void OptionList::add(const std::string&, bool*, const std::string&, OptionTraits);
template void OptionList::add(const std::string&, int*, const std::string&, OptionTraits);
template void OptionList::add(const std::string&, int64_t*, const std::string&, OptionTraits);
template void OptionList::add(const std::string&, uint64_t*, const std::string&, OptionTraits);
template void OptionList::add(const std::string&, double*, const std::string&, OptionTraits);
template void OptionList::add(const std::string&, std::string*, const std::string&, OptionTraits);
template void OptionList::add(const std::string&, std::filesystem::path*, const std::string&, OptionTraits);
template void OptionList::add(const std::string&, std::vector<int32_t>*, const std::string&, OptionTraits);
template void OptionList::add(const std::string&, std::vector<double>*, const std::string&, OptionTraits);
template void OptionList::add(const std::string&, std::vector<std::string>*, const std::string&,
                              OptionTraits);

void OptionList::add(Option option) {
  if (option.text_.group.empty()) option.text_.group = group_;
  options_.push_back(std::move(option));
}

const Option* OptionList::find(const std::string& name) const {
  const auto found = std::ranges::find(options_, name, &Option::name);
  return found == options_.end() ? nullptr : &*found;
}

const Option& OptionList::at(const std::string& name) const {
  const Option* option = find(name);
  ESPALIER_ASSERT(option != nullptr);
  return *option;
}

std::vector<std::string> OptionList::names() const {
  std::vector<std::string> names;
  names.reserve(options_.size());
  for (const Option& option : options_) names.push_back(option.name());
  return names;
}

void OptionList::set(const NamedTexts& texts) {
  for (Option& option : options_) {
    std::vector<std::string> values;
    for (const auto& [name, text] : texts) {
      if (name == option.name()) values.push_back(text);
    }
    if (!values.empty()) option.set(std::move(values));
  }
  for (const Option& option : options_) {
    const std::string& other = option.traits().excludes;
    ESPALIER_CHECK(other.empty() || !option.is_given() || !at(other).is_given(),
                   "{}: cannot be combined with {}", named(option.name()), named(other));
  }
}

nlohmann::ordered_json OptionList::settings() const {
  auto settings = nlohmann::ordered_json::object();
  for (const Option& option : options_) {
    if (!option.traits().may_change) settings[option.name()] = option.value();
  }
  return settings;
}

void OptionList::check() const {
  for (const Option& option : options_) option.check();
}

nlohmann::ordered_json OptionList::description() const {
  constexpr std::array kKinds{"flag", "whole", "real", "text"};
  constexpr std::array kPaths{"", "file", "folder"};
  auto all = nlohmann::ordered_json::array();
  for (const Option& option : options_) {
    const OptionText& text = option.text();
    all.push_back({{"name", option.name()},
                   {"letter", std::string(option.traits().letter != '\0', option.traits().letter)},
                   {"kind", kKinds.at(static_cast<size_t>(option.kind()))},
                   {"value", text.value},
                   {"words", text.words},
                   {"default", text.default_value},
                   {"list", option.is_list()},
                   {"path", kPaths.at(static_cast<size_t>(text.path))},
                   {"required", text.required},
                   {"hidden", option.traits().hidden},
                   {"group", text.group},
                   {"help", text.help}});
  }
  return all;
}

}  // namespace espalier
