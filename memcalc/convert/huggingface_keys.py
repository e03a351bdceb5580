"""The keys of a config.json: each is taken with its type checked, and what nobody took is told by name."""

from __future__ import annotations

from collections.abc import Mapping

from memcalc.errors import InputError, UnknownNameError

LARGEST = 2**31 - 1

_ABOUT_THE_FILE = {
    "architectures", "attn_impl", "attn_implementation", "auto_map", "chunk_size_feed_forward", "dtype",
    "flash_attn", "id2label", "init_device", "is_decoder", "is_encoder_decoder", "label2id", "max_length",
    "model_type", "num_labels", "pretraining_tp", "problem_type", "return_dict", "task_specific_params",
    "tokenizer_class", "torch_dtype", "torchscript", "transformers_version", "use_cache", "use_return_dict",
}  # fmt: skip
"""About the file, its class and how it is run."""
_SCALES = {
    "alibi_bias_max", "attention_multiplier", "attention_softmax_in_fp32", "clip_qkv", "embedding_multiplier",
    "initial_context_length", "logit_scale", "logit_scale_init_value", "logits_scaling",
    "original_max_position_embeddings", "partial_rotary_factor", "query_pre_attn_scalar",
    "relative_attention_max_distance", "residual_multiplier", "rope_interleave", "rope_local_base_freq",
    "rope_parameters", "rope_scaling", "rope_theta", "rotary_emb_base", "rotary_pct",
    "scale_attention_softmax_in_fp32", "scale_attn_by_inverse_layer_idx", "scale_attn_weights",
    "scale_decoder_outputs", "scale_embedding", "softmax_scale", "swiglu_alpha", "swiglu_limit",
}  # fmt: skip
"""Rotary embeddings, multipliers and clipping: numbers that scale, with no tensor of their own."""
_ROUTING = {
    "aux_loss_alpha", "ep_size", "experts_per_token", "n_group", "norm_topk_prob", "scoring_func", "seq_aux",
    "topk_group", "topk_method",
}  # fmt: skip
"""Routing: which expert, not how large."""
_WITHOUT_SIZE = {
    "apply_residual_connection_post_layernorm", "attn_type", "attn_uses_sequence_id", "dense_act_fn",
    "embedding_fraction", "encoder_stride", "is_gated_act", "learned_pos_emb", "masked_softmax_fusion",
    "max_window_layers", "n_ctx", "no_rope_layer_interval", "no_rope_layers", "norm_type", "num_mtp_layers",
    "num_nextn_predict_layers", "offset_alibi", "position_embedding_type", "prefix_lm", "qk_head_dim",
    "rotary_dim", "slow_but_exact", "use_sliding_window",
}  # fmt: skip
"""Layers that no model class builds, or that differ in nothing that has a size."""
_OTHER_HEADS = {
    "apply_spec_augment", "begin_suppress_tokens", "classifier_dropout", "classifier_proj_size",
    "forced_decoder_ids", "gradient_checkpointing", "layerdrop", "median_filter_width", "suppress_tokens",
    "use_weighted_layer_sum",
}  # fmt: skip
"""Other heads' dropout; spectrogram masks, generation."""
_GENERATION = {
    "bad_words_ids", "cross_attention_hidden_size", "diversity_penalty", "do_sample", "early_stopping",
    "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "finetuning_task", "length_penalty",
    "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences", "prefix",
    "pruned_heads", "remove_invalid_values", "repetition_penalty", "return_dict_in_generate", "sep_token",
    "temperature", "tf_legacy_loss", "tie_encoder_decoder", "top_k", "top_p", "typical_p", "use_bfloat16",
}  # fmt: skip
"""What older versions wrote about sampling into every config."""
_UNREAD = {
    "bias_dropout_fusion", "cache_implementation", "full_attn_mod", "inference_runner", "init_config",
    "interpolate_factor", "max_batch_size", "max_sequence_length", "pad_key_length", "pre_allocate_kv_cache",
    "skip_bias_add", "skip_bias_add_qkv", "sliding_window_size", "use_mrope", "validate_runner_input",
    "verbose", "z_loss_weight",
}  # fmt: skip
"""In configs of the Hub, but read by no model class: left over from the training code, or about inference."""
_HARMLESS = frozenset({*_UNREAD, *_GENERATION, *_ABOUT_THE_FILE, *_SCALES, *_ROUTING, *_WITHOUT_SIZE, *_OTHER_HEADS})
_HARMLESS_STARTS = ("_", "init_std", "initializer", "summary_", "output_", "mask_time", "mask_feature", "router_jitter")
_HARMLESS_ENDS = ("_token_id", "_token_index", "_eps", "_epsilon", "_jitter_noise", "_scaling_factor", "_layerdrop",
                  "_loss_coef")  # fmt: skip


def harmless(key: str) -> bool:
    """Return whether `key` changes neither parameters nor activations of the model itself.

    >>> harmless("bos_token_id"), harmless("extra_layers")
    (True, False)
    """
    return key in _HARMLESS or key.startswith(_HARMLESS_STARTS) or key.endswith(_HARMLESS_ENDS)


class Keys:
    """A table of a config.json; every key that is asked for counts as understood.

    A key may have several names, as Transformers takes `hidden_size` for GPT-2's `n_embd`; the first one that is there
    wins. A key that is there with the value null is null, not its default: so does Transformers read it.
    """

    def __init__(self, data: Mapping[str, object], where: str = "") -> None:
        self._data = data
        self._where = where
        self._taken: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return key in self._data

    def get(self, names: str, default: object = None) -> object:
        """Return the value of the first of the space-separated `names` that is there, unchecked."""
        found: object = default
        for name in reversed(names.split()):
            self._taken.add(name)
            found = self._data.get(name, found)
        return found

    def size(self, names: str, default: int | None = None, low: int = 1) -> int:
        """Return a whole number of at least `low`; one without default must be there."""
        value = self.maybe(names, default, low)
        if value is None:
            raise self._wrong(names, None, "must be given, as a whole number")
        return value

    def maybe(self, names: str, default: int | None = None, low: int = 1) -> int | None:
        """Return a whole number of at least `low`, or None where the key is null or absent without default."""
        value = self.get(names, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= LARGEST:
            raise self._wrong(names, value, f"must be a whole number from {low} to {LARGEST}")
        return value

    def flag(self, names: str, default: bool = False) -> bool:
        """Return a truth value; null is false."""
        value = self.get(names, default)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self._wrong(names, value, "must be true or false")
        return value

    def rate(self, names: str, default: float = 0.0) -> float:
        """Return a probability below 1; null is 0."""
        value = self.get(names, default)
        if value is None:
            return 0.0
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:  # NaN fails here
            raise self._wrong(names, value, "must be a number from 0 to below 1")
        return float(value)

    def fraction(self, names: str, default: float) -> float:
        """Return a number above 0 and up to 1."""
        value = self.get(names, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
            raise self._wrong(names, value, "must be a number above 0, at most 1")
        return float(value)

    def text(self, names: str, default: str) -> str:
        """Return a text; null is the default."""
        value = self.get(names)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self._wrong(names, value, "must be a text")
        return value

    def words(self, name: str) -> list[str] | None:
        """Return a list of texts, or None."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise self._wrong(name, value, "must be a list of texts")
        return list(value)

    def table(self, name: str) -> Keys | None:
        """Return a nested table, or None."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            raise self._wrong(name, value, "must be an object")
        return Keys(value, f"{self._where}{name}.")

    def only(self, name: str, *allowed: object) -> None:
        """Refuse a key whose value changes the model in a way that is not modelled; null and absence are fine."""
        value = self.get(name)
        if value is not None and not any(type(value) is type(one) and value == one for one in allowed):
            said = " or ".join(str(one).lower() if isinstance(one, bool) else str(one) for one in allowed)
            raise self._wrong(name, value, f"only {said} is modelled")

    def activation(self, names: str, default: str) -> str:
        """Return how the activation is computed: its kernel's name, or `…_python` where it is written op by op."""
        name = self.text(names, default)
        if name not in ACTIVATIONS:
            allowed = f"must be one of {', '.join(ACTIVATIONS)}"
            raise UnknownNameError(f"config key {self._where}{names.split(maxsplit=1)[0]}", name, allowed, ACTIVATIONS)
        return ACTIVATIONS[name]

    def refuse_rest(self) -> None:
        """Refuse the first key that nobody took and that is not known to be harmless."""
        for key, value in self._data.items():
            if key not in self._taken and not harmless(key) and value is not None:
                allowed = "it may change the memory, and is not understood for this model_type"
                raise UnknownNameError("config key", self._where + key, allowed, self._taken)

    def _wrong(self, names: str, value: object, allowed: str) -> InputError:
        present = [name for name in names.split() if name in self._data] or names.split()
        return InputError(f"config key {self._where}{present[0]}", value, allowed)


ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_python",
    "gelu_fast": "gelu_python",
    "gelu_python": "gelu_python",
    "gelu_accurate": "gelu_python",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
}
"""Transformers' names (activations.py, ACT2FN), and how the class behind each computes."""
