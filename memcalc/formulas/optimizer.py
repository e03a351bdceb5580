"""Bytes of optimizer states and of the temporaries of an optimizer step.

What distinguishes the optimizers is data: :data:`OPTIMIZERS` maps each name to an :class:`OptimizerKind`.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from memcalc.formulas.parameters import Number

BITSANDBYTES_BLOCK = 256
"""Elements that share a scale in 8-bit states of bitsandbytes from 0.44 on [1]; 2048 before, and in the paper."""


@dataclass(frozen=True, slots=True)
class Temporary:
    """What a step allocates and frees again, in tensors of the step's width."""

    local: int = 0
    """Copies of all elements that the rank updates [1]."""
    largest: int = 0
    """Copies of the largest tensor alone [1]."""


@dataclass(frozen=True, slots=True)
class OptimizerKind:
    """What an optimizer keeps between steps and allocates during one."""

    name: str
    moments: int
    """State tensors as large as the parameter [1]."""
    foreach: Temporary
    """Temporaries of the multi-tensor form."""
    loop: Temporary
    """Temporaries of the form that goes tensor by tensor."""
    fused: Temporary
    """Temporaries of the one-kernel form, or of the loop where there is none."""
    source: str
    block: int | None = None
    """Elements that share one fp32 scale where moments are quantised to 8 bits [1]."""
    width: int | None = None
    """Bytes of a moment element where the library fixes it, whatever the parameter's dtype [bytes]."""
    paged: bool = False
    """Moments lie in unified memory and leave the GPU under pressure."""
    factored: bool = False
    """Of a matrix, the second moment keeps one value a row and one a column: add :func:`factored_bytes`."""
    matrices_only: bool = False
    """Embeddings, head and vectors take AdamW instead: two moments for those."""


_NONE = Temporary()
_BNB = "bitsandbytes, bitsandbytes/optim/optimizer.py@95f9af3, init_state of Optimizer{}State; kernels update in place"


def _bitsandbytes(name: str, moments: int, *, block: int | None = None, paged: bool = False) -> OptimizerKind:
    source = _BNB.format(moments)
    width = 1 if block else 4
    return OptimizerKind(name, moments, _NONE, _NONE, _NONE, source, block=block, width=width, paged=paged)


_KINDS = (
    OptimizerKind(
        name="adamw",
        moments=2,
        foreach=Temporary(local=1),
        loop=Temporary(largest=2),
        fused=_NONE,
        source="PyTorch, torch/optim/adam.py@v2.13.0, lines 544 and 790: the denominator; a loop's root and quotient",
    ),
    _bitsandbytes("adamw-8bit", 2, block=BITSANDBYTES_BLOCK),
    _bitsandbytes("paged-adamw", 2, paged=True),
    _bitsandbytes("paged-adamw-8bit", 2, block=BITSANDBYTES_BLOCK, paged=True),
    OptimizerKind(
        name="adafactor",
        moments=0,
        foreach=Temporary(local=1),
        loop=Temporary(largest=2),
        fused=Temporary(largest=2),
        source="Transformers, src/transformers/optimization.py@v5.23.0, Adafactor.step without beta1",
        factored=True,
    ),
    _bitsandbytes("lion", 1),
    _bitsandbytes("lion-8bit", 1, block=BITSANDBYTES_BLOCK),
    OptimizerKind(
        name="sgd",
        moments=0,
        foreach=Temporary(local=1),
        loop=Temporary(largest=1),
        fused=_NONE,
        source="PyTorch, torch/optim/sgd.py@v2.13.0: a copy of the gradients where weight decay is not zero",
    ),
    OptimizerKind(
        name="sgd-momentum",
        moments=1,
        foreach=Temporary(local=1),
        loop=Temporary(largest=1),
        fused=_NONE,
        source="PyTorch, torch/optim/sgd.py@v2.13.0: a copy of the gradients where weight decay is not zero",
    ),
    OptimizerKind(
        name="muon",
        moments=1,
        foreach=Temporary(largest=3),
        loop=Temporary(largest=3),
        fused=Temporary(largest=3),
        source="PyTorch, torch/optim/_muon.py@v2.13.0: an fp32 update, two 16-bit iterates, two 16-bit Gram matrices",
        matrices_only=True,
    ),
)
OPTIMIZERS = MappingProxyType({kind.name: kind for kind in _KINDS})
"""Each optimizer by its name."""


def shard(total: Number, ranks: Number) -> Number:
    r"""Return what one of several ranks keeps when they share something evenly; the last may be padded.

    .. math:: S = \lceil T / N \rceil

    Parameters
    ----------
    total : what is shared T, in any unit, [1]
    ranks : ranks that share it N, [1]

    Returns
    -------
    share of one rank S, in the unit of T, [1]

    Examples
    --------
    >>> shard(10, 4)
    3

    References
    ----------
    [1] Rajbhandari et al., "ZeRO", 2020, arXiv:1910.02054, section 5.

    """
    return -(-total // ranks)


def master_bytes(elements: Number, width: Number = 4) -> Number:
    r"""Return the bytes of the full-precision copy of the parameters that the optimizer updates.

    .. math:: B = w P

    Parameters
    ----------
    elements : parameters that the rank updates P, [1]
    width : bytes of one master element w, [bytes]

    Returns
    -------
    master parameters B, [bytes]

    Examples
    --------
    >>> master_bytes(1_000_000)
    4000000

    References
    ----------
    [1] Micikevicius et al., "Mixed Precision Training", 2018, arXiv:1710.03740, section 3.1.

    """
    return width * elements


def quantised_bytes(elements: Number, block: Number = BITSANDBYTES_BLOCK) -> Number:
    r"""Return the bytes of one moment quantised block-wise to 8 bits: a byte an element, an fp32 scale a block.

    .. math:: B = P + 4 \lceil P / Q \rceil

    Parameters
    ----------
    elements : elements of the moment P, [1]
    block : elements that share a scale Q, [1]

    Returns
    -------
    quantised moment B, [bytes]

    Examples
    --------
    >>> quantised_bytes(4096), quantised_bytes(4096, block=2048)
    (4160, 4104)

    References
    ----------
    [1] Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2021, arXiv:2110.02861, section 2.
    [2] bitsandbytes, bitsandbytes/optim/optimizer.py@95f9af3, line 524.

    """
    return elements + 4 * -(-elements // block)


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


def factored_bytes(rows: Number, columns: Number, width: Number = 4, matrices: Number = 1) -> Number:
    r"""Return the bytes of Adafactor's factored second moment of matrices; a vector keeps a full one instead.

    .. math:: B = n w (r + c)

    Parameters
    ----------
    rows : rows of one matrix r, [1]
    columns : columns of one matrix c, [1]
    width : bytes of one element w, [bytes]
    matrices : matrices of this shape n, [1]

    Returns
    -------
    factored second moment B, [bytes]

    Examples
    --------
    >>> factored_bytes(4096, 11008)
    60416

    References
    ----------
    [1] Shazeer and Stern, "Adafactor", 2018, arXiv:1804.04235, section 3.

    """
    return matrices * width * (rows + columns)


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

    .. math:: B = w \left( c_{all} P + c_{max} P_{max} + P_{prev} \right)

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
    preceding : elements of the tensor updated before the largest one P_prev, for the loop alone, [1]

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
    return width * (copies.local * local_elements + copies.largest * largest_tensor + preceding)
