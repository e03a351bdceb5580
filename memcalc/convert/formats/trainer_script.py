"""The training script beside arguments of the Trainer: it loads the model as they say, and trains on random tokens.

The calls are those of Transformers 5.23 (hf_argparser.py, trainer.py, modeling_utils.py: from_config).
"""

from __future__ import annotations

from importlib.resources import files

from memcalc.convert.formats.transformers_model import configuration
from memcalc.convert.job import ConfigJob


def script_text(job: ConfigJob) -> str:
    """Return the script of a job, whose plan stands in the arguments that it is given."""
    template = (files("memcalc.convert.formats") / "trainer_script.txt").read_text(encoding="utf-8")
    config = configuration(job.sized(), "script.model_name_or_path")
    return template.replace("{title}", f"{job.model} on {job.gpus} x {job.gpu}").replace("{config}", config)
