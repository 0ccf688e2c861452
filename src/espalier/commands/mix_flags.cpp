// SPDX-License-Identifier: Apache-2.0
#include "espalier/commands/mix_flags.h"

#include <algorithm>

#include "espalier/base/check.h"
#include "espalier/commands/command.h"
#include "espalier/commands/config_text.h"
#include "espalier/data/builder.h"

namespace espalier::commands {
namespace {

struct SourceTable {
  MixSource source;
  std::vector<std::string> data;
  nlohmann::ordered_json options = nlohmann::ordered_json::object();  // given flags of the objective
  nlohmann::ordered_json derived = nlohmann::ordered_json::object();  // those with derived defaults
};

std::vector<std::string> texts_of(const nlohmann::ordered_json& value) {
  if (value.is_string()) return {value.get<std::string>()};
  std::vector<std::string> texts;
  for (const auto& element : value) {
    if (!value.is_array() || !element.is_string()) return {};
    texts.push_back(element.get<std::string>());
  }
  return texts;
}

std::string option_text(const nlohmann::ordered_json& value) {
  return value.is_string() ? value.get<std::string>() : value.dump();
}

/// Sets the options as the command line would.
void set_objective(SourceTable* table) {
  OptionList list;
  add_objective_options(&table->source.objective, &list);
  NamedTexts texts;
  for (const auto& [key, value] : table->options.items()) {
    ESPALIER_CHECK(list.find(key) != nullptr,
                   "unknown key `{}`: expected name, data, weight or a flag of objectives (see --help)", key);
    ESPALIER_CHECK(!value.is_structured(), "key `{}`: expected one value, received a list", key);
    texts.emplace_back(key, option_text(value));
  }
  list.set(texts);
  check_objective_options(table->source.objective);
  for (const Option& option : list.all()) {
    if (!option.traits().derived.empty()) table->derived[option.name()] = option.kept();
  }
}

SourceTable parse_table(const FileTable& given) {
  SourceTable table;
  const auto& values = given.values;
  const std::string objective =
      values.contains("objective") ? option_text(values["objective"]) : std::string("without an objective");
  table.source.name = values.contains("name") ? option_text(values["name"]) : objective;
  try {
    for (const char* needed : {"data", "objective"}) {
      ESPALIER_CHECK(values.contains(needed), "expected the key `{}`, received a table without it", needed);
    }
    for (const auto& [raw_key, value] : values.items()) {
      std::string key = raw_key;
      std::replace(key.begin(), key.end(), '_', '-');
      if (key == "name") {
        ESPALIER_CHECK(value.is_string(), "key `name`: expected text, received {}", value.dump());
      } else if (key == "data") {
        table.data = texts_of(value);
        ESPALIER_CHECK(!table.data.empty(), "key `data`: expected a file or a list of files, received {}",
                       value.dump());
      } else if (key == "weight") {
        ESPALIER_CHECK(value.is_number(), "key `weight`: expected a number above 0, received {}",
                       value.dump());
        table.source.weight = value.get<double>();
      } else {
        table.options[key] = value;
      }
    }
    set_objective(&table);
  } catch (const InputError& error) {
    throw InputError(fmt::format("{}: source {}: {}", given.where, table.source.name, error.what()));
  }
  return table;
}

std::vector<SourceTable> read_mix_file(const std::string& file, const Caller& caller) {
  std::vector<SourceTable> tables;
  std::vector<MixSource> sources;
  for (const FileTable& given : caller.read_tables("--mix", file, "mix")) {
    tables.push_back(parse_table(given));
    sources.push_back(tables.back().source);
  }
  try {
    check_mix(sources);
  } catch (const InputError& error) {
    throw InputError(fmt::format("{}: {}", file, error.what()));
  }
  return tables;
}

DataFlags data_flags_of(const SourceTable& table, const DataFlags& shared) {
  DataFlags data = shared;
  data.data = table.data;
  return data;
}

}  // namespace

void MixFlags::add(OptionList* list) {
  list->add("mix", &file,
            "TOML file with a table [[mix]] for each source of data, instead of --data and the flags of the "
            "objective. Keys: data (a file, a pattern or a list of them), objective, weight (of its loss, "
            "default 1), name (used in metrics, default the objective), and flags of the objective. Steps "
            "mix rows of all sources and share their prefixes (docs/objectives.md)",
            {.path = PathKind::kFile, .group = kDataGroup});
}

void MixFlags::check(const OptionList& list, const DataFlags& data) const {
  if (file.empty() && data.data.empty()) throw UsageError("--data is required");
  if (file.empty()) return;
  ESPALIER_CHECK(data.data.empty(), "--mix: cannot be combined with --data; name the files in its tables");
  for (const std::string& name : objective_option_names()) {
    ESPALIER_CHECK(!list.at(name).is_given(),
                   "--mix: cannot be combined with --{}; set it in the tables of {}", name, file);
  }
}

MixedData MixFlags::read(const std::string& model, const DataFlags& shared, const Caller& caller) const {
  MixedData mixed;
  const std::vector<SourceTable> tables = read_mix_file(file, caller);
  TrajectoriesBuilder all(data_flags_of(tables.front(), shared).store());
  for (const SourceTable& table : tables) {
    const DataFlags data = data_flags_of(table, shared);
    MixSource source = table.source;
    try {
      const Trajectories rows = data.read(data_use_of(model, source.objective));
      source.num_rows = rows.num_rows();
      all.append(rows, data.title());
    } catch (const InputError& error) {
      throw InputError(fmt::format("source {}: {}", source.name, error.what()));
    }
    mixed.sources.push_back(std::move(source));
  }
  mixed.trajectories = all.finish();
  return mixed;
}

std::string MixFlags::resolved(const Caller& caller) const {
  std::string text;
  for (const SourceTable& table : read_mix_file(file, caller)) {
    nlohmann::ordered_json values = {
        {"name", table.source.name},
        {"data", data_flags_of(table, {}).resolved()},
        {"weight", table.source.weight},
        {"objective", to_string(table.source.objective.kind)},
    };
    values.update(table.derived);
    values.update(table.options);
    text += fmt::format("{}[[mix]]\n{}", text.empty() ? "" : "\n", to_toml(values));
  }
  return text;
}

}  // namespace espalier::commands
