// SPDX-License-Identifier: Apache-2.0
// Summaries of the commands that need LibTorch. The program without LibTorch lists them as well.
#pragma once

namespace espalier::cli {

inline constexpr const char* kSummaryOfTrain =
    "Train a model on trajectories; shared prefixes are encoded once";
inline constexpr const char* kSummaryOfLogprobs =
    "Write the log-probability of every token, computed on the shared trees; with --entropies and --top-k "
    "also entropies and the most likely tokens";
inline constexpr const char* kSummaryOfMerge =
    "Add an adapter to the weights of its model and write the result as a new model";
inline constexpr const char* kSummaryOfSample =
    "Sample completions of prompts, whose shared prefixes are encoded once, as rows with behaviour "
    "log-probabilities";
inline constexpr const char* kSummaryOfVerify =
    "Prove on your model and data that loss and every gradient equal per-trajectory training";
inline constexpr const char* kSummaryOfBench =
    "Measure strategies against sequence packing, interleaved, with the FLOP bound";
inline constexpr const char* kSummaryOfDevice =
    "Print the CPU and GPUs of this machine and the kernels that run on them";
inline constexpr const char* kSummaryOfInit = "Create a model with random weights from a config.json";

}  // namespace espalier::cli
