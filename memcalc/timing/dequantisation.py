"""Memory traffic of turning a quantised base into 16 bits, for each product anew."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from memcalc.formulas.quantization import dequantisation_bytes
from memcalc.terms.quantised import matrix_bytes

if TYPE_CHECKING:
    from memcalc.terms.tensors import Matrix
    from memcalc.trace.layers import BlockConfig

FORWARD, STEP = 1, 2
"""Products with a frozen weight: in forward; in forward and for the input's gradient."""


def dequantised_bytes(matrices: Iterable[Matrix], setting: BlockConfig, group: int, products: int) -> int:
    """Return the traffic of some products of each matrix in all its copies [bytes]; ``group`` is that of GPTQ.

    Source: bitsandbytes 0.43.3 autograd/_functions.py: ``MatMul4Bit`` dequantises in forward and in backward,
    ``MatMul8bitLt`` multiplies 8-bit integers in forward; AutoGPTQ 0.7.1 nn_modules/triton_utils/dequant.py.
    """
    wanted = products - (setting.quantize == "int8")
    return sum(wanted * m.count * _once(m, setting, group) for m in matrices if setting.quantises(m.target))


def _once(matrix: Matrix, setting: BlockConfig, group: int) -> int:
    stored = sum(matrix_bytes(matrix.inputs, matrix.outputs, setting.quantize, group))
    casts = (setting.quantize == "int8") + setting.quantised_from_half
    double = setting.quantize == "nf4-dq"
    return int(dequantisation_bytes(stored, matrix.inputs * matrix.outputs, double, casts))
