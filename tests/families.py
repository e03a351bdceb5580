"""Which families of Transformers are read, each compared with its own class on the meta device.

`python tests/families.py` builds the class of every model type that Transformers trains with text (causal, masked,
sequence to sequence, with images) from its defaults, counts its parameters, and prints what memcalc makes of the same
config: exact, exact in its parameters alone (no estimate is made), another count, or the reason why it is refused.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections import Counter
from typing import Any
from unittest import mock

import torch
import transformers
from transformers.models.auto import modeling_auto

from memcalc.convert.huggingface import from_huggingface
from memcalc.errors import MemcalcError
from memcalc.terms.parameters import model_count

MAPPINGS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
)  # fmt: skip


def families() -> dict[str, str]:
    """The class of each model type, that of its first mapping."""
    classes: dict[str, str] = {}
    for mapping in reversed(MAPPINGS):
        for kind, names in getattr(modeling_auto, mapping).items():
            classes[kind] = names if isinstance(names, str) else names[0]
    return classes


NEEDED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "hunyuan_v1_dense": {"head_dim": 128},
    "ministral": {"head_dim": 128},
}
"""What a class cannot be built, or a config not be read, without."""


def counted(name: str, **keys: Any) -> tuple[dict[str, Any], int]:
    """The config of a class as it is written, and the parameters of the class on the meta device."""
    kind: Any = getattr(transformers, name)
    config = kind.config_class(**keys)
    with torch.device("meta"), mock.patch.object(transformers.PreTrainedModel, "init_weights"):
        model = kind(config)
    model.tie_weights()
    written = json.loads(json.dumps(config.to_dict(), default=str))
    return {**written, "architectures": [name]}, sum(parameter.numel() for parameter in model.parameters())


def outcome(kind: str, name: str) -> str:
    """What memcalc makes of the default config of a class."""
    try:
        config, real = counted(name, **NEEDED.get(kind, {}))
    except Exception as error:  # noqa: BLE001 - a class that its own defaults do not build is none to compare with
        return f"not built: {type(error).__name__}"
    try:
        model = from_huggingface(config)
    except MemcalcError as error:
        return f"refused: {error}"
    ours = model_count(model).total
    if ours != real:
        return f"wrong: {ours}, which is {ours - real:+}"
    return f"counted alone: {', '.join(model.counted_parts)}" if model.counted_parts else "exact"


def main() -> None:
    """Print each family with its outcome, then how many there are of each kind of outcome."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    counts: Counter[str] = Counter()
    for kind, name in sorted(families().items()):
        text = outcome(kind, name)
        counts[text.partition(":")[0]] += 1
        sys.stdout.write(f"{kind:32} {text[:160]}\n")
        sys.stdout.flush()
    listed = ", ".join(f"{number} {word}" for word, number in counts.most_common())
    sys.stdout.write(f"{sum(counts.values())} families: {listed}\n")


if __name__ == "__main__":
    main()
