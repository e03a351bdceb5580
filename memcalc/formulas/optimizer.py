"""Bytes of optimizer states and of the temporaries of an optimizer step.

What distinguishes the optimizers is data: :data:`OPTIMIZERS` maps each name to an :class:`OptimizerKind`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from memcalc.formulas.optimizer_states import (
    BITSANDBYTES_BLOCK,
    FULL,
    Weight,
    factored_bytes,
    preconditioner_elements,
    projected_elements,
    quantised_bytes,
    shard,
)
from memcalc.formulas.parameters import Number

SOAP_LIMIT = 10_000
"""``max_precond_dim``: a longer dimension is not preconditioned [1]."""
Form = Literal["flat", "zero", "rows", "layers"]
"""What an optimizer sees of weights that data-parallel ranks share: vectors cut from a buffer (FSDP 1, Megatron-LM's
distributed optimizer), the same in DeepSpeed, whose ZeRO knows some optimizers, DTensors cut along their rows (FSDP 2),
or whole tensors of which each rank updates some (Megatron-LM's layer-wise optimizer)."""


class Temporary(NamedTuple):
    """What a step allocates and frees again, in tensors of the step's width."""

    local: int = 0
    """Copies of all elements that the rank updates [1]."""
    largest: int = 0
    """Copies of the largest tensor alone [1]."""
    before: int = 0
    """Copies of the tensor before it, which a name refers to until its successor's is made [1]."""


States: TypeAlias = Callable[[Weight], Number]
"""What an optimizer has of one weight [elements]."""


@dataclass(frozen=True, slots=True)
class OptimizerKind:
    """What an optimizer keeps between steps and allocates during one."""

    name: str
    """The word of ``--optimizer``."""
    moments: int
    """State tensors as large as the parameter [1]; where ``states`` is given, those of vectors alone."""
    foreach: Temporary
    """Temporaries of the multi-tensor form."""
    loop: Temporary
    """Temporaries of the form that goes tensor by tensor."""
    fused: Temporary
    """Temporaries of the one-kernel form, or of the loop where there is none."""
    source: str
    """The code that was read, with its version."""
    decay: bool = False
    """The temporaries are those of a weight decay: there are none without."""
    block: int | None = None
    """Elements that share one fp32 scale where moments are quantised to 8 bits [1]."""
    width: int | None = None
    """Bytes of a state's element where the library fixes it, whatever the parameter's dtype [bytes]."""
    paged: bool = False
    """Moments lie in unified memory and leave the GPU under pressure."""
    states: States | None = None
    """State elements of one weight by its shape [1]; absent where they are ``moments`` for each element."""
    temporary: States | None = None
    """Elements that the step of one weight allocates and frees again [1], in place of the copies above."""
    shards: Mapping[Form, Literal["as vectors", "divided", "by rows"]] = field(
        default_factory=lambda: MappingProxyType({"flat": "divided", "zero": "divided", "rows": "divided"})
    )
    """What becomes of ``states`` where ranks share the weights: those of a vector; the whole model's, shared out; or
    those of rows. A form that is absent does not run."""
    refusal: str = ""
    """Why not."""
    wide: bool = False
    """Gradients of 16 bits make it fail."""
    waits: bool = False
    """The step waits for the GPU after each tensor (bitsandbytes, ``Optimizer8bit.step``)."""


_NONE = Temporary()
_BNB = "bitsandbytes, bitsandbytes/optim/optimizer.py@95f9af3, init_state of Optimizer{}State; kernels update in place"


def _bitsandbytes(name: str, moments: int, *, block: int | None = None, paged: bool = False) -> OptimizerKind:
    source = _BNB.format(moments)
    width = 1 if block else 4
    return OptimizerKind(name, moments, _NONE, _NONE, _NONE, source, block=block, width=width, paged=paged, waits=True)


# --------------------------------------------------------------------------------- states and temporaries by a shape


def _factored(weight: Weight) -> Number:
    """Adafactor: of each matrix one value a row and one a column, in place of a second moment."""
    *stack, rows, columns = weight.shape
    return factored_bytes(rows, columns, 1, prod(stack))


def _momentum(weight: Weight) -> Number:
    """Muon: one moment of each matrix; embeddings, heads and tensors that are not 2-D take AdamW's two."""
    return (1 if _is_inner(weight) else 2) * weight.elements


def _preconditioned(weight: Weight) -> Number:
    """SOAP: two moments, and of each dimension that is not too long its Gram matrix and eigenvectors."""
    return 2 * weight.elements + sum(preconditioner_elements(size) * (size <= SOAP_LIMIT) for size in weight.shape)


def _preconditioning(weight: Weight) -> Number:
    """The fullest moment of SOAP's step: a QR decomposition, or a projection.

    By soap.py, line by line: projected gradient, denominator, update and the moment before its rotation wait while
    ``get_orthogonal_matrix_QR`` copies the second moment and goes dimension by dimension, with the last outer product,
    the finished eigenvectors, the R of the dimension before and four matrices of its own.
    """
    squares = [size * size * (size <= SOAP_LIMIT) for size in weight.shape]
    size, several = weight.elements, len(squares) > 2
    known = sum(np.minimum(square, 1) for square in squares)
    last: Number = 0
    for square in squares:
        last = np.where(square > 0, square, last)
    projected = ((7 + (known < len(squares))) * size + sum(squares) if several else 6 * size + last) + last
    moment = np.where(known == 0, 2 * size, np.where((known == 1) | several, projected, 0))
    finished: Number = 0
    before: Number = 0
    for square in squares:
        decomposed = 5 * size + last + finished + before + 4 * square
        moment = np.maximum(moment, np.where(square > 0, decomposed, 0))
        finished, before = finished + square, np.where(square > 0, square, before)
    return moment


def _kronecker(weight: Weight) -> Number:
    """SOAP in Megatron-LM: with eigenvalues and without a longest dimension, of linear layers alone."""
    if not _is_inner(weight):
        return 2 * weight.elements
    return 2 * weight.elements + sum(preconditioner_elements(size) + size for size in weight.shape)


def _kronecker_step(weight: Weight) -> Number:
    """The fullest moment of that step: Adam's update beside the bases before, or an orthogonal iteration."""
    if not _is_inner(weight):
        return 2 * weight.elements
    rows, columns = (size * size for size in weight.shape)
    size = weight.elements
    return np.maximum(5 * size + rows + columns, size + np.maximum(3 * rows, rows + 3 * columns))


def _is_inner(weight: Weight) -> bool:
    """Whether a weight is a matrix that is neither embedding nor head."""
    return len(weight.shape) == 2 and weight.target not in ("embedding", "head")


def _is_projected(weight: Weight) -> bool:
    return weight.linear and weight.target in weight.targets


def _projected(weight: Weight) -> Number:
    """GaLore: moments of the projected gradient and the projector; AdamW's two moments of what is not a target.

    Of DTensors cut along their rows a tall matrix's moments are cut alike; all else is whole on every rank.
    """
    if not _is_projected(weight):
        return 2 * shard(weight.elements, weight.ranks)
    rows, columns = weight.shape
    elsewhere = (rows - shard(rows, weight.ranks)) * (rows >= columns)
    basis = np.minimum(np.minimum(rows, columns), weight.rank)
    return projected_elements(rows, columns, weight.rank, weight.width) - 2 * basis * elsewhere


def _projecting(weight: Weight) -> Number:
    """The fullest moment of GaLore's step, in elements of the gradient: projecting back, or a new decomposition.

    The update is projected back and scaled out of place beside three projected tensors, and every 200 steps beside the
    new decomposition. Of 16-bit gradients that is one of an fp32 copy, which cuSOLVER copies once more.
    """
    size = weight.elements
    if not _is_projected(weight):
        return 2 * shard(size, weight.ranks)
    rows, columns = weight.shape
    short, rank = np.minimum(rows, columns), np.minimum(np.minimum(rows, columns), weight.rank)
    back = 2 * size + 3 * rank * np.maximum(rows, columns)
    narrow = 4 * (3 * size + short * short) // weight.width
    return np.where(weight.width < FULL, np.maximum(back, narrow), back + short * short)


_KINDS = (
    OptimizerKind(
        name="adamw",
        moments=2,
        foreach=Temporary(local=1),
        loop=Temporary(largest=2, before=1),
        fused=_NONE,
        source="PyTorch, torch/optim/adam.py@v2.13.0, lines 544 and 790: the denominator; a loop's root and quotient",
    ),
    _bitsandbytes("adamw-8bit", 2, block=BITSANDBYTES_BLOCK),
    _bitsandbytes("paged-adamw", 2, paged=True),
    _bitsandbytes("paged-adamw-8bit", 2, block=BITSANDBYTES_BLOCK, paged=True),
    OptimizerKind(
        name="adafactor",
        moments=1,
        foreach=Temporary(local=1),
        loop=Temporary(largest=2),
        fused=Temporary(largest=2),
        source="Transformers, src/transformers/optimization.py@v5.23.0, Adafactor.step without beta1",
        width=4,
        states=_factored,
        shards=MappingProxyType({"flat": "as vectors", "zero": "as vectors"}),
        refusal="its factors of a DTensor mix with plain tensors, at which PyTorch stops",
    ),
    _bitsandbytes("lion", 1),
    _bitsandbytes("lion-8bit", 1, block=BITSANDBYTES_BLOCK),
    OptimizerKind(
        name="sgd",
        moments=0,
        foreach=Temporary(local=1),
        loop=Temporary(largest=1),
        fused=_NONE,
        source="PyTorch, torch/optim/sgd.py@v2.13.0: in place, but for the copy to which a weight decay is added",
        decay=True,
    ),
    OptimizerKind(
        name="sgd-momentum",
        moments=1,
        foreach=Temporary(local=1),
        loop=Temporary(largest=1),
        fused=_NONE,
        source="PyTorch, torch/optim/sgd.py@v2.13.0: in place, but for the copy to which a weight decay is added",
        decay=True,
    ),
    OptimizerKind(
        name="muon",
        moments=2,
        foreach=Temporary(largest=3),
        loop=Temporary(largest=3),
        fused=Temporary(largest=3),
        source="PyTorch, torch/optim/_muon.py@v2.13.0: an fp32 update, two 16-bit iterates, two 16-bit Gram matrices",
        states=_momentum,
        shards=MappingProxyType({"zero": "divided", "rows": "divided", "layers": "divided"}),
        refusal="it takes 2-D parameters only, and flat shards are vectors",
    ),
    OptimizerKind(
        name="soap",
        moments=2,
        foreach=Temporary(largest=2),
        loop=Temporary(largest=2),
        fused=Temporary(largest=2),
        source="nikhilvyas/SOAP soap.py@a1e5535: exp_avg, exp_avg_sq, GG and Q, all fp32; QR every 10 steps",
        width=4,
        states=_preconditioned,
        temporary=_preconditioning,
        shards=MappingProxyType({}),
        refusal="its preconditioners are plain tensors of whole matrices, which shards are not",
        wide=True,
    ),
    OptimizerKind(
        name="galore-adamw",
        moments=2,
        foreach=Temporary(largest=2),
        loop=Temporary(largest=2),
        fused=Temporary(largest=2),
        source="jiaweizzhao/GaLore galore_torch/adamw.py and galore_projector.py@2cc66f8, proj_type std; cuSOLVER's "
        "workspace of the decomposition is not counted",
        states=_projected,
        temporary=_projecting,
        shards=MappingProxyType({"rows": "by rows"}),
        refusal="it projects matrices, and flat shards are vectors",
    ),
)
OPTIMIZERS = MappingProxyType({kind.name: kind for kind in _KINDS})
"""Each optimizer by its name."""
TORCH_ADAFACTOR = replace(
    OPTIMIZERS["adafactor"],
    width=None,
    source="PyTorch, torch/optim/_adafactor.py@v2.13.0: factors and variances in the gradient's dtype",
)
"""PyTorch's own, which keeps 16-bit states of 16-bit gradients and has a multi-tensor form."""
MEGATRON_SOAP = replace(
    OPTIMIZERS["soap"],
    source="NVIDIA-NeMo/Emerging-Optimizers v0.4.0 soap/soap.py: exp_avg, exp_avg_sq, L, R, Q_L, Q_R and eigenvalues "
    "in fp32; Megatron-LM d98e8a64 core/optimizer/emerging_optimizers.py gives embeddings, head and vectors to Adam",
    states=_kronecker,
    temporary=_kronecker_step,
    shards=MappingProxyType({"layers": "divided"}),
    wide=False,
)


def moment_bytes(elements: Number, kind: OptimizerKind, width: Number = 4, block: int | None = None) -> Number:
    r"""Return the bytes of the moments that are as large as the parameter.

    .. math:: B = k w P \quad\text{or, quantised,}\quad B = k (P + 4 \lceil P / Q \rceil)

    Factored second moments come on top: see `factored_bytes`.

    Parameters
    ----------
    elements : parameters that the rank updates P, [1]
    kind : the optimizer, which gives the number of moments k, [1]
    width : bytes of a moment element w, unless the library fixes it, [bytes]
    block : elements that share a scale Q where moments are quantised; the library's own when left out, [1]

    Returns
    -------
    moments B, [bytes]

    Examples
    --------
    >>> moment_bytes(1_000_000, OPTIMIZERS["adamw"])
    8000000
    >>> moment_bytes(1_024_000, OPTIMIZERS["adamw-8bit"])
    2080000

    References
    ----------
    [1] Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019, arXiv:1711.05101, algorithm 2.
    [2] Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, arXiv:2302.06675, algorithm 2 (Lion).
    [3] Jordan et al., "Muon", 2024, kellerjordan.github.io/posts/muon.

    """
    if kind.block is not None:
        return kind.moments * quantised_bytes(elements, block or kind.block)
    return kind.moments * (kind.width or width) * elements


def step_temporary(
    local_elements: Number,
    largest_tensor: Number,
    width: Number = 4,
    *,
    impl: str = "foreach",
    kind: OptimizerKind = OPTIMIZERS["adamw"],
    preceding: Number = 0,
) -> Number:
    r"""Return the bytes that an optimizer step allocates and frees again.

    .. math:: B = w \left( c_{all} P + c_{max} P_{max} + c_{prev} P_{prev} \right)

    For AdamW: foreach holds the denominator of every parameter (c_all = 1, c_max = 0); the loop holds the root and the
    quotient of one (0, 2), and the denominator of the tensor before it until it is replaced, which makes three where
    equal tensors follow one another; the fused kernel holds nothing.

    Parameters
    ----------
    local_elements : parameters that the rank updates P, [1]
    largest_tensor : elements of the largest tensor among them P_max, [1]
    width : bytes of one element w, [bytes]
    impl : foreach, loop or fused, [1]
    kind : the optimizer, which gives the numbers of copies c, [1]
    preceding : elements of the tensor updated before the largest one P_prev, [1]

    Returns
    -------
    temporaries B, [bytes]

    Examples
    --------
    >>> step_temporary(1_000_000, 250_000)
    4000000
    >>> step_temporary(1_000_000, 250_000, impl="loop"), step_temporary(1_000_000, 250_000, impl="fused")
    (2000000, 0)

    References
    ----------
    [1] PyTorch, torch/optim/adam.py@v2.13.0, _single_tensor_adam and _multi_tensor_adam.
    [2] PyTorch, torch/optim/optimizer.py@v2.13.0, _foreach_doc: "~ sizeof(params) more peak memory".

    """
    copies: Temporary = getattr(kind, impl)
    return width * (copies.local * local_elements + copies.largest * largest_tensor + copies.before * preceding)
