# SPDX-License-Identifier: Apache-2.0
"""Configs of small models, one for each family and way of writing it, and rows for them."""

import json
import random

from conftest import seed_of

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
COMMON = dict(
    hidden_act="silu",
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=61,
    max_position_embeddings=128,
    rms_norm_eps=1e-6,
    initializer_range=0.3,
)
# The gated norm makes much of the rounding of outputs that are almost 0, unless eps is large.
WELL_CONDITIONED = {"rms_norm_eps": 1e-2}
WITHOUT_ATTENTION = {
    "layer_norm_epsilon": 1e-2,
    **{key: COMMON[key] for key in ("hidden_act", "hidden_size", "num_hidden_layers", "vocab_size")},
    "initializer_range": 0.3,
}
# Without a pad_token_id, whose embedding Transformers does not train.
GRANITE = dict(
    mamba_n_heads=8,
    mamba_d_state=6,
    mamba_chunk_size=16,
    embedding_multiplier=3.0,
    attention_multiplier=0.4,
    residual_multiplier=0.7,
    logits_scaling=1.6,
    pad_token_id=None,
)
LINEAR_ATTENTION = dict(
    linear_conv_kernel_dim=4,
    linear_key_head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_value_head_dim=12,
)
MROPE = {"mrope_interleaved": True, "mrope_section": [2, 1, 1], "rope_type": "default"}
MODELS = {
    "llama": dict(model_type="llama", rope_theta=10000.0, tie_word_embeddings=True, **COMMON),
    "llama3-rope-v4": dict(
        model_type="llama",
        rope_theta=500.0,
        rope_scaling=LLAMA3_ROPE,
        tie_word_embeddings=False,
        attention_bias=True,
        mlp_bias=True,
        torch_dtype="float32",
        **COMMON,
    ),
    "llama3-rope-v5": dict(
        model_type="llama",
        rope_parameters={"rope_theta": 500.0, **LLAMA3_ROPE},
        tie_word_embeddings=False,
        dtype="float32",
        **COMMON,
    ),
    "qwen2": dict(model_type="qwen2", rope_theta=10000.0, tie_word_embeddings=True, **COMMON),
    "qwen3": dict(model_type="qwen3", rope_theta=10000.0, head_dim=16, tie_word_embeddings=False, **COMMON),
    "qwen3_5": dict(
        model_type="qwen3_5_text",
        head_dim=16,
        rope_parameters={"rope_theta": 500.0, "partial_rotary_factor": 0.5, **MROPE},
        tie_word_embeddings=False,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        **LINEAR_ATTENTION,
        **COMMON | WELL_CONDITIONED | {"num_hidden_layers": 3},
    ),
    # The text decoder of a model for text and images.
    "qwen3_5-composite": dict(
        model_type="qwen3_5",
        tie_word_embeddings=True,
        text_config=dict(
            model_type="qwen3_5_text",
            rope_parameters={"rope_theta": 10000.0, "partial_rotary_factor": 0.25, **MROPE},
            tie_word_embeddings=True,
            full_attention_interval=2,
            **LINEAR_ATTENTION,
            **COMMON | WELL_CONDITIONED,
        ),
    ),
    "qwen3_5_moe": dict(
        model_type="qwen3_5_moe_text",
        head_dim=16,
        rope_parameters={"rope_theta": 500.0, "partial_rotary_factor": 0.5, **MROPE},
        tie_word_embeddings=False,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=9,
        shared_expert_intermediate_size=7,
        **LINEAR_ATTENTION,
        **{key: value for key, value in COMMON.items() if key != "intermediate_size"}
        | WELL_CONDITIONED
        | {"num_hidden_layers": 3},
    ),
    "qwen3_next": dict(
        model_type="qwen3_next",
        head_dim=16,
        rope_theta=500.0,
        partial_rotary_factor=0.5,
        tie_word_embeddings=True,
        full_attention_interval=2,
        mlp_only_layers=[1],
        num_experts=6,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        moe_intermediate_size=10,
        shared_expert_intermediate_size=13,
        **LINEAR_ATTENTION,
        **COMMON | WELL_CONDITIONED | {"num_hidden_layers": 3},
    ),
    "granitemoehybrid": dict(
        model_type="granitemoehybrid",
        layer_types=["mamba", "attention", "mamba"],
        position_embedding_type="nope",
        num_local_experts=5,
        num_experts_per_tok=2,
        shared_intermediate_size=14,
        tie_word_embeddings=True,
        **GRANITE,
        **COMMON | WELL_CONDITIONED | {"num_hidden_layers": 3, "intermediate_size": 10},
    ),
    # As released: without experts, the keys of Transformers 4.
    "granitemoehybrid-dense": dict(
        model_type="granitemoehybrid",
        layers_block_type=["attention", "mamba"],
        position_embedding_type="rope",
        rope_theta=500.0,
        attention_bias=True,
        mamba_d_head=8,
        mamba_n_groups=2,
        mamba_proj_bias=True,
        mamba_conv_bias=False,
        time_step_limit=[0.05, 0.9],
        num_local_experts=0,
        shared_intermediate_size=36,
        init_method="mup",
        normalization_function="rmsnorm",
        tie_word_embeddings=False,
        **GRANITE,
        **COMMON | WELL_CONDITIONED,
    ),
    "mamba2": dict(
        model_type="mamba2",
        num_heads=8,
        head_dim=8,
        state_size=12,
        n_groups=2,
        chunk_size=16,
        time_step_limit=[0.0, {"__float__": "Infinity"}],
        tie_word_embeddings=False,
        **WITHOUT_ATTENTION,
    ),
    # Sizes that are no powers of two, all biases but the convolution's, an infinity as Python writes it.
    "mamba2-tied": dict(
        model_type="mamba2",
        expand=3,
        num_heads=6,
        head_dim=15,
        state_size=7,
        n_groups=1,
        conv_kernel=3,
        chunk_size=16,
        use_bias=True,
        use_conv_bias=False,
        norm_before_gate=True,
        residual_in_fp32=False,
        time_step_limit=[0.05, float("inf")],
        tie_word_embeddings=True,
        **WITHOUT_ATTENTION | {"hidden_size": 30},
    ),
    "qwen3_moe": dict(
        model_type="qwen3_moe",
        rope_theta=10000.0,
        tie_word_embeddings=True,
        num_experts=7,
        num_experts_per_tok=3,
        moe_intermediate_size=11,
        norm_topk_prob=True,
        **COMMON,
    ),
    "qwen3_moe-some-layers": dict(
        model_type="qwen3_moe",
        rope_theta=10000.0,
        tie_word_embeddings=False,
        num_local_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        mlp_only_layers=[0],
        attention_bias=True,
        **COMMON,
    ),
    "glm4_moe": dict(
        model_type="glm4_moe",
        rope_parameters={"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.5},
        tie_word_embeddings=False,
        n_routed_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=11,
        n_shared_experts=2,
        n_group=3,
        topk_group=2,
        routed_scaling_factor=1.5,
        attention_bias=True,
        use_qk_norm=True,
        **COMMON,
    ),
    "glm4_moe-plain": dict(
        model_type="glm4_moe",
        rope_theta=10000.0,
        partial_rotary_factor=0.25,
        head_dim=16,
        tie_word_embeddings=True,
        n_routed_experts=5,
        num_experts_per_tok=3,
        moe_intermediate_size=8,
        norm_topk_prob=False,
        first_k_dense_replace=0,
        **COMMON,
    ),
    # Limits and windows that many values reach.
    "gpt_oss": dict(
        model_type="gpt_oss",
        head_dim=16,
        num_local_experts=7,
        num_experts_per_tok=3,
        sliding_window=5,
        swiglu_limit=1.5,
        rope_parameters={"rope_theta": 500.0, "rope_type": "yarn", "factor": 4.0, "truncate": False,
                         "original_max_position_embeddings": 16},
        tie_word_embeddings=False,
        **COMMON | {"intermediate_size": 11, "num_hidden_layers": 3},
    ),
}

# Windows smaller than the trajectories, and types of rope.
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
WINDOWS_AND_ROPES = {
    "mistral": dict(model_type="mistral", sliding_window=4, head_dim=16, rope_theta=10000.0, **COMMON),
    "mistral-without-window": dict(
        model_type="mistral",
        sliding_window=None,
        rope_parameters={"rope_theta": 500.0, "mscale": 2.0, "mscale_all_dim": 1.0, **YARN},
        tie_word_embeddings=True,
        **COMMON,
    ),
    "qwen2-window": dict(
        model_type="qwen2",
        use_sliding_window=True,
        sliding_window=5,
        max_window_layers=1,
        rope_parameters={"rope_theta": 500.0, "rope_type": "linear", "factor": 3.0},
        **COMMON,
    ),
    "qwen3-layer-types": dict(
        model_type="qwen3",
        head_dim=16,
        use_sliding_window=True,
        sliding_window=3,
        layer_types=["sliding_attention", "full_attention"],
        rope_scaling={"truncate": False, "beta_fast": 8.0, "beta_slow": 2.0, **YARN},
        rope_theta=100.0,
        **COMMON,
    ),
    # Without its default of pad_token_id, whose embedding Transformers does not train.
    "olmo3": dict(model_type="olmo3", sliding_window=6, tie_word_embeddings=True, pad_token_id=None, **COMMON),
    "olmo3-ropes": dict(
        model_type="olmo3",
        sliding_window=2,
        layer_types=["full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {"rope_theta": 100.0, "attention_factor": 1.3, **YARN},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
        attention_bias=True,
        tie_word_embeddings=False,
        pad_token_id=None,
        **COMMON,
    ),
    "gpt_oss-tied": dict(
        model_type="gpt_oss",
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=3,
        swiglu_alpha=1.5,
        layer_types=["full_attention", "sliding_attention"],
        attention_bias=False,
        tie_word_embeddings=True,
        **COMMON | {"intermediate_size": 9, "num_key_value_heads": 1},
    ),
}

# Families of the trainer whose layers have the parts of others. pad_token_id is null where it has a default.
NEMOTRON = {key: value for key, value in COMMON.items()
            if key not in ("hidden_act", "num_hidden_layers", "rms_norm_eps")}  # fmt: skip
WITHOUT_ACTIVATION = {key: value for key, value in COMMON.items() if key != "hidden_act"}
GEMMA = dict(head_dim=16, sliding_window=4, query_pre_attn_scalar=7, rope_theta=500.0, tie_word_embeddings=True,
             pad_token_id=None, **WITHOUT_ACTIVATION | {"num_hidden_layers": 3})  # fmt: skip
GEMMA_WITH_BIASES = dict(head_dim=8, sliding_window=3, layer_types=["full_attention", "sliding_attention"],
                         hidden_activation="gelu_pytorch_tanh", attention_bias=True, tie_word_embeddings=False,
                         pad_token_id=None, **WITHOUT_ACTIVATION)  # fmt: skip
MORE_FAMILIES = {
    "olmo2": dict(
        model_type="olmo2",
        rope_theta=500.0,
        attention_bias=True,
        tie_word_embeddings=False,
        pad_token_id=None,
        **COMMON,
    ),
    "smollm3": dict(
        model_type="smollm3",
        no_rope_layer_interval=2,
        attention_bias=True,
        mlp_bias=True,
        pretraining_tp=2,
        tie_word_embeddings=False,
        pad_token_id=None,
        **COMMON | {"num_hidden_layers": 3},
    ),
    # Windows in layers without rope, the first one included.
    "smollm3-window": dict(
        model_type="smollm3",
        no_rope_layers=[0, 1, 1],
        use_sliding_window=True,
        sliding_window=4,
        rope_theta=100.0,
        tie_word_embeddings=True,
        pad_token_id=None,
        **COMMON | {"num_hidden_layers": 3},
    ),
    "seed_oss": dict(
        model_type="seed_oss",
        head_dim=16,
        rope_theta=500.0,
        attention_dropout=0.0,
        residual_dropout=0.0,
        attention_out_bias=True,
        tie_word_embeddings=False,
        pad_token_id=None,
        **COMMON,
    ),
    "ernie4_5": dict(model_type="ernie4_5", head_dim=16, tie_word_embeddings=True, pad_token_id=None, **COMMON),
    "ernie4_5-biases": dict(
        model_type="ernie4_5",
        head_dim=None,
        use_bias=True,
        rope_parameters={"rope_theta": 500.0, **YARN},
        tie_word_embeddings=False,
        pad_token_id=None,
        **COMMON,
    ),
    "granite": dict(
        model_type="granite",
        rope_theta=500.0,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        **{key: value for key, value in GRANITE.items() if not key.startswith("mamba")},
        **COMMON,
    ),
    "mixtral": dict(
        model_type="mixtral",
        head_dim=16,
        num_local_experts=5,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
        **COMMON | {"intermediate_size": 11},
    ),
    "mixtral-window": dict(
        model_type="mixtral",
        sliding_window=4,
        rope_theta=500.0,
        num_local_experts=4,
        num_experts_per_tok=3,
        tie_word_embeddings=True,
        **COMMON | {"intermediate_size": 10},
    ),
    "ministral": dict(
        model_type="ministral",
        head_dim=16,
        sliding_window=5,
        layer_types=["full_attention", "sliding_attention"],
        rope_theta=500.0,
        tie_word_embeddings=False,
        **COMMON,
    ),
    "exaone4": dict(
        model_type="exaone4",
        sliding_window=4,
        sliding_window_pattern=2,
        rope_parameters={"rope_theta": 500.0, **LLAMA3_ROPE},
        tie_word_embeddings=False,
        **COMMON | {"num_hidden_layers": 3},
    ),
    "exaone4-full": dict(
        model_type="exaone4",
        head_dim=16,
        sliding_window=None,
        layer_types=["full_attention", "full_attention"],
        rope_theta=500.0,
        tie_word_embeddings=True,
        **COMMON,
    ),
    "phi3": dict(model_type="phi3", rope_theta=500.0, tie_word_embeddings=False, pad_token_id=None, **COMMON),
    "phi3-window": dict(
        model_type="phi3",
        head_dim=16,
        sliding_window=5,
        partial_rotary_factor=0.75,
        original_max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=None,
        **COMMON,
    ),
    "gemma3_text": dict(
        model_type="gemma3_text",
        sliding_window_pattern=2,
        rope_local_base_freq=50.0,
        rope_scaling={"rope_type": "linear", "factor": 3.0},
        **GEMMA,
    ),
    "gemma3_text-biases": dict(
        model_type="gemma3_text",
        rope_parameters={"full_attention": {"rope_theta": 300.0, "rope_type": "default"},
                         "sliding_attention": {"rope_theta": 70.0, "rope_type": "default"}},
        **GEMMA_WITH_BIASES,
    ),
    "gemma2": dict(model_type="gemma2", attn_logit_softcapping=0.4, final_logit_softcapping=2.0, **GEMMA),
    "gemma2-layers": dict(
        model_type="gemma2", attn_logit_softcapping=0.7, final_logit_softcapping=None, **GEMMA_WITH_BIASES
    ),
    "gemma": dict(
        model_type="gemma",
        hidden_act="gelu_pytorch_tanh",
        head_dim=16,
        rope_theta=500.0,
        tie_word_embeddings=True,
        pad_token_id=None,
        **WITHOUT_ACTIVATION | {"num_key_value_heads": 1},
    ),
    # Steps that their limit reaches, and a width that is no multiple of the hidden size.
    "nemotron_h": dict(
        model_type="nemotron_h",
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe"],
        head_dim=8,
        mamba_num_heads=6,
        mamba_head_dim=7,
        ssm_state_size=5,
        n_groups=2,
        chunk_size=16,
        time_step_min=0.3,
        time_step_max=0.9,
        moe_intermediate_size=10,
        moe_shared_expert_intermediate_size=14,
        n_routed_experts=6,
        num_experts_per_tok=2,
        n_group=3,
        topk_group=2,
        routed_scaling_factor=1.7,
        layer_norm_epsilon=1e-2,
        tie_word_embeddings=False,
        **NEMOTRON,
    ),
    # As released: the keys of Transformers 4, layers as letters. All biases but the convolution's.
    "nemotron_h-dense": dict(
        model_type="nemotron_h",
        auto_map={"AutoConfig": "configuration_nemotron_h.NemotronHConfig"},
        hybrid_override_pattern="M-*M-",
        num_hidden_layers=5,
        head_dim=16,
        attention_head_dim=16,
        expand=2,
        mamba_num_heads=4,
        mamba_head_dim=9,
        ssm_state_size=6,
        n_groups=1,
        conv_kernel=3,
        time_step_limit=[0.0, float("inf")],
        use_bias=True,
        use_conv_bias=False,
        mlp_bias=True,
        rescale_prenorm_residual=False,
        residual_in_fp32=True,
        layer_norm_epsilon=1e-2,
        torch_dtype="float32",
        tie_word_embeddings=False,
        **NEMOTRON,
    ),
    # The norms of projections of low rank have their own eps.
    "deepseek_v3": dict(
        model_type="deepseek_v3",
        q_lora_rank=12,
        kv_lora_rank=10,
        qk_nope_head_dim=6,
        qk_rope_head_dim=4,
        v_head_dim=7,
        rope_parameters={"rope_theta": 500.0, "mscale": 0.7, "mscale_all_dim": 1.3, **YARN},
        attention_bias=True,
        n_routed_experts=6,
        n_shared_experts=2,
        num_experts_per_tok=2,
        moe_intermediate_size=11,
        n_group=3,
        topk_group=2,
        routed_scaling_factor=1.5,
        first_k_dense_replace=1,
        tie_word_embeddings=False,
        **COMMON | WELL_CONDITIONED | {"num_hidden_layers": 3, "num_key_value_heads": 4},
    ),
    # As released, with the keys of Transformers 4; queries of full rank, values as wide as keys.
    "deepseek_v3-plain": dict(
        model_type="deepseek_v3",
        auto_map={"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        q_lora_rank=None,
        kv_lora_rank=9,
        qk_nope_head_dim=4,
        qk_rope_head_dim=6,
        v_head_dim=10,
        rope_interleave=False,
        rope_theta=100.0,
        rope_scaling={"type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0, "factor": 4.0,
                      "original_max_position_embeddings": 16},
        n_routed_experts=5,
        num_experts_per_tok=3,
        moe_intermediate_size=8,
        n_group=1,
        topk_group=1,
        norm_topk_prob=False,
        moe_layer_freq=1,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        first_k_dense_replace=0,
        tie_word_embeddings=True,
        **COMMON | {"num_key_value_heads": 4},
    ),
}  # fmt: skip


def random_rows(seed, kind):
    """Trajectories that branch, end inside one another, repeat, and stand alone."""
    rng = random.Random(seed_of(seed))
    tokens = lambda n: [rng.randrange(61) for _ in range(n)]
    trunk = tokens(7)
    left, right = trunk + tokens(5), trunk + tokens(4)
    sequences = [left + tokens(3), left + tokens(6), left, right + tokens(1), trunk, right, right, tokens(9), tokens(1)]
    rows = []
    for index, ids in enumerate(sequences):
        row = {"input_ids": ids, "trajectory_id": f"t{index}"}
        if index % 3 == 0:
            row["loss_mask"] = [rng.randrange(2) for _ in ids]
        elif index % 3 == 1:
            row["loss_weights"] = [round(rng.random(), 3) for _ in ids]
        if kind == "grpo":
            row["advantage"] = rng.uniform(-2, 2)
            if index % 2 == 0:
                row["logprobs"] = [None] + [rng.uniform(-6, -1) for _ in ids[1:]]
        rows.append(row)
    return rows


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
