"""The training script beside arguments of the Trainer: it loads the model as they say, and trains on random tokens.

The calls are those of Transformers 5.23 (hf_argparser.py, trainer.py, modeling_utils.py: from_config) and PEFT 0.21
(mapping_func.py, tuners/lora/config.py).
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from memcalc.convert.formats.trainer_writer import script_fields
from memcalc.convert.formats.transformers_model import configuration
from memcalc.convert.job import ConfigJob

_TYPES = {str: "str", int: "int", float: "float", bool: "bool", list: "list[str]"}
_LOADED = """    # random weights; from_pretrained(script.model_name_or_path, dtype=...) loads those of the Hub
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=getattr(torch, script.dtype), attn_implementation=script.attn_implementation
    )
"""
_QUANTIZED = """    # a quantized base is loaded, not drawn at random; what FSDP shards is stored as floats
    quantization = transformers.BitsAndBytesConfig(
        {bits}bnb_4bit_compute_dtype=getattr(torch, script.dtype), bnb_4bit_quant_storage=getattr(torch, script.dtype),
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        script.model_name_or_path, config=config, dtype=getattr(torch, script.dtype),
        attn_implementation=script.attn_implementation, quantization_config=quantization,
    )
"""
_BITS = {
    "nf4": 'load_in_4bit=True, bnb_4bit_quant_type="nf4", ',
    "nf4-dq": 'load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,\n        ',
    "int8": "load_in_8bit=True, ",
}
_ADAPTED = """    adapters = peft.LoraConfig(
        task_type="CAUSAL_LM", r=script.lora_r, lora_alpha=script.lora_alpha, lora_dropout=script.lora_dropout,
        target_modules=script.lora_target_modules, modules_to_save={saved},
    )
    model = peft.get_peft_model(model, adapters, autocast_adapter_dtype=script.autocast_adapter_dtype)
"""


def script_text(job: ConfigJob) -> str:
    """Return the script of a job, whose plan stands in the arguments that it is given."""
    template = (files("memcalc.convert.formats") / "trainer_script.txt").read_text(encoding="utf-8")
    fields = {name: value for name, value in script_fields(job).items() if value is not None}
    parts = {
        "{title}": f"{job.model} on {job.gpus} x {job.gpu}",
        "{config}": configuration(job.sized(), "script.model_name_or_path"),
        "{fields}": "\n".join(f"    {name}: {_TYPES[type(value)]}" for name, value in fields.items()),
        "{imports}": "import peft\nimport torch" if job.strategy.lora else "import torch",
        "{needs}": "Transformers 5 and PEFT" if job.strategy.lora else "Transformers 5",
        "{model}": _model(job, fields),
    }
    for name, text in parts.items():
        template = template.replace(name, text)
    return template


def _model(job: ConfigJob, fields: dict[str, Any]) -> str:
    """The lines that make the model, and the adapters over it."""
    plan = job.strategy
    base = _LOADED if plan.quantize == "none" else _QUANTIZED.replace("{bits}", _BITS[plan.quantize])
    saved = "script.lora_modules_to_save" if "lora_modules_to_save" in fields else "None"
    return base + (_ADAPTED.replace("{saved}", saved) if plan.lora else "")
