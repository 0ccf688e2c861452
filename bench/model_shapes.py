# SPDX-License-Identifier: Apache-2.0
"""Configurations of models with random weights that benches make."""

# The proportions of Qwen3-0.6B, with fewer layers and a smaller vocabulary.
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "hidden_size": 1024,
    "intermediate_size": 3072, "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "vocab_size": 16384, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0, "tie_word_embeddings": True, "attention_bias": False, "attention_dropout": 0.0,
    "initializer_range": 0.02,
}  # fmt: skip

# The same with experts in the proportions of Qwen3-30B-A3B, a quarter as many: the active ones are as wide as the
# dense model's MLP.
QWEN3_MOE = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 32, "num_experts_per_tok": 8,
    "moe_intermediate_size": 384, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip

# The proportions of the text decoder of Qwen3.5-0.8B: three layers of Gated DeltaNet, then one of attention.
QWEN3_5 = {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_act": "silu", "hidden_size": 1024,
    "intermediate_size": 3584, "num_hidden_layers": 4, "full_attention_interval": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 16,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "vocab_size": 16384,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "attention_bias": False,
    "attention_dropout": 0.0, "initializer_range": 0.02, "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25,
        "mrope_interleaved": True, "mrope_section": [11, 11, 10],
    },
}  # fmt: skip

# SmolLM2-135M, whose weights need not be fetched where only time counts.
SMOLLM2_135M = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 576,
    "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "head_dim": 64, "vocab_size": 49152, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 100000.0,
    "tie_word_embeddings": True, "attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False,
    "initializer_range": 0.041666666666666664,
}  # fmt: skip

SHAPES = {"smollm2_135m": SMOLLM2_135M, "qwen3": QWEN3, "qwen3_5": QWEN3_5, "qwen3_moe": QWEN3_MOE}
