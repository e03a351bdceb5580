"""Mamba, Falcon-Mamba and Mamba-2: each block is a mixer alone.

Defaults of absent keys are those of the config class (Transformers 5.24, models/*/configuration_*.py); norms, the fp32
residual stream and the fp32 logits are those of the model class (models/*/modeling_*.py).
"""

from __future__ import annotations

from collections.abc import Callable

from memcalc.convert.huggingface_hybrids import mamba_mixer
from memcalc.convert.huggingface_keys import Flat, Keys, architecture
from memcalc.errors import InputError
from memcalc.specs.block import Block
from memcalc.specs.mixers import Mamba, Mamba2
from memcalc.specs.model import BlockGroup, Model, Tail

_UNREAD = """
    intermediate_size time_step_scale time_step_min time_step_max time_step_init_scheme time_step_floor time_step_limit
    rescale_prenorm_residual use_mambapy use_falcon_mambapy use_associative_scan norm_before_gate
"""
"""Keys that the classes do not read, or that move no size."""
UNBOUNDED = 2**20
"""Tokens: a recurrence has no longest sequence."""


def mamba(c: Keys, about: Flat) -> Model:
    """Return the model of a config."""
    return _of_mixers(c, about, _mamba(c), layers=32, vocab=50280, tied=True)


def falcon_mamba(c: Keys, about: Flat) -> Model:
    """Return the model of a config: weightless norms inside of the kernel."""
    mixer = _mamba(c).model_copy(update={"norms": "weightless"})
    return _of_mixers(c, about, mixer, layers=32, vocab=50280, tied=True)


def _mamba(c: Keys) -> Mamba:
    hidden = c.size("hidden_size", 768)
    keys = mamba_mixer(c, hidden, _inner(c, hidden), "time_step_rank", "state_size", "conv_kernel", "use_conv_bias")
    return Mamba(**keys, bias=c.flag("use_bias"))


def mamba2(c: Keys, about: Flat) -> Model:
    """Return the model of a config."""
    c.only("rms_norm", True)
    c.get("time_step_rank")
    hidden = c.size("hidden_size", 4096)
    heads, head_dim = c.size("num_heads", 128), c.size("head_dim", 64)
    if heads * head_dim != _inner(c, hidden):
        allowed = f"times head_dim {head_dim} must be expand times hidden_size, {_inner(c, hidden)}"
        raise InputError("config key num_heads", heads, allowed)
    mixer = Mamba2(
        kind="Mamba-2 mixer",
        heads=heads,
        head_dim=head_dim,
        state=c.size("state_size", 128),
        groups=c.size("n_groups", 8),
        taps=c.size("conv_kernel", 4),
        chunk=c.size("chunk_size", 256),
        conv_bias=c.flag("use_conv_bias", True),
        bias=c.flag("use_bias"),
    )
    return _of_mixers(c, about, mixer, layers=64, vocab=32768, tied=False, hidden=4096)


def _inner(c: Keys, hidden: int) -> int:
    return int(c.number("expand", 2) * hidden)


def _of_mixers(
    c: Keys, about: Flat, mixer: Mamba | Mamba2, *, layers: int, vocab: int, tied: bool, hidden: int = 768
) -> Model:
    """Return a model of blocks that are a norm and a mixer each."""
    architecture(about, "ForCausalLM", "LMHeadModel")
    c.only("hidden_act", "silu")
    c.get(_UNREAD)
    width = c.size("hidden_size", hidden)
    block = Block(hidden=width, mixer=mixer, norms=1, wide_residual=c.flag("residual_in_fp32", True))
    return Model(
        **about,
        hidden=width,
        vocab=c.size("vocab_size", vocab),
        tied=c.flag("tie_word_embeddings", tied),
        positions="none",
        max_positions=UNBOUNDED,
        groups=(BlockGroup(count=c.size("num_hidden_layers", layers), block=block),),
        tail=Tail(wide_logits=True),
    )


STATE_SPACES: dict[str, Callable[[Keys, Flat], Model]] = {
    family.__name__: family for family in (mamba, falcon_mamba, mamba2)
}
"""Readers by `model_type`."""
