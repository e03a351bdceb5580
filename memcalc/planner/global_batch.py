"""The global batch in sequences: as told, from tokens, or by default."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.errors import InputError
from memcalc.planner.request import LARGEST_NUMBER
from memcalc.units import parse_count, parse_token_batch

if TYPE_CHECKING:
    from memcalc.planner.request import Request

DEFAULT_TOKENS = 524_288
"""Tokens of the default global batch: half a million, a common size for pretraining and continued training."""
MOST_TOKENS = 2**29
"""Tokens of a step above which a bare number of sequences is taken for a slip; published jobs stay below 2^28."""
ROUNDING = 0.05
"""How far a number of sequences may lie from tokens that are no multiple of the length; 4 x 1024^2 is 4.9% above 4M."""
MICRO_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Sequences a pass that a search tries."""
_BINARY_FROM = 512


def batch_of(request: Request, seq_len: int, micro_steps: int = 1) -> int:
    """Global batch [sequences] of sequences of `seq_len` [tokens].

    ``micro_steps`` are the sequences that all ranks take at once; the default, and tokens that are no multiple of the
    length, come to a multiple of them.
    """
    raw = request.given.get("global_batch")
    if raw is None:
        sequences = max(DEFAULT_TOKENS // seq_len, 1)
        sequences = max(1 << (sequences.bit_length() - 1), micro_steps)
        sequences = -(-sequences // micro_steps) * micro_steps
        return int(request.get("global_batch", sequences, f"{sequences} sequences ({sequences * seq_len:,} tokens)"))
    if in_tokens(raw):
        number = sequences_of(tokens_of(raw, seq_len), seq_len, micro_steps)
        request.assumptions["global_batch"] = f"{number} sequences ({number * seq_len:,} tokens)"
    else:
        number = parse_count(raw, "global-batch")
        _refuse_slip(raw, number, seq_len)
    if not 0 < number <= LARGEST_NUMBER["global_batch"]:
        most = LARGEST_NUMBER["global_batch"]
        allowed = f"must be from one sequence of {seq_len:,} tokens to {most:,} sequences"
        raise InputError("global-batch", raw, allowed)
    return number


def in_tokens(raw: object) -> bool:
    """Whether a global batch was typed in tokens."""
    return isinstance(raw, str) and raw.strip().lower().endswith(("token", "tokens"))


def tokens_of(raw: object, seq_len: int) -> int:
    """Tokens as typed; k and M are powers of 1024 where the length is counted so (a multiple of 512), else of 1000.

    >>> tokens_of("4M tokens", 4096), tokens_of("4M tokens", 4000)
    (4194304, 4000000)
    """
    return parse_token_batch(raw, "global-batch", binary=seq_len % _BINARY_FROM == 0)


def sequences_of(tokens: int, seq_len: int, micro_steps: int = 1) -> int:
    """Sequences of a batch of `tokens`: exact where that is whole steps, else a number that many layouts divide.

    Of the numbers within 5% that is a multiple of ``micro_steps`` where there is one, and of the largest power of two.

    >>> sequences_of(4_194_304, 4096), sequences_of(4_000_000, 4000), sequences_of(4_000_000, 4096)
    (1024, 1000, 1024)
    """
    if tokens < seq_len or tokens % (seq_len * micro_steps) == 0:
        return tokens // seq_len
    exact = tokens / seq_len
    low, high = exact * (1 - ROUNDING), exact * (1 + ROUNDING)
    steps = micro_steps if high // micro_steps * micro_steps >= low else 1
    least, most = max(-int(-low // steps), 1), int(high // steps)
    if least > most:
        return round(exact)
    power = next(1 << k for k in reversed(range(most.bit_length())) if most >> k << k >= least)
    return min(range(-(-least // power) * power, most + 1, power), key=lambda n: abs(n * steps - exact)) * steps


def _refuse_slip(raw: object, number: int, seq_len: int) -> None:
    """Refuse a bare number of sequences that no one trains with, which is then most likely one of tokens."""
    typed = isinstance(raw, str) and "seq" in raw.lower()
    if number * seq_len > MOST_TOKENS and not typed:
        allowed = f"means {number * seq_len:,} tokens per step; write '{raw} tokens' or '{raw} sequences'"
        raise InputError("global-batch", raw, allowed)
