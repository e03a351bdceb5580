"""What Transformers' classes have (5.23): modules by which a part of a block is computed again, and plans for TP."""

from __future__ import annotations

WITH_PARTS = (
    "CohereForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "GemmaForCausalLM", "GlmForCausalLM",
    "LlamaForCausalLM", "MistralForCausalLM", "Olmo2ForCausalLM", "OlmoForCausalLM", "Phi3ForCausalLM",
    "PhiForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "SmolLM3ForCausalLM", "Starcoder2ForCausalLM",
)  # fmt: skip
"""Classes whose blocks have ``self_attn`` and ``mlp``."""
TENSOR_PARALLEL = (
    "CohereForCausalLM", "GPTNeoXForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "GemmaForCausalLM",
    "LlamaForCausalLM", "MistralForCausalLM", "NemotronForCausalLM", "OlmoForCausalLM", "PhiForCausalLM",
    "Qwen2ForCausalLM", "Qwen3ForCausalLM", "SmolLM3ForCausalLM", "Starcoder2ForCausalLM",
)  # fmt: skip
"""Classes whose plan (``base_model_tp_plan``) divides every matrix and what it makes by heads and by width, so that one
all-reduce ends each branch. Those of GLM, Olmo 2 and Phi 3 gather a branch's tensors whole in between."""
