"""What a stack of Python frames says: which phase ran, and what was being made."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Frame", "Reading", "own_site", "read_stack", "site_of"]

_LIBRARY = re.compile(
    r"(site|dist)-packages/|/lib/python3[^/]*/|^<|/torch/(nn|autograd|optim|utils|_ops|_tensor|functional|distributed)"
)


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame of a stack; ``code`` is its source line, where it is known."""

    file: str
    line: int
    name: str
    code: str = ""

    @property
    def text(self) -> str:
        """What the patterns are matched with."""
        return f"{self.file}:{self.name}:{self.code}"

    @property
    def short(self) -> str:
        """The frame as it is shown.

        >>> Frame("/job/train.py", 7, "step").short
        'train.py:7 in step'
        """
        return f"{self.file.replace(chr(92), '/').rpartition('/')[2]}:{self.line} in {self.name}"


@dataclass(frozen=True, slots=True)
class Reading:
    """What a stack says."""

    phase: str = ""
    """loading, data, forward, loss, backward, recompute, gather, optimizer, evaluation, generation or setup."""
    evidence: Frame | None = None
    making: str = ""
    """What was being made: logits, attention scores, optimizer states, predictions, kv cache …; empty if not known."""
    evaluating: bool = False
    without_grad: bool = False
    """A decorator that switches gradients off is on the stack."""


_PHASES = (
    ("gather", r"_unshard|unshard\(|foreach_all_gather|_all_gather_params|all_gather_into|all_gather\(|all_gather_base"
        r"|fetch_sub_module|_alloc_padded_unsharded|allgather|summon_full_params|GatheredParameters"),
    ("backward", r"torch/autograd/__init__\.py:backward|_engine_run_backward|torch/_tensor\.py:backward|\.backward\("),
    ("loss", r"functional\.py:(cross_entropy|nll_loss|log_softmax|kl_div)|nn/modules/loss\.py|loss_utils\.py"
        r"|cross_entropy|fused_linear|log_softmax|compute_log_probs|:compute_loss\w*:.*(logits|loss_fct|criterion)"),
    ("loading", r":from_pretrained:|load_state_dict|set_module_tensor_to_device|torch/serialization\.py|:load_checkpoint"
        r"|modeling_utils\.py:_load|module\.py:(_apply|to|cuda|half|convert)\b|:load_model|torch\.load\(|reset_parameters"
        r"|torch/nn/modules/\w+\.py:__init__|:init_weights"),
    ("setup", r"_ddp_init_helper|nn/parallel/distributed\.py:__init__|cuda/__init__\.py:_lazy_init|init_process_group"
        r"|deepspeed.*:initialize|fully_sharded_data_parallel\.py:__init__|:_setup_for_real|initialize_optimizer_states"),
    ("data", r"torch/utils/data/|pin_memory|:_prepare_inputs?|send_to_device|:collate"),
    ("forward", r"nn/modules/module\.py:_?(wrapped_)?call_impl|:forward:|:__call__:|:forward_step"),
)  # fmt: skip
_OPTIMIZER = re.compile(
    r"torch/optim/(?!lr_scheduler|optimizer\.py)\w+\.py:|bitsandbytes/optim|apex/optimizers|deepspeed/ops/\w*adam"
    r"|:_multi_tensor_|:_single_tensor_|optimizers?[/.]\w*\.py:step|optim/\w+\.py:step|:_init_group|low_level_optim"
    r"|zero/stage\w*\.py:step|distrib_optimizer|fused_optimizer|_take_model_step"
)
_RECOMPUTE = re.compile(r"torch/utils/checkpoint\.py:(recompute_fn|backward|unpack\w*|inner|_recompute)|activation_checkpointing/\w+\.py:backward|/random\.py:backward")  # noqa: E501
_EVALUATION = re.compile(r":(evaluate|evaluation_loop|prediction_loop|prediction_step|predict|validate|validation\w*|valid|eval|eval_\w+|val_\w+|test_step|_evaluate|run_evaluation|do_eval|validation_step|evaluate_\w+|val|run_validation|validate_\w+|inference):")  # noqa: E501
_GENERATION = re.compile(r"generation/utils\.py|:generate:|:(greedy_search|beam_search|_sample|_beam_search):|\.generate\(")
_NO_GRAD = re.compile(r":decorate_context:|grad_mode\.py|inference_mode")
_OWN_LOOPS = re.compile(
    r"transformers/trainer(_seq2seq)?\.py:(prediction_step|prediction_loop|evaluation_loop|evaluate)|lightning"
)
_KINDS = tuple((name, re.compile(pattern)) for name, pattern in _PHASES)
_MAKING = tuple((name, re.compile(pattern)) for name, pattern in (
    ("predictions", r"nested_concat|preds_host|all_preds|preds = |:pad_across_processes|torch\.cat\(\(?(pred|preds|all_)"),
    ("optimizer states", r":_init_group:|(exp_avg|exp_avg_sq|momentum_buffer|max_exp_avg_sq)\W.*(zeros|empty|clone)"
        r"|:init_state|zeros_like\(p|initialize_optimizer_states|full_precision_copy|single_partition_of_fp32"
        r"|state\[.*\] = torch\.(zeros|empty)"),
    ("optimizer temporaries", r":_multi_tensor_\w+:|_foreach_"),
    ("logits", r"cross_entropy|log_softmax|[lL]ogits|lm_head|LMLoss|loss_utils\.py|nll_loss|compute_log_probs|output_layer"
        r"|logsumexp|logps|embed_out"),
    ("attention mask", r"get_full_mask|causal_mask|_make_causal|attention_mask|attn_mask|_expand_mask|alibi"),
    ("attention scores", r"attn_weights|attention_scores|attention_probs|eager_attention|unfused_attention|attn_scores"
        r"|:unfused|baddbmm\(|matmul\((q|query)|q(uery)? ?@ ?k|scores = |attn = attn\.softmax|matmul_result = "),
    ("kv cache", r"cache_utils\.py|key_cache|kv_cache|past_key_value"),
    ("gathered weights", r"_unshard|unshard\(|foreach_all_gather|all_gather_params|fetch_sub_module|_alloc_padded_unsharded"),
    ("gradient buckets", r"_ddp_init_helper|Reducer\(|GradBucket|_allreduce_bucket|reduce_ipg_grads|ParamAndGradBuffer"),
))  # fmt: skip
_DEEP = 6
"""Innermost frames that say what is being made: further out a line may run for other reasons."""


def read_stack(frames: Sequence[Frame]) -> Reading:
    """Return what a stack says; the innermost frame is the first.

    The innermost sign of a phase counts, since a loop that evaluates or steps calls all else. A forward inside of a
    checkpoint's backward is a recomputation.
    """
    if not frames:
        return Reading()
    texts = [frame.text for frame in frames]
    evaluating = _first(_EVALUATION, texts)
    generating = _first(_GENERATION, texts)
    quiet = any(map(_NO_GRAD.search, texts)) or any(map(_OWN_LOOPS.search, texts))
    phase, at = _phase(texts)
    making = next((name for text in texts[:_DEEP] for name, sign in _MAKING if sign.search(text)), "")
    if generating is not None and phase in {"", "forward", "data", "loss"}:
        phase, at = "generation", generating
    elif evaluating is not None and phase not in {"loading", "optimizer", "backward"}:
        phase, at = "evaluation", evaluating
    if making.startswith("optimizer") and phase != "optimizer":
        making = ""
    return Reading(phase, frames[at] if phase else None, making, evaluating is not None, quiet)


def _phase(texts: list[str]) -> tuple[str, int]:
    """The phase of the innermost sign, and where that stands."""
    recompute, optimizer = _first(_RECOMPUTE, texts), _first(_OPTIMIZER, texts)
    found = sorted((at, order, name) for order, (name, sign) in enumerate(_KINDS) if (at := _first(sign, texts)) is not None)
    if optimizer is not None and (not found or optimizer <= found[0][0]):
        return "optimizer", optimizer
    if recompute is not None:
        backward = next((at for at, _, name in found if name == "backward"), None)
        if backward is not None and backward >= recompute:
            return "recompute", recompute
    if not found:
        return "", 0
    at, _, name = found[0]
    return name, at


def _first(sign: re.Pattern[str], texts: Iterable[str]) -> int | None:
    return next((at for at, text in enumerate(texts) if sign.search(text)), None)


def own_site(frames: Sequence[Frame]) -> Frame | None:
    """The innermost frame of the program's own code: neither the standard library's nor an installed package's."""
    return next((frame for frame in frames if not _LIBRARY.search(frame.file.replace("\\", "/"))), None)


def site_of(frames: Sequence[Frame]) -> str:
    """Return a call site as it is shown: the innermost frame, and the own line that led there.

    >>> site_of([Frame("/x/site-packages/torch/nn/functional.py", 3, "linear"), Frame("/job/a.py", 7, "forward")])
    'a.py:7 in forward (functional.py:3 in linear)'
    """
    if not frames:
        return "no Python frame"
    own = own_site(frames)
    inner = frames[0]
    if own is None or own is inner:
        return inner.short
    return f"{own.short} ({inner.short})"
