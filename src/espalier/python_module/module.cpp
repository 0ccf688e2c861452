// SPDX-License-Identifier: Apache-2.0
// The Python module espalier._engine: converts arguments and results, and calls the Engine without the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "espalier/base/file.h"
#include "espalier/commands/command.h"
#include "espalier/commands/data_flags.h"
#include "espalier/commands/plan_of_model.h"
#include "espalier/data/trajectories.h"
#include "espalier/distributed/process_group.h"
#include "espalier/measure/kernel_verdicts.h"
#include "espalier/model/init.h"
#include "espalier/model/weights/tensor_bytes.h"
#include "espalier/objective/signal.h"
#include "espalier/python/arrays.h"
#include "espalier/python/bindings.h"
#include "espalier/python/caller.h"
#include "espalier/python_engine/engine.h"
#include "espalier/python_engine/options.h"
#include "espalier/runtime/out_of_memory.h"
#include "espalier/runtime/tensor_memory.h"

namespace espalier::python_engine {
namespace {

namespace nb = nanobind;
using python::Given;
using python::Interruptible;

/// Checks signals after each micro-batch and calls a Python function, unless it is None. The function must
/// outlive the result, which is called without the GIL.
Progress watching(nb::handle function) {
  return [function](int64_t done, int64_t total) {
    const nb::gil_scoped_acquire acquire;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    if (!function.is_none()) function(done, total);
  };
}

/// function(offsets [R + 1], positions [M], logprobs [M]) -> (loss, gradient [M]), arrays of NumPy; none for
/// None.
TermFunction calling(nb::handle function) {
  if (function.is_none()) return {};
  return [function](const TermsOfRows& terms, std::span<const double> logprobs) {
    const nb::gil_scoped_acquire acquire;
    const nb::object result =
        function(python::take(std::vector(terms.offsets)), python::take(std::vector(terms.positions)),
                 python::take(std::vector(logprobs.begin(), logprobs.end())));
    const auto gradient = nb::cast<Given<double>>(result[1]);
    return CustomValue{.loss = nb::cast<double>(result[0]),
                       .gradient = {gradient.data(), gradient.data() + gradient.size()}};
  };
}

int64_t init_model(const std::filesystem::path& config, const std::filesystem::path& out, uint64_t seed,
                   const std::string& dtype, const std::map<std::string, std::string>& files,
                   int64_t least_tokens) {
  return espalier::init_model({config, out, seed, parse_dtype(dtype), files, least_tokens});
}

Metrics forward_backward(Engine& engine, const Trajectories& rows, const Indices& indices,
                         const NamedTexts& options, nb::handle function, nb::handle progress,
                         const std::vector<EngineAdapter>& adapters) {
  return engine.forward_backward(rows, indices, options, calling(function), watching(progress), adapters);
}

nb::tuple logprobs(Engine& engine, const Trajectories& rows, int64_t top_k, double temperature,
                   bool entropies, nb::handle progress) {
  TokenLogprobs found;
  {
    const Interruptible work;
    found = engine.logprobs(rows, top_k, temperature, entropies, watching(progress));
  }
  return nb::make_tuple(python::take(std::move(found.logprobs)), python::take(std::move(found.top_ids)),
                        python::take(std::move(found.top_logprobs)), python::take(std::move(found.entropies)),
                        found.encoded_tokens);
}

/// Rows for a model, by the flags of commands, as these read them and tell of them.
Trajectories read_data(const std::filesystem::path& model, const std::vector<std::filesystem::path>& files,
                       const NamedTexts& flags) {
  commands::DataFlags data;
  for (const auto& file : files) data.data.push_back(file.string());
  OptionList list;
  data.add(&list);
  list.set(flags);
  Trajectories rows = data.read(commands::data_use_of(model));
  commands::note_carried_tensors(model);
  return rows;
}

commands::Command command_of(const std::string& name, const commands::Caller& caller) {
  if (name == "bench") return commands::bench_command(caller);
  if (name == "device") return commands::device_command(caller);
  if (name == "plan") return commands::plan_command(caller, commands::plan_tools());
  if (name == "train") return commands::train_command(caller);
  ESPALIER_ASSERT(name == "verify");
  return commands::verify_command(caller);
}

/// The ranks that run a command together.
struct ProcessGroup {
  std::string name;  // "": there is one process
  std::function<std::string(int64_t ranks)> split;
};

std::pair<int, std::string> run_with(const std::string& name, const NamedTexts& options,
                                     commands::Caller caller, const ProcessGroup& ranks) {
  std::unique_ptr<Group> group;
  if (!ranks.name.empty()) group = process_group(ranks.name, ranks.split);
  caller.group = group.get();
  const commands::Result result = command_of(name, caller)(options);
  // Also waits for ranks that still save.
  if (group) group->check_equal("the exit status", std::to_string(result.status));
  return {result.status, python::text_of(result.json)};
}

std::pair<int, std::string> run_command(const std::string& name, const python::NamedBytes& options,
                                        nb::handle caller, commands::StopRequest* stop,
                                        const std::string& group,
                                        const std::function<std::string(int64_t ranks)>& split_ranks) {
  commands::Caller called = python::caller_of(caller);
  called.stop = stop;
  const NamedTexts texts = python::texts_of(options);
  const Interruptible guard;
  try {
    return run_with(name, texts, std::move(called), {group, split_ranks});
  } catch (const nb::python_error&) {
    throw;
  } catch (const InputError&) {
    throw;
  } catch (const std::exception& error) {
    throw std::runtime_error(text_of(error));
  }
}

void bind_commands(nb::module_& module) {
  nb::class_<commands::StopRequest>(module, "StopRequest", "Asks a run to stop after its step.")
      .def(nb::init<>())
      .def(
          "request", [](commands::StopRequest& self) { return !self.requested.exchange(true); },
          "Returns whether this is the first time.")
      .def_prop_ro(
          "step", [](const commands::StopRequest& self) { return self.step.load(); },
          "-1: the process may end at once. 0: there is no step to save. Otherwise that which is finished "
          "first.");
  module.def(
      "run_command", &run_command, nb::arg("name"), nb::arg("options"), nb::arg("caller"),
      nb::arg("stop").none(), nb::arg("process_group"), nb::arg("split_ranks"),
      "Runs a command with options, pairs of name and text. Returns the exit status and what there is "
      "to print, as JSON. process_group: the name of that whose ranks divide the work; \"\": none. "
      "split_ranks: makes groups of so many successive ranks, and gives the name of that of this rank.");
  module.def(
      "describe_command",
      [](const std::string& name) { return python::text_of(command_of(name, {}).options.description()); },
      nb::arg("name"), "Its options, as JSON.");
  module.def(
      "prepare_process",
      [] {
        count_tensor_memory();
        reuse_freed_memory();
      },
      "For a process that runs one command: memory that is freed is kept for later steps.");
  python::bind_process(module);
}

void write_file(const std::filesystem::path& path, const nb::iterable& texts) {
  AtomicFile file(path);
  for (const nb::handle text : texts) file.write(nb::cast<std::string_view>(text));
  file.commit();
}

Watch watched(nb::handle watch) {
  if (watch.is_none()) return {};
  return [watch](std::vector<int64_t> tokens) {
    const nb::gil_scoped_acquire acquire;
    return nb::cast<std::vector<bool>>(watch(python::take(std::move(tokens))));
  };
}

Trajectories sample(Engine& engine, const Trajectories& rows, const NamedTexts& options,
                    const std::vector<NamedTexts>& row_options, nb::handle progress, nb::handle watch) {
  return engine.sample(rows, options, row_options, watching(progress), watched(watch));
}

/// (whether it is due to the input, message), or None.
nb::object error_of(const Completion& completion) {
  if (!completion.error) return nb::none();
  try {
    std::rethrow_exception(completion.error);
  } catch (const InputError& error) {
    return nb::make_tuple(true, std::string(error.what()));
  } catch (const std::exception& error) {
    return nb::make_tuple(false, text_of(error));
  }
}

/// Lists of (prompt, sample, tokens, logprobs, stopped, kept_tokens, prompt_logprobs, error).
nb::list sample_on(Engine& engine, const EngineSampling& sampling, nb::handle watch) {
  std::vector<Completion> done;
  {
    const Interruptible work;
    done = engine.sample_on(sampling, watched(watch));
  }
  nb::list found;
  for (Completion& each : done) {
    found.append(nb::make_tuple(each.row, each.sample, python::take(std::move(each.tokens)),
                                python::take(std::move(each.logprobs)), each.stopped, each.kept_tokens,
                                python::take(std::move(each.prompt_logprobs)), error_of(each)));
  }
  return found;
}

std::vector<std::string> warnings_of_truncation(const Trajectories& rows, const NamedTexts& options) {
  return truncation_warnings(rows, *make_objective(parse_objective_options(options)));
}

nb::object to_array(const HostArray& array) {
  const std::vector<size_t> shape(array.shape.begin(), array.shape.end());
  auto owner = std::make_unique<std::shared_ptr<void>>(array.owner);
  nb::capsule capsule(owner.get(),
                      [](void* held) noexcept { delete static_cast<std::shared_ptr<void>*>(held); });
  owner.release();
  const nb::dlpack::dtype dtype = array.is_double ? nb::dtype<double>() : nb::dtype<float>();
  return nb::cast(nb::ndarray<nb::numpy>(array.values, shape.size(), shape.data(), capsule, nullptr, dtype));
}

nb::dict gradients(Engine& engine) {
  std::vector<HostArray> arrays;
  {
    const Interruptible work;
    arrays = engine.gradients();
  }
  nb::dict dict;
  for (const HostArray& array : arrays) dict[array.name.c_str()] = to_array(array);
  return dict;
}

void bind_engine(nb::module_& module) {
  nb::class_<EngineAdapter>(module, "Adapter", "An adapter of an Engine, or its weights alone.")
      .def(nb::init<>(), "The weights alone.");
  nb::class_<EngineSampling>(module, "Sampling", "Prompts that an Engine samples side by side.");
  const nb::call_guard<Interruptible> work;
  nb::class_<Engine>(
      module, "Engine",
      "What espalier.Engine is made of. Options are pairs of a flag's name and its text. All work is "
      "done without the GIL.")
      .def(nb::init<const std::filesystem::path&, const NamedTexts&, const std::string&, bool>(),
           nb::arg("model"), nb::arg("options"), nb::arg("process_group"), nb::arg("only_adapters"), work,
           "Loads the model. process_group: its name; \"\": none. only_adapters: weights are never trained.")
      .def("new_adapter", &Engine::new_adapter, nb::arg("options"), work,
           "An adapter, which is not in use yet.")
      .def("copy", &Engine::copy, nb::arg("adapter"), work, "A copy that is never trained.")
      .def("use", &Engine::use, nb::arg("adapter"), "What all other methods work on.")
      .def_prop_ro("adapter", &Engine::adapter, "What is in use.")
      .def("forward_backward", &forward_backward, nb::arg("rows"), nb::arg("indices").none(),
           nb::arg("options"), nb::arg("function").none(), nb::arg("progress").none(), nb::arg("adapters"),
           work,
           "The metrics, by name. adapters: by row, or empty: that in use. The loss is an objective of the "
           "options, or that of\n"
           "function(offsets int64 [R + 1], positions int64 [M], logprobs float64 [M]) -> (loss, gradient "
           "float64 [M]).")
      .def("optim_step", &Engine::optim_step, nb::arg("settings"), work, "The metrics, by name.")
      .def(
          "fail", &Engine::fail, nb::arg("message"), work,
          "In place of a call that this rank cannot make: the other ranks, which make it, raise the message.")
      .def(
          "logprobs", &logprobs, nb::arg("rows"), nb::arg("top_k"), nb::arg("temperature"),
          nb::arg("entropies"), nb::arg("progress").none(),
          "float64 [N]: of every token given all before it in its row; 0 for first tokens. int32 and float64 "
          "[N * top_k]: the most likely ones. float64 [N] or empty: entropies. How many tokens were encoded.")
      .def("sample", &sample, nb::arg("rows"), nb::arg("options"), nb::arg("row_options"),
           nb::arg("progress").none(), nb::arg("watch").none(), work,
           "Completions of the rows' prompts as rows. watch(int64 [B * 3] of row, sample and new token): "
           "which ones end.")
      .def("sampling", &Engine::sampling, nb::arg("options"), work, "Begins to sample, without prompts.")
      .def(
          "add", &Engine::add, nb::arg("sampling"), nb::arg("first"), nb::arg("rows"), nb::arg("row_options"),
          nb::arg("client"), work,
          "Whole rows as prompts of the weights in use and of a client, each with its options, numbered from "
          "`first` on.")
      .def("remove", &Engine::remove, nb::arg("sampling"), nb::arg("number"), nb::arg("client"), work,
           "Ends a prompt. Returns how many of its completions were not done.")
      .def("sample_on", &sample_on, nb::arg("sampling"), nb::arg("watch").none(),
           "A token more. Returns (prompt, sample, int32 tokens, float64 logprobs, stopped, kept_tokens, "
           "prompt_logprobs, error) of completions that are done. error: (whether it is due to the input, "
           "message), "
           "or None. watch: as of sample.")
      .def("sampling_counts", &Engine::sampling_counts, work, "Tokens by name, and bytes that are kept.")
      .def("stop_ids", &Engine::stop_ids, work, "Of the model's folder.")
      .def("gradients", &gradients, "Copies of the gradients, by the names of the parameters.")
      .def("zero_gradients", &Engine::zero_gradients, "Forgets all gradients.")
      .def("save", &Engine::save, nb::arg("folder"), nb::arg("dtype"), nb::arg("merged"), work,
           "Writes a checkpoint, or a model with the adapter in its weights.")
      .def("load", &Engine::load, nb::arg("folder"), nb::arg("with_optimizer"), work,
           "Loads a checkpoint. Returns notes about oddities of its folder.")
      .def_prop_ro("step", &Engine::step, "Optimiser steps done.")
      .def_prop_ro("vocab_size", &Engine::vocab_size, "Of the model.");
}

}  // namespace
}  // namespace espalier::python_engine

NB_MODULE(_engine, module) {
  using namespace espalier::python_engine;
  module.doc() = "The trainer of Espalier for Python, on LibTorch.";
  module.attr("__version__") = ESPALIER_VERSION;
  nanobind::module_::import_("espalier._core");  // defines the class of rows
  espalier::python::translate_errors();
  bind_engine(module);
  module.def(
      "judge_kernels_by", &espalier::judge_kernels_by, nanobind::arg("judge"),
      "Engines on a GPU ask this for the verdicts on its kernels, a JSON text, by the index of the device.");
  module.def("init_model", &init_model, nanobind::arg("config"), nanobind::arg("out"), nanobind::arg("seed"),
             nanobind::arg("dtype"), nanobind::arg("files"), nanobind::arg("least_tokens"),
             nanobind::call_guard<nanobind::gil_scoped_release>(),
             "Writes a random model with these files, texts by name. Its vocabulary must have least_tokens. "
             "Returns how many parameters it has.");
  bind_commands(module);
  module.def("read_data", &read_data, nanobind::arg("model"), nanobind::arg("files"), nanobind::arg("flags"),
             nanobind::call_guard<nanobind::gil_scoped_release>(),
             "The rows of files and patterns for a model, by the flags of commands.");
  module.def("write_file", &write_file, nanobind::arg("path"), nanobind::arg("texts"),
             "Writes texts to a file, which appears when it is whole.");
  module.def(
      "check_file", [](const std::filesystem::path& path) { const espalier::AtomicFile file(path); },
      nanobind::arg("path"), "Raises InputError where write_file could not write.");
  module.def("fail_ranks", &espalier::fail_ranks, nanobind::arg("message"),
             "Ends what waits for other ranks, or will, with an error of this message.");
  module.def("waits_for_ranks", &espalier::waits_for_ranks, "Whether this process waits for other ranks.");
  module.def("truncation_warnings", &warnings_of_truncation, nanobind::arg("rows"), nanobind::arg("options"),
             "Of rows whose tokens were chosen among fewer than all, for an objective with ratios.");
  module.def("engine_options", &engine_options_json, "Options of an Engine, as JSON.");
  module.def("objective_options", &objective_options_json, "Options of objectives, as JSON.");
  module.def("sampling_options", &sampling_options_json, "Options of sampling, as JSON.");
}
