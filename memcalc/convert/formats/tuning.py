"""What the fine-tuning frameworks have in common: layers, checkpoints and optimizers by name, FSDP.

Names: transformers 5.23 ``models/*/modeling_*.py``; PEFT 0.19 ``tuners/tuners_utils.py``: a listed name is the last
part of a layer's path.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from memcalc.convert.config import COMMITS, ConfigReader, Reference, shipped
from memcalc.convert.formats.base import KeyTable, inner_document, key_table
from memcalc.convert.formats.fsdp_config import ALONE, NODE, set_checkpoints, set_loading

LAYERS: dict[str, tuple[str, ...]] = {
    "q_proj": ("q",), "k_proj": ("k",), "v_proj": ("v",), "o_proj": ("o",), "out_proj": ("o",), "wo": ("wo",),
    "query_key_value": ("qkv",), "qkv_proj": ("qkv",), "W_pack": ("qkv",), "c_attn": ("qkv",), "wqkv": ("qkv",),
    "Wqkv": ("qkv",), "dense": ("dense",), "c_proj": ("o", "down"),
    "gate_proj": ("gate",), "up_proj": ("up",), "down_proj": ("down",), "gate_up_proj": ("gate_up",),
    "fc1": ("up",), "fc2": ("down",), "c_fc": ("up",), "dense_h_to_4h": ("up",), "dense_4h_to_h": ("down",),
    "w1": ("gate",), "w2": ("down",), "w3": ("up",), "q_a_proj": ("q_a",), "q_b_proj": ("q_b",),
    "in_proj": ("mixer_in",), "fc_in": ("up",), "fc_out": ("down",), "attn.c_proj": ("o",), "mlp.c_proj": ("down",),
    "input_linear": ("gate_up",), "output_linear": ("down",),
    "kv_a_proj_with_mqa": ("kv_a",), "kv_b_proj": ("kv_b",), "shared_expert_gate": ("shared_gate",),
    "lm_head": ("head",), "embed_out": ("head",),
    "embed_tokens": ("embedding",), "wte": ("embedding",), "word_embeddings": ("embedding",),
    "embed_in": ("embedding",), "embeddings": ("embedding",),
    **{f"self_attn.{target}_proj": (target,) for target in "qkvo"}, "attn.c_attn": ("qkv",),
    "linear_attn.out_proj": ("mixer_out",), "linear_attn.in_proj_qkvz": ("mixer_in",),
    "linear_attn.in_proj_ba": ("mixer_in",), "in_proj_qkvz": ("mixer_in",), "in_proj_ba": ("mixer_in",),
    "linear_attn.in_proj_qkv": ("mixer_in",), "linear_attn.in_proj_z": ("mixer_in",), "in_proj_qkv": ("mixer_in",),
    "attn.qkv": ("qkv",), "attn.proj": ("o",), "projection_layer": ("o",), "query": ("q",), "key": ("k",),
    "mlp.linear_fc1": ("up",), "mlp.linear_fc2": ("down",), **{target: (target,) for target in "qkvo"}, "wi_1": ("up",),
    "value": ("v",), "wi": ("up",), "wi_0": ("gate",), "DenseReluDense.wo": ("down",),
    "in_proj_z": ("mixer_in",), "linear_attn.in_proj_b": ("mixer_in",), "linear_attn.in_proj_a": ("mixer_in",),
    "in_proj_b": ("mixer_in",), "in_proj_a": ("mixer_in",),
}  # fmt: skip
"""By the name of a layer, or the end of its path: which of memcalc's targets it is (PEFT 0.21, tuners/tuners_utils.py,
check_target_module_exists). GPT-2's ``c_proj`` is in attention and in the MLP; what ``wo`` and ``dense`` are is the
model's to say."""
_ALL = ("all", "all-linear")
_GALORE = {"attn": ("attention",), "self_attn": ("attention",), "attention": ("attention",), "mlp": ("mlp",)}
"""Parts of a block's path that ``optim_target_modules`` matches (5.23 trainer_utils.py, check_target_module_exists)."""
_PATHS = {
    **{target: f"self_attn.{target}_proj" for target in ("q", "k", "v", "o")},
    **{target: f"mlp.{target}_proj" for target in ("gate", "up", "down")},
}
"""Where these layers stand in a block of most architectures."""
_STORED = {
    r"gptq.*int4": "gptq-int4", r"gptq.*int8": "gptq-int8", r"(bnb|unsloth)-4bit": "nf4-dq", r"gptq|awq|aqlm|mxfp4": "",
}  # fmt: skip
"""How a checkpoint's own name says that it is quantised; empty where that is no kind of storage that is counted."""
STRATEGIES = {"full_shard": 3, "shard_grad_op": 2, "no_shard": 3, "hybrid_shard": 3, "hybrid_shard_zero2": 2}
"""Items of ``fsdp`` before Transformers 5.0 (5.23 training_args.py, _apply_legacy_fsdp_to_config)."""
_FSDP_HARMLESS = (
    "sync_module_states", "cpu_offload_pin_memory", "use_orig_params",
    "auto_wrap_policy", "transformer_layer_cls_to_wrap", "min_num_params", "limit_all_gathers",
    "backward_prefetch", "forward_prefetch",
)  # fmt: skip
_FSDP = (
    "version", "activation_checkpointing", "offload_params", "cpu_offload", "reshard_after_forward",
    "sharding_strategy", "mixed_precision_policy", "cpu_ram_efficient_loading", "state_dict_type",
    "final_state_dict_type", *_FSDP_HARMLESS,
)  # fmt: skip
FLASH = "Transformers has FlashAttention 2 and 3"
LIGER_KERNELS = ("rope", "rms_norm", "layer_norm", "swiglu", "geglu")
"""Liger's kernels apart from those of the loss, as its functions name them; each takes those that it has."""
ANY_FORM = {
    "adamw-8bit": "adamw_bnb_8bit", "paged-adamw": "paged_adamw_32bit", "paged-adamw-8bit": "paged_adamw_8bit",
    "lion": "lion_32bit", "lion-8bit": "lion_8bit",
}  # fmt: skip
"""Those of bitsandbytes, which needs no temporaries in whatever form it steps, and their names."""


def targets_of(names: Iterable[object]) -> tuple[str, ...] | None:
    """The targets of some layer names; None where one is unknown, or a pattern.

    >>> targets_of(["q_proj", "v_proj"])
    ('q', 'v')
    """
    targets: dict[str, None] = {}
    for name in names:
        if str(name) not in LAYERS:
            return None
        targets |= dict.fromkeys(LAYERS[str(name)])
    return tuple(targets)


def set_kernel(reader: ConfigReader, kernel: str, key: str) -> None:
    """Set the kernel of attention; ``flash3`` is the third generation of FlashAttention."""
    reader.set("attention", kernel.rstrip("3"), key)
    if kernel == "flash3":
        reader.set("strategy.flash_version", 3, key)


_PARAMETERS = {"gate_up_proj": "experts_gate_up", "down_proj": "experts_down"}
"""The stacked weights of experts that PEFT's ``target_parameters`` names, by the last part of a name."""


def parameters_of(reader: ConfigReader, key: str) -> tuple[str, ...]:
    """The stacked weights that a key lists; what memcalc has no word for is a warning."""
    stacked: dict[str, None] = {}
    for name in map(str, reader.items(key)):
        if target := _PARAMETERS.get(name.rpartition(".")[2]):
            stacked[target] = None
        else:
            reader.note("warning", "MC002", key, f"{key} has {name[:60]!r}, whose adapters are not counted")
    return tuple(stacked)


def set_lora(reader: ConfigReader, rank: int, key: str, all_linear: bool = False, parameters: str = "") -> None:
    """Set the adapters whose layers a key lists; `all_linear` where all linear layers have one, the head apart.

    ``parameters`` is the key of stacked weights that have some too.
    """
    names, stacked = reader.items(key), parameters_of(reader, parameters) if parameters else ()
    if stacked and (layers := targets_of(names)) is not None and not all_linear:
        reader.set("lora", f"{rank}:{','.join((*layers, *stacked))}", parameters)
        return
    if stacked:
        reader.not_modelled({parameters: "beside all linear layers, or a pattern, adapters of parameters are not"})
    if all_linear or [str(name) for name in names] in ([name] for name in _ALL):
        reader.set("lora", f"{rank}:all-linear", key)
        return
    reader.set("adapted_names", tuple(map(str, names)) if targets_of(names) else (str(reader.raw(key, "")),), key)
    if targets := targets_of(names) or targets_of_pattern(str(reader.raw(key, ""))):
        reader.set("lora", f"{rank}:{','.join(targets)}", key)
    else:
        unknown = [name for name in map(str, names) if name not in LAYERS] or names
        listed = ",".join(map(str, unknown))[:60]
        reason = f"names layers that memcalc does not know ({listed})" if listed else "names no layer at all"
        reader.ask("lora", key, listed, reason)


def set_dora(reader: ConfigReader, *, quantised: bool) -> None:
    """Adapters with magnitudes, over a base in 16 or 32 bits: over a quantised one they are a warning."""
    if not quantised and any(setting.name == "lora" for setting in reader.settings) and reader.flag("use_dora"):
        reader.set("strategy.lora_kernels", "dora", "use_dora")
    else:
        reader.not_modelled({"use_dora": "outputs of a quantized base are in fp32 beside DoRA's magnitudes"})


BLOCKS = (
    "model.layers",
    "model.language_model.layers",
    "model.text_model.layers",
    "language_model.model.layers",
    "base_model.model.model.layers",
)
_SAFE = re.compile(r"(?:[\w.|()\[\]\\^$?:-]|[.\]dw]\*|[.\]dw]\+){1,200}")
"""Patterns without repeated groups, which take no time worth speaking of on the names of layers."""


def targets_of_pattern(pattern: str) -> tuple[str, ...]:
    r"""The layers that a pattern matches in every block, as PEFT matches a text; none where blocks differ.

    >>> targets_of_pattern(r"model.layers.[\d]+.(mlp|self_attn).(up|down|q)_proj")
    ('q', 'up', 'down')
    """
    if not _SAFE.fullmatch(pattern) or len(re.findall(r"[*+]", pattern)) > 4:
        return ()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of sets that another Python may read otherwise
            compiled = re.compile(pattern)
    except (re.error, OverflowError, RecursionError):
        return ()
    for blocks in BLOCKS:
        matches = {
            tuple(target for target, layer in _PATHS.items() if compiled.fullmatch(f"{blocks}.{number}.{layer}"))
            for number in (0, 3, 10, 27, 79)
        }
        if len(matches) == 1 and (targets := matches.pop()):
            return targets
    return ()


def set_also_trained(reader: ConfigReader, key: str) -> None:
    """Set which layers are trained whole beside the adapters."""
    names = reader.items(key)
    known = [LAYERS.get(str(name), ("",))[0] for name in names]
    targets = tuple(target for target in ("embedding", "head") if target in known)
    if targets:
        reader.set("also_train", targets, key)
    if len(known) > len(targets):
        reader.not_modelled({key: "of layers trained in full with adapters, embedding and head are modelled"})


def set_stored(reader: ConfigReader, key: str) -> bool:
    """Set how a model is stored that was quantised before; return whether it was."""
    name = reader.text(key).lower()
    for pattern, stored in _STORED.items():
        if re.search(pattern, name):
            if stored:
                reader.set("quantize", stored, key)
            else:
                stem = name.rpartition("/")[2]
                reader.ask(
                    "quantize", key, stem, f"is {stem[:60]}, which does not tell how memcalc is to count its weights"
                )
            return True
    return False


def fsdp_keys(reader: ConfigReader) -> dict[str, str]:
    """The keys of ``fsdp_config`` as they stand in the file: each may begin with ``fsdp_``."""
    stated = {name.removeprefix("fsdp_"): f"fsdp_config.{name}" for name in reader.table("fsdp_config")}
    return {name: stated.get(name, f"fsdp_config.{name}") for name in _FSDP}


def set_fsdp(
    reader: ConfigReader, version_key: str, default: int, listed: list[str], where: Mapping[str, str], offload: str
) -> None:
    """Set how FSDP keeps the states, from ``fsdp_config`` and from the items of ``fsdp``; ``offload`` is its key."""
    version = reader.integer(version_key, default)
    if version not in (1, 2):
        raise reader.error(version_key, version, "must be 1 or 2")
    reader.set("engine", f"fsdp{version}", version_key)
    strategy = next((item for item in listed if item in STRATEGIES), "")
    resharded, recomputed = where["reshard_after_forward"], where["activation_checkpointing"]
    reshard = reader.text(resharded).lower()
    if reshard:
        reader.set("zero", reader.one_of(resharded, {**STRATEGIES, "true": 3, "false": 2}), resharded)
    else:
        reader.set("zero", STRATEGIES.get(strategy, 3), "fsdp" if strategy else resharded)
    if reader.flag(where[offload]) or "offload" in listed:
        reader.set("offload", ("params",), where[offload])
    if reader.flag(recomputed):
        set_checkpoints(reader, recomputed, version)
    alone, key = (reshard or strategy) == "no_shard", resharded if reshard in STRATEGIES else "fsdp"
    if alone and version == 2:
        raise reader.error(key, "no_shard", "must be full_shard or shard_grad_op: FSDP 1 alone has other strategies")
    if alone or "hybrid" in f"{strategy} {reshard}":
        reader.set("dp_shard", ALONE if alone else NODE, key)
    set_loading(reader, where["cpu_ram_efficient_loading"])
    reader.harmless(*(where[name] for name in _FSDP_HARMLESS))


def refer_deepspeed(reader: ConfigReader) -> bool:
    """Note DeepSpeed's own config, a table or a file, where there is one; return whether there is."""
    value = reader.raw("deepspeed")
    if isinstance(value, dict):
        reader.refer("deepspeed", "deepspeed", document=inner_document(reader.document, ("deepspeed",)))
        reader.harmless("deepspeed.")
    elif value:
        reader.refer("deepspeed", "deepspeed", path=reader.text("deepspeed"))
    return bool(value)


class Optimizer(NamedTuple):
    """An optimizer in memcalc's words."""

    name: str
    impl: str
    missing: str = ""
    """What it keeps that is not modelled."""
    wide_embeddings: bool = False
    """The Trainer has it keep 32-bit moments for embedding tables (trainer.py, create_optimizer)."""


def optimizers_of(keys: KeyTable) -> dict[str, Optimizer]:
    """Return the optimizers of a format by its names."""
    return {name: Optimizer(**row) for name, row in keys.tables["optimizers"].items()}


TRAINER_OPTIMIZERS = optimizers_of(key_table("trainer"))
"""Those that the Trainer knows by name."""


def set_galore(reader: ConfigReader, key: str, layers: str, all_layers: str, *, in_backward: bool) -> None:
    """Set whose gradients GaLore projects, from the key ``layers``, where ``all`` stands for ``all_layers``."""
    names = [str(name).replace(".*", "").strip(".").replace("_linear", "-linear") for name in reader.items(layers)]
    targets = [target for name in names for target in _GALORE.get(name, LAYERS.get(name, ("",)))]
    if not names or names in ([name] for name in _ALL):
        reader.set("strategy.galore_targets", all_layers, layers)
    elif all(targets):
        reader.set("strategy.galore_targets", ",".join(dict.fromkeys(targets)), layers)
    else:
        reader.not_modelled({layers: "these names are not known; GaLore is counted on all linear layers of the blocks"})
    if in_backward:
        reader.set("optimizer_in_backward", True, key)


DECAY = 0.01
"""What a writer says of a weight decay of which only its presence counts, as torch.optim.AdamW has by default."""


def set_decay(reader: ConfigReader, optimizer: str, key: str) -> None:
    """Set that SGD has a weight decay, from the key that says how much."""
    if optimizer.startswith("sgd") and reader.number(key, 0.0):
        reader.set("strategy.sgd_weight_decay", True, key)


def set_optimizer(
    reader: ConfigReader,
    key: str,
    default: str,
    further: dict[str, Optimizer] | None = None,
    *,
    momentum: bool = False,
    any_form: bool = True,
) -> None:
    """Set which optimizer a key names, with a warning for what it keeps and is not modelled.

    With ``momentum``, SGD has it; without ``any_form``, nothing is set for a form that changes no byte.
    """
    known = {**TRAINER_OPTIMIZERS, **(further or {})}
    optimizer: Optimizer = reader.one_of(key, known, known[default])
    reader.set("optimizer", "sgd-momentum" if momentum and optimizer.name == "sgd" else optimizer.name, key)
    if any_form or optimizer.name not in ANY_FORM:
        reader.set("optimizer_impl", optimizer.impl, key)
    set_decay(reader, optimizer.name, "weight_decay")
    if optimizer.wide_embeddings:
        reader.set("strategy.wide_embedding_moments", True, key)
    if optimizer.missing:
        reader.not_modelled({key: optimizer.missing})
    if optimizer.name == "galore-adamw":
        arguments = reader.raw("optim_args", "")
        if not isinstance(arguments, dict):
            arguments = dict(part.split("=", 1) for part in reader.items("optim_args") if "=" in str(part))
        if "rank" in arguments:
            reader.set("strategy.galore_rank", arguments["rank"], "optim_args")
        layerwise = reader.text(key).endswith("layerwise")
        set_galore(reader, key, "optim_target_modules", "all", in_backward=layerwise)


def refer_to_accelerate(reader: ConfigReader) -> None:
    """Refer to what the command `trl` hands to `accelerate launch`: a config by its path, or one that TRL ships.

    Its own options may stand among the Trainer's arguments or in their YAML (cli/accelerate_config.py,
    cli/commands/training.py of TRL 1.16).
    """
    name = reader.text(key := "accelerate_config")
    variable = reader.document.unknown.get((key,), "")
    if reader.has(launching := "accelerate_launch_args"):  # fms-hf-tuning 3, build/accelerate_launch.py
        reader.ask("sharing", launching, "-", "says what ranks share; give it as an Accelerate YAML too")
    if not (name or variable or reader.text("training_script") == "trl"):
        return
    options = {name: reader.integer(name, low=1) for name in ("num_processes", "num_machines") if reader.has(name)}
    known = shipped("trl", f"{name}.yaml") if re.fullmatch(r"\w+", name) else None
    if known is not None:
        reader.note("note", "MC004", key, f"{name} is counted as {COMMITS['trl']} ships it")
        reader.refer("accelerate", key, document=replace(known, data={**known.data, **options}, part=True))
    elif name:
        over = replace(reader.document, kind="flags", data=options, unknown={}, part=True)
        reader.refer("accelerate", key, path=name, over=over if options else None)
    elif variable:
        reader.references.append(Reference("accelerate", field=key, unknown=variable))
    elif options.get("num_processes"):
        reader.set("gpus", options["num_processes"], "num_processes")


def ask_for_launcher(reader: ConfigReader) -> None:
    """Ask for what a script without the Trainer leaves to its launcher: sharding and precision.

    Keys of such scripts tell it, or that most keys are nobody's that is known.
    """
    document = reader.document
    if document.kind == "flags" or document.unknown.get(("deepspeed",)) or reader.has("deepspeed"):
        return
    unread = sorted(reader.unread())
    named = next((key for key in ("with_tracking", "checkpointing_steps") if reader.has(key)), "")
    foreign = named or (unread[0] if 2 * len(unread) > len(document.data) else "")
    if not foreign:
        return
    says = "is of a script without the Trainer, whose ranks share what Accelerate's config says; give it as a FILE too"
    reader.ask("sharing", foreign, "-", says)
    if not any(setting.name == "mixed" and not setting.default for setting in reader.settings):
        reader.ask("precision", foreign, "-", "is of a script whose precision the same config says")


def set_vision(reader: ConfigReader, *, frozen: bool = False) -> None:
    """What is trained of a vision part, where the model has one; ``frozen`` is the default of both keys."""
    key = "freeze_vision_tower"
    if not frozen and not reader.has(key):
        return
    tower, projector = reader.flag(key, frozen), reader.flag("freeze_multi_modal_projector", frozen)
    reader.set("vision", "trained" if not tower else "frozen" if projector else "projector", key)


def set_prepared(reader: ConfigReader) -> None:
    """What PEFT casts to fp32 over a quantised base, of which axolotl casts norms and ends back (loaders/model.py)."""
    bits = next((key for key in ("load_in_4bit", "load_in_8bit") if reader.flag(key)), "")
    others = ("quantize_moe_experts", "trust_remote_code", "llama4_linearized_experts")  # none may be stacked, 16-bit
    if bits and not any(reader.flag(key) for key in others):
        reader.set("strategy.kbit_experts", True, bits)
    if bits and not (reader.flag("embeddings_skip_upcast") and bits == "load_in_4bit"):
        reader.set("strategy.kbit_passing", True, bits)
