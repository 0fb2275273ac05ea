"""The parts of config.json that say how large a model is, of real and of small models."""

from typing import Any

QWEN25_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
QWEN25_05B = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
LLAMA_70B = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "vocab_size": 500,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SMALL},
    "llama with biases": {"model_type": "llama", **SMALL, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "llama with its own head size": {"model_type": "llama", **SMALL, "head_dim": 32},
    "mistral": {"model_type": "mistral", **SMALL},
    "qwen2": {"model_type": "qwen2", **SMALL},
    "qwen2.5 0.5B": QWEN25_05B,
    "qwen2.5 7B": QWEN25_7B,
    "llama 70B": LLAMA_70B,
    "qwen3": {"model_type": "qwen3", **SMALL, "head_dim": 32, "tie_word_embeddings": True},
    "qwen3 with biases": {"model_type": "qwen3", **SMALL, "head_dim": 32, "attention_bias": True},
    "mixtral": {"model_type": "mixtral", **SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        **{"model_type": "qwen3_moe", **SMALL, "head_dim": 32},
        **{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "decoder_sparse_step": 2, "mlp_only_layers": [1]},
    },
    "qwen3_moe, all sparse": {
        **{"model_type": "qwen3_moe", **SMALL, "head_dim": 32},
        **{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "decoder_sparse_step": 1, "mlp_only_layers": []},
    },
    "qwen2_moe": {
        **{"model_type": "qwen2_moe", **SMALL, "decoder_sparse_step": 1, "mlp_only_layers": [0], "shared_expert_intermediate_size": 96},
        **{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    },
    "deepseek_v2": {
        **{"model_type": "deepseek_v2", **SMALL, "q_lora_rank": None, "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8},
        **{"v_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_shared_experts": 2},
        **{"first_k_dense_replace": 1},
    },
    "deepseek_v3": {
        **{"model_type": "deepseek_v3", **SMALL, "q_lora_rank": 20, "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8},
        **{"v_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_shared_experts": 1},
        **{"first_k_dense_replace": 2, "n_group": 2, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    },
    "glm4_moe": {
        **{"model_type": "glm4_moe", **SMALL, "head_dim": 16, "attention_bias": True, "use_qk_norm": True, "first_k_dense_replace": 1},
        **{"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_shared_experts": 1},
    },
    "glm4_moe_lite": {
        **{"model_type": "glm4_moe_lite", **SMALL, "q_lora_rank": 20, "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8},
        **{"v_head_dim": 32, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_shared_experts": 1},
        **{"attention_bias": True, "first_k_dense_replace": 1, "num_key_value_heads": 4},
    },
    "the quickstart's model": {
        **{"model_type": "qwen2", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "vocab_size": 67, "tie_word_embeddings": True},
    },
}
