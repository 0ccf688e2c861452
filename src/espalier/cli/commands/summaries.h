// SPDX-License-Identifier: Apache-2.0
// What commands that need LibTorch do, in one sentence. The program without it lists them, too.
#pragma once

namespace espalier::cli {

inline constexpr const char* kSummaryOfTrain =
    "Train a model on trajectories; shared prefixes are encoded once";
inline constexpr const char* kSummaryOfLogprobs =
    "Write the log-probability of every token given all before it, computed on the shared trees; with "
    "--entropies and --top-k also what else each distribution says";
inline constexpr const char* kSummaryOfMerge =
    "Add an adapter to the weights of its model and write them as a model of their own";
inline constexpr const char* kSummaryOfSample =
    "Sample completions of prompts, whose shared prefixes are encoded once, as rows with behaviour "
    "log-probabilities";
inline constexpr const char* kSummaryOfVerify =
    "Prove on your model and data that loss and every gradient equal per-trajectory training";
inline constexpr const char* kSummaryOfBench =
    "Measure strategies against sequence packing, interleaved, with the FLOP bound";
inline constexpr const char* kSummaryOfDevice =
    "Print what this machine computes with: CPU, GPUs, and the kernels that run there";
inline constexpr const char* kSummaryOfInit = "Make a model with random weights from a config.json";

}  // namespace espalier::cli
