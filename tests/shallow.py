"""Models of a few blocks, for what is done to each block of a class alike."""

from __future__ import annotations

from memcalc.specs.model import Model

BLOCKS = 3


def shallow(model: Model) -> Model:
    """A model of Transformers with three of its blocks, where all are alike; others as they are."""
    import transformers

    if len(model.groups) > 1:
        return model
    (group,) = model.groups
    fewer = model.model_copy(update={"groups": (group.model_copy(update={"count": min(group.count, BLOCKS)}),)})
    depth, layers = model.num_layers, fewer.num_layers
    key = getattr(transformers, str(model.hf_class)).config_class.attribute_map.get("num_hidden_layers")
    config = {
        name: value[:layers] if isinstance(value, (list, tuple)) and len(value) == depth else value
        for name, value in {**model.hf_config, key or "num_hidden_layers": layers}.items()
    }
    return fewer.model_copy(update={"hf_config": config})
