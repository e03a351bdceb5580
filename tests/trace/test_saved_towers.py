"""What experts, latent attention and encoders keep for backward, against PyTorch's own list on the real classes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from autograd import measure
from covering import covering

from memcalc import catalog
from memcalc.convert.huggingface import from_huggingface
from memcalc.frameworks.losses import HF_NEW
from memcalc.specs.model import BlockGroup, Model
from memcalc.trace.layers import BlockConfig
from memcalc.trace.template import Template, trace, trace_entry, trace_exit, trace_head

FAMILIES = ("mixtral", "qwen3-moe", "gpt-oss", "deepseek-v2", "deepseek-v3", "bert", "t5", "t5-gated", "vit", "whisper")
CLASSES = {"bert": "BertForMaskedLM", "vit": "ViTForImageClassification", "t5": "T5ForConditionalGeneration",
           "t5-gated": "T5ForConditionalGeneration", "whisper": "WhisperForConditionalGeneration"}  # fmt: skip
RANDOM_STATE = 24
"""Most bytes of a fused attention's random state: a seed and an offset, and a third number of the flash kernel."""


class Run(NamedTuple):
    """One way to train a family."""

    precision: str = "bf16"
    attention: str = "flash"
    dropout: bool | None = None
    recompute: str = "none"
    batch: int = 2
    seq: int = 40

    @property
    def setting(self) -> BlockConfig:
        """The run in the words of the trace, with PyTorch's attention and Transformers' norms."""
        width = 2 if self.precision == "bf16" else 4
        return BlockConfig(
            weight=width,
            residual=width,
            autocast=self.precision == "fp32+autocast",
            attention=self.attention,
            dropout=self.dropout is not False,
            reentrant=False,
            sdpa=True,
        )


DEFAULT = [Run(), Run("fp32+autocast", "eager"), Run(dropout=False, attention="eager"), Run("fp32", recompute="full")]
SHAPES = ((2, 40), (3, 48))
CHOICES = covering(
    3, FAMILIES, ("bf16", "fp32", "fp32+autocast"), ("flash", "eager"), (None, True, False), ("none", "full"), SHAPES
)


def read(family: str, config: Any) -> Model:
    """Read the config of the real class; extra keys that the shared small config carries are left out."""
    known = {*type(config)().to_dict(), "head_dim"}
    data = {key: value for key, value in config.to_dict().items() if key in known}
    return from_huggingface({**data, **({"architectures": [CLASSES[family]]} if family in CLASSES else {})})


def size(model: Model, template: Template, tower: str, run: Run) -> int:
    """Return the bytes that a template keeps, copies of weights by autocast left out."""
    keys, cross = (model.fixed_tokens.get(t, run.seq) for t in (tower, "encoder"))
    filled, filled_cross = (-(-n // 16) * 16 for n in (keys, cross))
    units = {
        "token": run.batch * keys,
        "pair": run.batch * keys * keys,
        "sink_pair": run.batch * keys * (keys + 1),
        "filled_pair": run.batch * keys * filled,
        "cross": run.batch * cross,
        "cross_pair": run.batch * keys * cross,
        "square": keys * keys,
        "filled_square": keys * filled,
        "filled_cross": keys * filled_cross if cross % 16 else 0,
        "even_cross": 0 if cross % 16 else keys * cross,
        "filled_token": run.batch * -(-keys // 32) * 32,
        "row": keys,
        "sample": run.batch,
        "once": 1,
    }
    return sum(record.size.bytes * units[record.size.unit] for record in template.kept_records)


def block_of(group: BlockGroup, run: Run) -> Template:
    """Return the trace of one block of a group."""
    return trace(group.block, run.setting, run.recompute)


def ends(model: Model, run: Run) -> int:
    """Return the bytes that are kept outside the blocks, or once for all of a tower's blocks."""
    towers = {group.tower: group for group in reversed(model.groups)}
    total = 0
    for tower, group in towers.items():
        entry = trace_entry(model.ends_of(tower), group.block, run.setting, run.recompute)
        total += size(model, entry, tower, run)
    last, vocab = model.groups[-1], model.vocab if model.head else model.tail.classes
    head = trace_head(model.hidden, model.final_norm, vocab, run.setting, HF_NEW, "none", model.tail)
    total += size(model, head, last.tower, run)
    if last.block.cross_attention is not None:
        encoder, reads = model.ends_of("encoder"), block_of(last, run).keeps_context
        end = trace_exit(encoder, model.groups[0].block.hidden, run.setting, read=reads)
        total += size(model, end, "encoder", run)
    return total


def bytes_of(saved: measure.Saved, place: int, run: Run) -> int:
    """Return what a block keeps; without autocast copies of weights are the model's own doing, and count."""
    return saved.bytes_at(place, weights=run.precision != "fp32+autocast")


def not_ours(saved: measure.Saved) -> int:
    """Return the bytes of the labels, and of the count of them: they belong to the batch."""
    return sum(kept.nbytes for kept in saved.storages if "NllLossBackward0.t" in kept.node)


def random_states(saved: measure.Saved, place: str | int | None = None) -> int:
    """Return the bytes of fused attention's random states."""
    found = saved.storages if place is None else saved.at(place)
    return sum(
        kept.nbytes for kept in found if kept.node.endswith((".rng_state", ".unused", ".philox_seed", ".philox_offset"))
    )


def held_by_closures(model: Model, run: Run) -> int:
    """Return the bytes that a checkpoint's function holds instead of autograd: what the class passes by keyword.

    Those are rotary tables, and the causal mask but in encoder-decoders.
    """
    if run.recompute != "full":
        return 0
    group = model.groups[-1]
    names = ("rotary table",) if group.block.cross_attention else ("rotary table", "attention mask")
    entry = trace_entry(model.ends_of(group.tower), group.block, run.setting, "full")
    held = frozenset(index for index in entry.kept if entry.records[index].name.startswith(names))
    return size(model, replace(entry, kept=held), group.tower, run)


def compare(family: str, run: Run, **changes: Any) -> None:
    """Compare each group's last block, and then all that is kept outside the blocks or once for all."""
    run = run._replace(attention="eager") if family == "gpt-oss" else run
    saved = measure.saved_bytes(family, **run._asdict(), **changes)
    model = read(family, saved.config)
    outside = saved.total(weights=run.precision != "fp32+autocast") - not_ours(saved) - random_states(saved)
    sequence = model.sequence
    for index, group in enumerate(model.groups):
        place = max(layer for layer, own in enumerate(sequence) if own == index)
        template = saved.as_kept(block_of(group, run))
        ours, random = size(model, template, group.tower, run), random_states(saved, place)
        if place > 0:  # the very first block also keeps what all share
            assert (saved.blocks[place], ours) == (saved.blocks[place], bytes_of(saved, place, run) - random)
        assert random <= RANDOM_STATE * (1 + (group.block.cross_attention is not None))
        outside -= group.count * ours
    assert ends(model, run) == outside + held_by_closures(model, run)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("run", DEFAULT, ids=lambda run: "-".join(map(str, run)))
def test_kept_bytes_equal_pytorch(family: str, run: Run) -> None:
    compare(family, run)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("deepseek-v2", {"topk_method": "group_limited_greedy"}),
        ("deepseek-v2", {"q_lora_rank": None}),
        ("deepseek-v3", {"norm_topk_prob": False}),
        ("deepseek-v3", {"n_shared_experts": 2}),
        ("qwen3-moe", {"norm_topk_prob": True}),
        ("bert", {"hidden_act": "gelu_new"}),
        ("whisper", {"max_source_positions": 96}),
        ("vit", {"patch_size": 16}),
    ],
)
@pytest.mark.parametrize("precision", ["bf16", "fp32+autocast"])
def test_what_a_config_changes(family: str, changes: dict[str, Any], precision: str) -> None:
    compare(family, Run(precision), **changes)


@pytest.mark.parametrize("run", DEFAULT, ids=lambda run: "-".join(map(str, run)))
def test_blocks_of_both_towers_of_clip(run: Run) -> None:
    """QuickGELU is written op by op and keeps three tensors as wide as the MLP."""
    saved = measure.saved_bytes("clip", **run._replace(dropout=None)._asdict())
    model = from_huggingface({**saved.config.to_dict(), "architectures": ["CLIPModel"]})
    for group in model.groups:
        place = next(path for path in reversed(saved.blocks) if group.tower in path)
        real = saved.bytes_at(place, weights=run.precision != "fp32+autocast")
        assert size(model, block_of(group, run), group.tower, run) == real - random_states(saved, place)


@pytest.mark.parametrize(
    "name",
    ["mixtral-8x7b", "qwen3-30b-a3b", "olmoe-1b-7b", "qwen1.5-moe-a2.7b", "glm-4.5-air-106b", "deepseek-v2",
     "deepseek-v2-lite", "deepseek-v3", "kimi-k2", "bert-large", "t5-small", "flan-t5-xxl", "vit-huge-14",
     "whisper-tiny", "clip-vit-l-14", "bloom-560m", "opt-350m", "gpt2"],
)  # fmt: skip
def test_preset_is_written_as_its_class(name: str) -> None:
    import transformers

    model = catalog.model(name)
    kind = getattr(transformers, str(model.hf_class)).config_class.model_type
    said = {key: None if value == "null" else value for key, value in model.hf_config.items()}
    config = {**said, "model_type": kind, "architectures": [model.hf_class], "tie_word_embeddings": model.tied}
    read = from_huggingface(config)
    assert (model.groups, model.ends, model.tail) == (read.groups, read.ends, read.tail)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "run"),
    [(family, Run(*settings, *shape)) for family, *settings, shape in CHOICES],
    ids=lambda it: it if isinstance(it, str) else "-".join(map(str, it)),
)
def test_kept_bytes_equal_pytorch_everywhere(family: str, run: Run) -> None:
    """Any three choices occur together."""
    compare(family, run)
