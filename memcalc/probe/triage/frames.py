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


def _any(*parts: str) -> re.Pattern[str]:
    """One pattern for any of several signs."""
    return re.compile("|".join(parts))


_PHASES = (
    ("gather", _any(
        r"unshard\(", r"_unshard\b", "foreach_all_gather", "_all_gather_params", r"all_?gather\w*\(",
        "fetch_sub_module", "_alloc_padded_unsharded", "summon_full_params", "GatheredParameters",
    )),
    ("backward", _any(
        r"torch/autograd/__init__\.py:backward", "_engine_run_backward", r"torch/_?tensor\.py:backward",
        r"\.backward\(",
    )),
    ("loss", _any(
        r"functional\.py:(cross_entropy|nll_loss|log_softmax|kl_div)", r"nn/modules/loss\.py", r"loss_utils\.py",
        "cross_entropy", "fused_linear", "log_softmax", "compute_log_probs",
        r":compute_loss\w*:.*(logits|loss_fct|criterion)",
    )),
    ("loading", _any(
        ":from_pretrained:", "load_state_dict", "set_module_tensor_to_device", r"torch/serialization\.py",
        ":load_checkpoint", r"modeling_utils\.py:_load", r"module\.py:(_apply|to|cuda|half|convert)\b", ":load_model",
        r"torch\.load\(", "reset_parameters", r"torch/nn/modules/\w+\.py:__init__", ":init_weights",
    )),
    ("setup", _any(
        "_ddp_init_helper", r"nn/parallel/distributed\.py:__init__", r"cuda/__init__\.py:_lazy_init",
        "init_process_group", "deepspeed.*:initialize", r"fully_sharded_data_parallel\.py:__init__", ":_setup_for_real",
        "initialize_optimizer_states",
    )),
    ("data", _any("torch/utils/data/", "pin_memory", ":_prepare_inputs?", "send_to_device", ":collate")),
    ("forward", _any(
        r"nn/modules/module\.py:_?(wrapped_)?call_impl", ":forward:", ":__call__:", ":forward_step",
    )),
)  # fmt: skip
_OPTIMIZER = _any(
    r"torch/optim/(?!lr_scheduler|optimizer\.py)\w+\.py:",
    "bitsandbytes/optim",
    "apex/optimizers",
    r"deepspeed/ops/\w*adam",
    ":_multi_tensor_",
    ":_single_tensor_",
    r"optimizers?[/.]\w*\.py:step",
    r"optim/\w+\.py:step",
    ":_init_group",
    "low_level_optim",
    r"zero/stage\w*\.py:step",
    "distrib_optimizer",
    "fused_optimizer",
    "_take_model_step",
)
_RECOMPUTE = _any(
    r"torch/utils/checkpoint\.py:(recompute_fn|backward|unpack\w*|inner|_recompute)",
    r"activation_checkpointing/\w+\.py:backward",
    r"/random\.py:backward",
)
_EVALUATION = re.compile(
    r":(_?evaluate|evaluate_\w+|evaluation_loop|prediction_loop|prediction_step|predict|validate|validate_\w+"
    r"|validation\w*|valid|val|eval|eval_\w+|val_\w+|test_step|run_evaluation|run_validation|do_eval|inference):"
)
_GENERATION = _any(
    r"generation/utils\.py", ":generate:", ":(greedy_search|beam_search|_sample|_beam_search):", r"\.generate\("
)
_NO_GRAD = _any(":decorate_context:", r"grad_mode\.py", "inference_mode")
_OWN_LOOPS = _any(
    r"transformers/trainer(_seq2seq)?\.py:(prediction_step|prediction_loop|evaluation_loop|evaluate)", "lightning"
)
"""Loops of libraries that switch gradients off themselves."""
_MAKING = (
    ("predictions", _any(
        "nested_concat", "preds_host", "all_preds", "preds = ", ":pad_across_processes",
        r"torch\.cat\(\(?(pred|preds|all_)",
    )),
    ("optimizer states", _any(
        ":_init_group:", r"(exp_avg|exp_avg_sq|momentum_buffer|max_exp_avg_sq)\W.*(zeros|empty|clone)", ":init_state",
        r"zeros_like\(p", "initialize_optimizer_states", "full_precision_copy", "single_partition_of_fp32",
        r"state\[.*\] = torch\.(zeros|empty)",
    )),
    ("optimizer temporaries", _any(r":_multi_tensor_\w+:", "_foreach_")),
    ("logits", _any(
        "cross_entropy", "log_softmax", "[lL]ogits", "lm_head", "LMLoss", r"loss_utils\.py", "nll_loss",
        "compute_log_probs", "output_layer", "logsumexp", "logps", "embed_out",
    )),
    ("attention mask", _any(
        "get_full_mask", "causal_mask", "_make_causal", "attention_mask", "attn_mask", "_expand_mask", "alibi",
    )),
    ("attention scores", _any(
        "attn_weights", "attention_scores", "attention_probs", "eager_attention", "unfused_attention", "attn_scores",
        ":unfused", r"baddbmm\(", r"matmul\((q|query)", "q(uery)? ?@ ?k", "scores = ", r"attn = attn\.softmax",
        "matmul_result = ",
    )),
    ("kv cache", _any(r"cache_utils\.py", "key_cache", "kv_cache", "past_key_value")),
    ("gathered weights", _any(
        "_unshard", r"unshard\(", "foreach_all_gather", "all_gather_params", "fetch_sub_module",
        "_alloc_padded_unsharded",
    )),
)  # fmt: skip
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
    at_making, making = next(
        ((at, name) for at, text in enumerate(texts[:_DEEP]) for name, sign in _MAKING if sign.search(text)), (0, "")
    )
    if generating is not None and phase in {"", "forward", "data", "loss"}:
        phase, at = "generation", generating
    elif evaluating is not None and phase not in {"loading", "optimizer", "backward"}:
        phase, at = "evaluation", evaluating
    if making.startswith("optimizer") and phase != "optimizer":
        making = ""
    evidence = frames[at] if phase else frames[at_making] if making else None
    return Reading(phase, evidence, making, evaluating is not None, quiet)


def _phase(texts: list[str]) -> tuple[str, int]:
    """The phase of the innermost sign, and where that stands."""
    recompute, optimizer = _first(_RECOMPUTE, texts), _first(_OPTIMIZER, texts)
    found = sorted(
        (at, order, name) for order, (name, sign) in enumerate(_PHASES) if (at := _first(sign, texts)) is not None
    )
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
