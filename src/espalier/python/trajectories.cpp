// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "espalier/base/check.h"
#include "espalier/base/units.h"
#include "espalier/data/builder.h"
#include "espalier/data/packed.h"
#include "espalier/data/reader.h"
#include "espalier/data/trajectories.h"
#include "espalier/data/writer.h"
#include "espalier/python/arrays.h"
#include "espalier/python/bindings.h"

namespace espalier::python {
namespace {

using Rows = nb::handle_t<Trajectories>;

const Trajectories& of(Rows self) {
  return nb::cast<const Trajectories&>(self);
}

template <typename T>
nb::object array(const Column<T>& column, nb::handle owner) {
  return nb::cast(view(column.span(), owner));
}

nb::object array(const RealColumn& column, nb::handle owner) {
  return std::visit([owner](const auto& values) { return array(values, owner); }, column.values());
}

/// The getter of a property that is None if no row has the column.
template <typename Values>
auto optional_of(Optional<Values> Trajectories::* member) {
  return [member](Rows self) {
    const Optional<Values>& column = of(self).*member;
    return column.any() ? array(column.values, self) : nb::none();
  };
}

auto texts_of(std::vector<std::string> Trajectories::* member) {
  return [member](Rows self) { return (of(self).*member).empty() ? nb::none() : nb::cast(of(self).*member); };
}

/// [N, width], or None if width is 0.
template <typename T>
nb::object table(Rows self, const Column<T>& column, int64_t width) {
  if (width == 0) return nb::none();
  const auto rows = static_cast<size_t>(of(self).num_tokens());
  return nb::cast(nb::ndarray<nb::numpy, const T, nb::ndim<2>>(column.span().data(),
                                                               {rows, static_cast<size_t>(width)}, self));
}

nb::object routes(Rows self) {
  return table(self, of(self).routed_experts, of(self).routes_per_token);
}

nb::object ref_topk_ids(Rows self) {
  return table(self, of(self).ref_topk_ids, of(self).ref_topk);
}

nb::object ref_topk_logprobs(Rows self) {
  const int64_t width = of(self).ref_topk;
  return std::visit([&](const auto& column) { return table(self, column, width); },
                    of(self).ref_topk_logprobs.values());
}

nb::object turn_rewards(Rows self) {
  return of(self).turn_reward_offsets.empty() ? nb::none() : array(of(self).turn_rewards, self);
}

nb::object turn_reward_offsets(Rows self) {
  return of(self).turn_reward_offsets.empty() ? nb::none() : array(of(self).turn_reward_offsets, self);
}

nb::dict present(Rows self) {
  const Trajectories& rows = of(self);
  nb::dict columns;
  const auto add = [&](const char* name, const auto& column) {
    if (!column.present.empty()) columns[name] = array(column.present, self);
  };
  add("logprobs", rows.logprobs);
  add("ref_logprobs", rows.ref_logprobs);
  add("advantages", rows.advantages);
  for (const RowReal& real : kRowReals) add(real.name, rows.*real.column);
  add("chosen", rows.chosen);
  return columns;
}

void check_index(const Trajectories& rows, int64_t r) {
  if (r < 0 || r >= rows.num_rows()) throw nb::index_error("row out of range");
}

/// The fields of a row as arrays, which take its values.
struct RowArrays {
  nb::dict dict;
  size_t tokens;

  template <typename T>
  void add(const char* name, const T& value) {
    dict[name] = value;
  }
  template <typename T>
  void add(const char* name, std::vector<T>& values) {
    dict[name] = take(std::move(values));
  }
  void add_logprobs(const char* name, std::vector<double>& values) { add(name, values); }
  template <typename T, typename Has>
  void add_table(const char* name, std::vector<T>& values, const Has&) {
    const size_t width = values.size() / tokens;
    dict[name] = nb::cast(take(std::move(values))).attr("reshape")(-1, width);
  }
};

nb::dict row_dict(const Trajectories& rows, int64_t r) {
  check_index(rows, r);
  TrajectoryRow row = copy_row(rows, r);
  RowArrays arrays{{}, row.input_ids.size()};
  visit_fields(row, arrays);
  return arrays.dict;
}

std::string text(const Trajectories& rows) {
  return fmt::format("<espalier.Trajectories: {}, {}>", count_of(rows.num_rows(), "row", "rows"),
                     count_of(rows.num_tokens(), "token", "tokens"));
}

nb::tuple read(const std::vector<std::filesystem::path>& paths, int64_t vocab_size, bool skip_bad_rows,
               int64_t max_rows, int64_t max_line_bytes) {
  ReadOptions options{.vocab_size = vocab_size,
                      .skip_bad_rows = skip_bad_rows,
                      .max_rows = max_rows,
                      .max_line_bytes = max_line_bytes,
                      .progress = [](double) { check_signals(); }};
  ReadReport report;
  Trajectories rows = on_files([&] { return read_trajectories(paths, options, &report); });
  std::vector<std::string> per_token;
  for (const IgnoredField& field : report.fields.ignored) {
    if (field.is_per_token()) per_token.push_back(field.name);
  }
  return nb::make_tuple(std::move(rows), report.rows_skipped, report.first_errors, per_token);
}

template <typename T>
std::vector<T> values(const nb::dict& row, const char* name) {
  if (!row.contains(name)) return {};
  return vector_of<T>(row[name]);
}

template <typename T>
std::optional<T> value(const nb::dict& row, const char* name) {
  if (!row.contains(name)) return std::nullopt;
  return nb::cast<T>(row[name]);
}

std::string text_of(const nb::dict& row, const char* name) {
  return value<std::string>(row, name).value_or("");
}

void append(TrajectoriesBuilder& rows, const nb::dict& row) {
  rows.append({.input_ids = values<int32_t>(row, "input_ids"),
               .loss_mask = values<uint8_t>(row, "loss_mask"),
               .loss_weights = values<double>(row, "loss_weights"),
               .logprobs = values<double>(row, "logprobs"),
               .ref_logprobs = values<double>(row, "ref_logprobs"),
               .advantages = values<double>(row, "advantages"),
               .advantage = value<double>(row, "advantage"),
               .reward = value<double>(row, "reward"),
               .turn_rewards = values<double>(row, "turn_rewards"),
               .ref_topk_ids = values<int32_t>(row, "ref_topk_ids"),
               .ref_topk_logprobs = values<double>(row, "ref_topk_logprobs"),
               .chosen = value<bool>(row, "chosen"),
               .trajectory_id = text_of(row, "trajectory_id"),
               .group_id = text_of(row, "group_id"),
               .pair_id = text_of(row, "pair_id"),
               .routed_experts = values<int32_t>(row, "routed_experts"),
               .temperature = value<double>(row, "temperature"),
               .top_k = value<double>(row, "top_k"),
               .top_p = value<double>(row, "top_p")});
}

/// Keeps a Python object alive for code that does not hold the GIL.
std::shared_ptr<const void> kept(nb::handle object) {
  object.inc_ref();
  return {static_cast<const void*>(object.ptr()), [](const void* held) {
            const nb::gil_scoped_acquire acquire;
            nb::handle(static_cast<PyObject*>(const_cast<void*>(held))).dec_ref();
          }};
}

template <typename T>
Column<T> column(const nb::dict& columns, const char* name) {
  if (!columns.contains(name)) return {};
  const nb::object array = columns[name];
  return {span_of(nb::cast<Given<T>>(array, /*convert=*/false)), kept(array)};
}

/// float32, float64, or the bytes of a mask.
RealColumn reals(const nb::dict& columns, const char* name) {
  if (!columns.contains(name)) return {};
  const nb::dlpack::dtype dtype = nb::cast<nb::ndarray<nb::ro>>(columns[name]).dtype();
  if (dtype == nb::dtype<float>()) return column<float>(columns, name);
  if (dtype == nb::dtype<uint8_t>()) return column<uint8_t>(columns, name);
  return column<double>(columns, name);
}

std::vector<std::string> texts(const nb::dict& columns, const char* name) {
  return columns.contains(name) ? nb::cast<std::vector<std::string>>(columns[name])
                                : std::vector<std::string>();
}

template <typename Values>
void read_present(const nb::dict& columns, const char* name, Optional<Values>& column) {
  column.present = espalier::python::column<uint8_t>(columns, fmt::format("{}.present", name).c_str());
}

Trajectories trajectories_of_columns(const nb::dict& columns) {
  Trajectories rows;
  // Copied, so that the offsets stay valid if the array changes.
  rows.offsets = values<int64_t>(columns, "offsets");
  rows.input_ids = column<int32_t>(columns, "input_ids");
  rows.loss_weights = reals(columns, columns.contains("loss_mask") ? "loss_mask" : "loss_weights");
  rows.logprobs.values = reals(columns, "logprobs");
  rows.ref_logprobs.values = reals(columns, "ref_logprobs");
  rows.advantages.values = reals(columns, "advantages");
  for (const RowReal& real : kRowReals) {
    (rows.*real.column).values = reals(columns, real.name);
    read_present(columns, real.name, rows.*real.column);
  }
  rows.chosen.values = column<uint8_t>(columns, "chosen");
  rows.trajectory_id = texts(columns, "trajectory_id");
  rows.group_id = texts(columns, "group_id");
  rows.pair_id = texts(columns, "pair_id");
  rows.routed_experts = column<int32_t>(columns, "routed_experts");
  rows.routes_per_token = value<int64_t>(columns, "routes_per_token").value_or(0);
  rows.turn_reward_offsets = values<int64_t>(columns, "turn_rewards.offsets");  // copied like offsets
  rows.turn_rewards = reals(columns, "turn_rewards");
  rows.target_ids = column<int32_t>(columns, "target_ids");
  rows.ref_topk_ids = column<int32_t>(columns, "ref_topk_ids");
  rows.ref_topk_logprobs = reals(columns, "ref_topk_logprobs");
  rows.ref_topk = value<int64_t>(columns, "ref_topk").value_or(0);
  read_present(columns, "logprobs", rows.logprobs);
  read_present(columns, "ref_logprobs", rows.ref_logprobs);
  read_present(columns, "advantages", rows.advantages);
  read_present(columns, "chosen", rows.chosen);
  if (rows.loss_weights.empty()) {
    rows.loss_weights = Column<uint8_t>(std::vector<uint8_t>(static_cast<size_t>(rows.num_tokens()), 1));
  }
  const nb::gil_scoped_release release;
  check_columns(rows);
  return rows;
}

/// The signature of a property in the stubs, where nanobind cannot derive it.
auto typed(const char* signature) {
  return nb::for_getter(nb::sig(signature));
}

/// The columns, in the form that trajectories_of_columns reads, and the sources of the rows.
nb::dict state(Rows self) {
  const Trajectories& rows = of(self);
  nb::dict columns;
  const auto add = [&](const char* name, const auto& column) {
    if (!column.empty()) columns[name] = array(column, self);
  };
  const auto add_optional = [&](const char* name, const auto& column) {
    add(name, column.values);
    add(fmt::format("{}.present", name).c_str(), column.present);
  };
  const auto add_texts = [&](const char* name, const std::vector<std::string>& texts) {
    if (!texts.empty()) columns[name] = texts;
  };
  add("offsets", rows.offsets);
  add("input_ids", rows.input_ids);
  add("loss_weights", rows.loss_weights);
  add_optional("logprobs", rows.logprobs);
  add_optional("ref_logprobs", rows.ref_logprobs);
  add_optional("advantages", rows.advantages);
  for (const RowReal& real : kRowReals) add_optional(real.name, rows.*real.column);
  add_optional("chosen", rows.chosen);
  add_texts("trajectory_id", rows.trajectory_id);
  add_texts("group_id", rows.group_id);
  add_texts("pair_id", rows.pair_id);
  add("routed_experts", rows.routed_experts);
  columns["routes_per_token"] = rows.routes_per_token;
  add("turn_rewards.offsets", rows.turn_reward_offsets);
  add("turn_rewards", rows.turn_rewards);
  add("target_ids", rows.target_ids);
  add("ref_topk_ids", rows.ref_topk_ids);
  add("ref_topk_logprobs", rows.ref_topk_logprobs);
  columns["ref_topk"] = rows.ref_topk;
  nb::list sources;
  for (const RowSource& source : rows.sources) sources.append(nb::make_tuple(source.name, source.first_row));
  columns["sources"] = sources;
  return columns;
}

void restore(Trajectories& self, const nb::dict& columns) {
  Trajectories rows;
  if (columns.contains("offsets")) rows = trajectories_of_columns(columns);  // else there are no rows
  for (nb::handle source : nb::cast<nb::list>(columns["sources"])) {
    rows.sources.push_back({nb::cast<std::string>(source[0]), nb::cast<int64_t>(source[1])});
  }
  new (&self) Trajectories(std::move(rows));
}

void bind_class(nb::module_& module) {
  using Class = Trajectories;
  nb::class_<Class>(
      module, "Trajectories",
      "Rows of token ids with loss mask, log-probabilities, advantages and so on, in columns. Per-token "
      "columns\n"
      "are aligned: row r has entries [offsets[r], offsets[r + 1]). Columns are read-only views, for packed "
      "files of\n"
      "the mapped file; columns that no row has are None. Index r returns a copy of the row as a dict.\n\n"
      "Examples:\n"
      "    >>> import espalier\n"
      "    >>> rows = espalier.trajectories([{\"input_ids\": [1, 2, 3], \"reward\": 0.5}])\n"
      "    >>> rows.num_tokens, rows.reward.tolist(), rows.advantages\n"
      "    (3, [0.5], None)")
      .def_prop_ro(
          "offsets", [](Rows self) { return array(of(self).offsets, self); }, "int64 [R + 1]",
          typed("def offsets(self) -> numpy.typing.NDArray[numpy.int64]"))
      .def_prop_ro(
          "input_ids", [](Rows self) { return array(of(self).input_ids, self); }, "int32 [N]",
          typed("def input_ids(self) -> numpy.typing.NDArray[numpy.int32]"))
      .def_prop_ro(
          "loss_weights", [](Rows self) { return array(of(self).loss_weights, self); },
          "[N], uint8 if the rows have a mask, else float32 or float64; 1 where they have neither",
          typed("def loss_weights(self) -> numpy.typing.NDArray[numpy.uint8] | "
                "numpy.typing.NDArray[numpy.floating]"))
      .def_prop_ro("logprobs", optional_of(&Class::logprobs), "float32 or float64 [N]: behaviour policy",
                   typed("def logprobs(self) -> numpy.typing.NDArray[numpy.floating] | None"))
      .def_prop_ro("ref_logprobs", optional_of(&Class::ref_logprobs),
                   "float32 or float64 [N]: reference model",
                   typed("def ref_logprobs(self) -> numpy.typing.NDArray[numpy.floating] | None"))
      .def_prop_ro("advantages", optional_of(&Class::advantages), "float32 or float64 [N]",
                   typed("def advantages(self) -> numpy.typing.NDArray[numpy.floating] | None"))
      .def_prop_ro("reward", optional_of(&Class::reward), "float32 or float64 [R]",
                   typed("def reward(self) -> numpy.typing.NDArray[numpy.floating] | None"))
      .def_prop_ro("temperature", optional_of(&Class::temperature),
                   "float32 or float64 [R]: of logprobs and ref_logprobs",
                   typed("def temperature(self) -> numpy.typing.NDArray[numpy.floating] | None"))
      .def_prop_ro("top_k", optional_of(&Class::top_k),
                   "float32 or float64 [R]: how many tokens the policy chose among",
                   typed("def top_k(self) -> numpy.typing.NDArray[numpy.floating] | None"))
      .def_prop_ro("top_p", optional_of(&Class::top_p),
                   "float32 or float64 [R]: the probability of the tokens that it chose among",
                   typed("def top_p(self) -> numpy.typing.NDArray[numpy.floating] | None"))
      .def_prop_ro("turn_rewards", &turn_rewards,
                   "float32 or float64: one per turn, row r has [turn_reward_offsets[r], "
                   "turn_reward_offsets[r + 1])",
                   typed("def turn_rewards(self) -> numpy.typing.NDArray[numpy.floating] | None"))
      .def_prop_ro("turn_reward_offsets", &turn_reward_offsets, "int64 [R + 1]",
                   typed("def turn_reward_offsets(self) -> numpy.typing.NDArray[numpy.int64] | None"))
      .def_prop_ro(
          "ref_topk_ids", &ref_topk_ids,
          "int32 [N, K]: the reference model's most likely tokens at each position, -1 where there are "
          "none",
          typed("def ref_topk_ids(self) -> numpy.typing.NDArray[numpy.int32] | None"))
      .def_prop_ro("ref_topk_logprobs", &ref_topk_logprobs,
                   "float32 or float64 [N, K], 0 where there are none",
                   typed("def ref_topk_logprobs(self) -> numpy.typing.NDArray[numpy.floating] | None"))
      .def_prop_ro("chosen", optional_of(&Class::chosen), "uint8 [R]",
                   typed("def chosen(self) -> numpy.typing.NDArray[numpy.uint8] | None"))
      .def_prop_ro("present", &present,
                   "uint8 [R] by name, for the columns that only some rows have; they hold 0 for the others",
                   typed("def present(self) -> dict[str, numpy.typing.NDArray[numpy.uint8]]"))
      .def_prop_ro("trajectory_id", texts_of(&Class::trajectory_id),
                   "list of str [R], empty for rows without one",
                   typed("def trajectory_id(self) -> list[str] | None"))
      .def_prop_ro("group_id", texts_of(&Class::group_id), "list of str [R], empty for rows without one",
                   typed("def group_id(self) -> list[str] | None"))
      .def_prop_ro("pair_id", texts_of(&Class::pair_id), "list of str [R], empty for rows without one",
                   typed("def pair_id(self) -> list[str] | None"))
      .def_prop_ro("routed_experts", &routes, "int32 [N, routes per token], -1 in rows without routes",
                   typed("def routed_experts(self) -> numpy.typing.NDArray[numpy.int32] | None"))
      .def_prop_ro("num_rows", &Class::num_rows, "R")
      .def_prop_ro("num_tokens", &Class::num_tokens, "N")
      .def(
          "name",
          [](const Class& rows, int64_t r) {
            check_index(rows, r);
            return rows.name(r);
          },
          nb::arg("row"),
          "The row's name in messages: its trajectory_id, or its number.\n\nArgs:\n    row: Its number.")
      .def("__len__", &Class::num_rows)
      .def("__getitem__", &row_dict, nb::arg("row"),
           nb::sig("def __getitem__(self, row: int, /) -> dict[str, typing.Any]"))
      .def("__getstate__", &state)
      .def("__setstate__", &restore)
      .def("__repr__", &text);
}

void bind_builder(nb::module_& module) {
  nb::class_<TrajectoriesBuilder>(module, "TrajectoriesBuilder",
                                  "Collects rows whose arrays have the types of the columns.")
      .def(nb::init<>())
      .def("append", &append, nb::arg("row"),
           "Checks the row, a dict by field whose lists are arrays of the columns' types, and appends it. "
           "Raises\n"
           "InputError naming the field.")
      .def("finish", &TrajectoriesBuilder::finish,
           "The rows as Trajectories; the builder is empty afterwards.");
}

}  // namespace

void bind_trajectories(nb::module_& module) {
  bind_class(module);
  bind_builder(module);
  module.attr("MAX_ROW_BYTES") = kDefaultLineBytes;
  module.def(
      "trajectories_of_columns", &trajectories_of_columns, nb::arg("columns"),
      "Trajectories that view the arrays of a dict. Arrays have the types of a packed file's columns.");
  module.def("read", &read, nb::arg("paths"), nb::arg("vocab_size"), nb::arg("skip_bad_rows"),
             nb::arg("max_rows"), nb::arg("max_line_bytes"),
             "(trajectories, skipped rows, their first errors, per-token fields that were ignored).");
  module.def(
      "expand_file_patterns",
      [](const std::vector<std::filesystem::path>& patterns) {  // whose names need not be UTF-8
        const std::vector<std::string> names(patterns.begin(), patterns.end());
        return expand_file_patterns(names);
      },
      nb::arg("patterns"), "The files that names and patterns match.");
  module.def(
      "write",
      [](const std::filesystem::path& path, const Trajectories& rows) {
        on_files([&] { write_trajectories(path, rows); });
      },
      nb::arg("path"), nb::arg("trajectories"), "Writes JSON Lines or packed safetensors, atomically.");
}

}  // namespace espalier::python
