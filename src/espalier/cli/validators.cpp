// SPDX-License-Identifier: Apache-2.0
#include "espalier/cli/validators.h"

#include <fmt/format.h>

#include <cctype>
#include <charconv>
#include <optional>
#include <string_view>
#include <system_error>

#include "espalier/base/units.h"

namespace espalier::cli {

CLI::Validator byte_size(int64_t fewest_bare) {
  return CLI::Validator(
      [=](std::string& text) {
        const std::optional<int64_t> bytes = parse_bytes(text);
        if (!bytes) return fmt::format("expected a size such as 8GiB or 500MB, received {}", text);
        const bool without_unit = std::isdigit(static_cast<unsigned char>(text.back())) != 0;
        if (without_unit && *bytes > 0 && *bytes < fewest_bare) {
          return fmt::format(
              "expected a size with its unit, such as {0}GiB or {0}MB, received {0}, which is {1}", text,
              count_of(*bytes, "byte", "bytes"));
        }
        text = std::to_string(*bytes);
        return std::string();
      },
      "SIZE");
}

CLI::Validator whole_from(int64_t low) {
  return CLI::Validator(
      [=](std::string& text) {
        int64_t value = 0;
        if (CLI::detail::lexical_cast(text, value) && value >= low) return std::string();
        return fmt::format("expected a whole number of at least {}, received {}", low, text);
      },
      fmt::format("INT >= {}", low));
}

namespace {

template <class T>
std::string decimal_fault(const std::string& text) {
  const std::string_view digits = std::string_view(text).substr(text.starts_with('-') ? 1 : 0);
  T value = 0;
  const auto [last, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc() && last == text.data() + text.size() && (digits.size() == 1 || digits[0] != '0'))
    return "";
  if (error == std::errc::result_out_of_range) {
    return fmt::format("expected a whole number of at most {}, received {}", std::numeric_limits<T>::max(),
                       text);
  }
  return fmt::format("expected a whole number in plain decimal digits, received {}", text);
}

}  // namespace

void require_decimal_numbers(CLI::App* command) {
  for (CLI::Option* option : command->get_options()) {
    const std::string type = option->get_type_name();
    if (type.find("SIZE") != std::string::npos) continue;  // 8GiB
    std::function<std::string(const std::string&)> fault;
    if (type.starts_with("INT")) fault = decimal_fault<int64_t>;
    if (type.starts_with("UINT")) fault = decimal_fault<uint64_t>;
    if (fault) option->check(fault);
  }
}

namespace {

// CLI11's own ranges let NaN through.
CLI::Validator real_in(double low, double high, bool closed) {
  const bool bounded = high < std::numeric_limits<double>::max();
  const std::string range = !bounded ? fmt::format("FLOAT >= {:g}", low)
                                     : fmt::format("FLOAT in [{:g}, {:g}{}", low, high, closed ? "]" : ")");
  return CLI::Validator(
      [=](std::string& text) {
        double value = 0;
        const bool number = CLI::detail::lexical_cast(text, value);
        if (number && value >= low && (closed ? value <= high : value < high)) return std::string();
        return fmt::format("expected {}, received {}", range, text);
      },
      range);
}

}  // namespace

CLI::Validator real_from(double low, double high) {
  return real_in(low, high, /*closed=*/true);
}

CLI::Validator real_below(double low, double high) {
  return real_in(low, high, /*closed=*/false);
}

}  // namespace espalier::cli
