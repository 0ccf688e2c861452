// SPDX-License-Identifier: Apache-2.0
// The methods of Engine that sample.
#include "espalier/base/mapped_file_guard.h"
#include "espalier/python_engine/engine.h"
#include "espalier/python_engine/state.h"
#include "espalier/sample/sampler.h"

namespace espalier::python_engine {
namespace {

TokenWatch told(const Watch& watch) {
  if (!watch) return {};
  return [&watch](std::span<const Completion* const> completions) {
    std::vector<int64_t> tokens;
    for (const Completion* each : completions) {
      tokens.insert(tokens.end(), {each->row, each->sample, each->tokens.back()});
    }
    return watch(std::move(tokens));
  };
}

}  // namespace

Trajectories Engine::sample(const Trajectories& rows, const NamedTexts& options,
                            const std::vector<NamedTexts>& row_options, const Progress& progress,
                            const Watch& watch) {
  State& state = *state_;
  return state.call([&] {
    SampleOptions sampling;
    const Trajectories prompts = state.group.together([&] {
      state.check_whole();
      const SamplingFlags flags = parse_sampling_options(options);
      state.check_rows(rows, rows_of(rows, std::nullopt));
      sampling = row_options.empty() ? state.sample_options(flags) : flags.options;
      for (const NamedTexts& own : row_options) {
        sampling.rows.push_back(state.sample_options(parse_sampling_options(own)));
      }
      Trajectories prompts = prompts_of(rows, flags.whole_rows);
      check_temperatures(rows, prompts, sampling);
      return prompts;
    });
    const SampleResult result = espalier::sample(state.base->decoder(), prompts, sampling,
                                                 {.progress = progress, .watch = told(watch)}, state.memory(),
                                                 state.group, state.sampled_weights());
    check_mapped_files();
    return espalier::rows_of(result.completions, rows, prompts, sampling);
  });
}

EngineSampling Engine::sampling(const NamedTexts& options) {
  State& state = *state_;
  return state.call([&] {
    state.check_whole();
    state.open.push_back(
        std::make_shared<OpenSampling>(state.base, parse_sampling_options(options).options, state.memory()));
    return EngineSampling{state.open.back()};
  });
}

void Engine::add(const EngineSampling& sampling, int64_t first, const Trajectories& rows,
                 const std::vector<NamedTexts>& row_options, int64_t client) {
  State& state = *state_;
  OpenSampling& open = *sampling.open;
  return state.call([&] {
    state.check_whole();
    open.check_weights(state.prefixes);
    state.check_rows(rows, rows_of(rows, std::nullopt));
    std::vector<SampleOptions> options;
    for (int64_t row = 0; row < rows.num_rows(); ++row) {
      options.push_back(state.sample_options(parse_sampling_options(row_options[row])));
      Sampling::check(open.base->decoder(), row, rows.row_size(row), options.back());
    }
    open.trained.emplace(state.now->weights, state.now);
    open.sampling.use(state.sampled_weights());
    for (int64_t row = 0; row < rows.num_rows(); ++row) {
      open.sampling.add(first + row, rows.row(row), options[row], /*place=*/0, client);
    }
    check_mapped_files();
  });
}

int64_t Engine::remove(const EngineSampling& sampling, int64_t number, int64_t client) {
  return state_->call([&] { return sampling.open->sampling.remove(number, client); });
}

std::vector<Completion> Engine::sample_on(const EngineSampling& sampling, const Watch& watch) {
  State& state = *state_;
  OpenSampling& open = *sampling.open;
  return state.call([&] {
    open.check_weights(state.prefixes);
    return open.sampling.step(told(watch));
  });
}

Metrics Engine::sampling_counts() {
  return state_->call([&] {
    const SamplingCounts& counts = *state_->counts;
    return Metrics{{"prompt_tokens", counts.flat_prompt_tokens},
                   {"kept_prompt_tokens", counts.kept_prompt_tokens},
                   {"encoded_prompt_tokens", counts.encoded_prompt_tokens},
                   {"sampled_tokens", counts.sampled_tokens},
                   {"prefix_cache_bytes", state_->prefixes->bytes()},
                   {"decode_steps", counts.decode_steps},
                   {"truncation", counts.truncation},
                   {"prompt_seconds", counts.prompt_seconds},
                   {"decode_seconds", counts.decode_seconds}};
  });
}

std::vector<int32_t> Engine::stop_ids() {
  return state_->call([&] { return state_->sample_options({}).stop_ids; });
}

}  // namespace espalier::python_engine
