// SPDX-License-Identifier: Apache-2.0
// The schemas of the operators; implementations register themselves beside their code.
#include <torch/library.h>
#include <torch/version.h>

/// Checked before the file is loaded (python/espalier/ops.py): the LibTorch version that this was compiled
/// with, and the version of the schemas below and in judge.cpp, which must be incremented here and there with
/// every change. A separate section is found without reading the whole file.
extern "C"
    [[gnu::used, gnu::visibility("default"), gnu::section(".espalier")]] const char espalier_ops_built_for[] =
        "ESPALIER_OPS_TORCH=" TORCH_VERSION ";ESPALIER_OPS_SCHEMAS=4;";

TORCH_LIBRARY(espalier, m) {
  // Python module with fake kernels of operators that read arguments on the host.
  m.set_python_module("espalier.fake_kernels");
  m.def(
      "tree_attention(Tensor q, Tensor k, Tensor v, Tensor subtree_end, float softmax_scale,"
      " Tensor[] context_k, Tensor[] context_v, Tensor context_blocks, int sliding_window=0,"
      " Tensor? position=None, Tensor? context_positions=None, Tensor? sinks=None, float softcap=0.)"
      " -> (Tensor out, Tensor lse)");
  m.def(
      "tree_attention_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor subtree_end, Tensor out,"
      " Tensor lse, float softmax_scale, Tensor[] context_k, Tensor[] context_v, Tensor context_blocks,"
      " int sliding_window=0, Tensor? position=None, Tensor? context_positions=None, float softcap=0.)"
      " -> (Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor[] grad_context_k, Tensor[] grad_context_v)");
  // Implemented by Python, where a library is installed (attention/library.h): the results of the two
  // operators above in one list, empty where the library does not serve.
  m.def(
      "tree_attention_library(Tensor q, Tensor k, Tensor v, Tensor subtree_end, float softmax_scale,"
      " Tensor[] context_k, Tensor[] context_v, Tensor context_blocks, int sliding_window=0,"
      " Tensor? position=None, Tensor? context_positions=None, Tensor? sinks=None, float softcap=0.)"
      " -> Tensor[]");
  m.def(
      "tree_attention_library_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor subtree_end,"
      " Tensor out, Tensor lse, float softmax_scale, Tensor[] context_k, Tensor[] context_v,"
      " Tensor context_blocks, int sliding_window=0, Tensor? position=None, Tensor? context_positions=None,"
      " float softcap=0.) -> Tensor[]");
  m.def("tree_attention_library_name(int device) -> str");
  m.def(
      "edge_logprobs(Tensor hidden, Tensor weight, Tensor edge_row, Tensor edge_target)"
      " -> (Tensor logprobs, Tensor lse)");
  m.def(
      "edge_logprobs_backward(Tensor grad_logprobs, Tensor hidden, Tensor weight, Tensor edge_row,"
      " Tensor edge_target, Tensor lse, bool[2] output_mask) -> (Tensor grad_hidden, Tensor grad_weight)");
  m.def(
      "edge_logprobs_backward_(Tensor grad_logprobs, Tensor hidden, Tensor weight, Tensor edge_row,"
      " Tensor edge_target, Tensor lse, Tensor(a!)? grad_weight) -> Tensor grad_hidden");
  m.def(
      "edge_distribution(Tensor hidden, Tensor weight, Tensor edge_row, Tensor edge_target, Tensor? "
      "bias=None,"
      " Tensor? edge_temperature=None, float temperature=1., float logit_scale=1., float softcap=0.)"
      " -> (Tensor logprobs, Tensor entropy, Tensor lse, Tensor mean)");
  m.def(
      "edge_distribution_backward(Tensor? grad_logprobs, Tensor? grad_entropy, Tensor lse, Tensor mean,"
      " Tensor hidden, Tensor weight, Tensor edge_row, Tensor edge_target, Tensor? bias,"
      " Tensor? edge_temperature, float temperature, float logit_scale, float softcap, bool[3] output_mask)"
      " -> (Tensor grad_hidden, Tensor grad_weight, Tensor grad_bias)");
  m.def(
      "rms_norm(Tensor x, Tensor? addend, Tensor weight, float eps)"
      " -> (Tensor y, Tensor sum, Tensor inverse_rms)");
  m.def(
      "rms_norm_backward(Tensor grad_y, Tensor? grad_sum, Tensor x, Tensor weight, Tensor inverse_rms,"
      " bool[2] output_mask) -> (Tensor grad_x, Tensor grad_weight)");
  m.def("rotary(Tensor x, Tensor cos, Tensor sin, bool back=False) -> Tensor");
  m.def("swiglu(Tensor gate, Tensor up) -> Tensor");
  m.def("swiglu_backward(Tensor grad, Tensor gate, Tensor up) -> (Tensor grad_gate, Tensor grad_up)");
  m.def(
      "moe_route(Tensor logits, Tensor? correction_bias, Tensor? experts, int top_k, bool sigmoid=False, "
      "bool normalise=False,"
      " float scaling=1., int num_groups=1, int num_best_groups=1, bool softmax_over_chosen=False)"
      " -> (Tensor weights, Tensor experts)");
  m.def(
      "moe(Tensor x, Tensor weights, Tensor experts, Tensor gate_up, Tensor down, Tensor? gate_up_bias=None,"
      " Tensor? down_bias=None, float? clamp_limit=None, float clamp_alpha=1.702) -> Tensor");
  m.def(
      "moe_backward(Tensor grad, Tensor x, Tensor weights, Tensor experts, Tensor gate_up, Tensor down,"
      " Tensor? gate_up_bias, Tensor? down_bias, float? clamp_limit, float clamp_alpha, bool[6] output_mask)"
      " -> (Tensor grad_x, Tensor grad_weights, Tensor grad_gate_up, Tensor grad_down,"
      " Tensor grad_gate_up_bias, Tensor grad_down_bias)");
  m.def(
      "causal_conv1d(Tensor x, Tensor weight, Tensor? bias, Tensor prev, Tensor? tails, bool silu) -> "
      "Tensor");
  m.def(
      "causal_conv1d_backward(Tensor grad_y, Tensor x, Tensor weight, Tensor? bias, Tensor prev,"
      " Tensor? tails, bool silu)"
      " -> (Tensor grad_x, Tensor grad_weight, Tensor grad_bias, Tensor grad_tails)");
  m.def("causal_conv1d_tails(Tensor x, Tensor prev, Tensor? tails, Tensor ends, int taps) -> Tensor");
  m.def(
      "causal_conv1d_tails_backward(Tensor grad, Tensor prev, Tensor ends, SymInt? num_tails)"
      " -> (Tensor grad_x, Tensor grad_tails)");
  m.def(
      "gated_delta_rule(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor prev, Tensor? states,"
      " Tensor ends, int chunk_size=64) -> (Tensor out, Tensor end_states)");
  m.def(
      "gated_delta_rule_backward(Tensor? grad_out, Tensor? grad_end_states, Tensor q, Tensor k, Tensor v,"
      " Tensor g, Tensor beta, Tensor prev, Tensor? states, Tensor ends, int chunk_size)"
      " -> (Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_g, Tensor grad_beta, Tensor "
      "grad_states)");
  m.def(
      "ssm_scan(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor prev, Tensor? states,"
      " Tensor ends, int chunk_size=64) -> (Tensor out, Tensor end_states)");
  m.def(
      "ssm_scan_backward(Tensor? grad_out, Tensor? grad_end_states, Tensor x, Tensor dt, Tensor A, Tensor B,"
      " Tensor C, Tensor? D, Tensor prev, Tensor? states, Tensor ends, int chunk_size)"
      " -> (Tensor grad_x, Tensor grad_dt, Tensor grad_A, Tensor grad_B, Tensor grad_C, Tensor grad_D,"
      " Tensor grad_states)");
}
