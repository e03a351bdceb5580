"""A merged job of post-training: what follows from its algorithm, and the words of ``memcalc rl`` that it comes to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from memcalc.convert.config import JOB_KEYS, ROLE_KEYS, Config
from memcalc.errors import CombinationError, MissingError, UnknownNameError
from memcalc.preflight.job import PRESETS, MergedJob
from memcalc.preflight.names import model_named
from memcalc.specs.options import SETTINGS
from memcalc.specs.posttraining import LAYOUT, TRAINING
from memcalc.units import parse_tokens

if TYPE_CHECKING:
    from memcalc.results.posttraining import Rl

_RESPONSE = 512
"""TRL's max_completion_length where a config says nothing (trainer/grpo_config.py, rloo_config.py)."""
_SAMPLES = {"grpo": 8, "dapo": 8, "rloo": 2}
"""Its num_generations."""
_KL = {"rloo": 0.05}
"""Its beta, where that is not 0."""
_COUNTED = {"framework", "gpus", "seq_len", "micro_batch", "global_batch", "loss", *TRAINING}
"""Options of a merged job that post-training takes, or has in a form of its own."""


def generates(algorithm: str) -> bool:
    """Whether an algorithm of post-training learns from responses that the model itself makes."""
    from memcalc.posttraining.frameworks import RECIPES  # most jobs that are checked are of no post-training

    return RECIPES[algorithm].online


def _megatron(trainer: object) -> bool:
    """Whether a trainer, of whichever release, is Megatron-LM."""
    return str(trainer).partition("@")[0] == "megatron"


def _trains_by_trl(framework: object) -> bool:
    """Whether a framework, of whichever release, is TRL itself."""
    return str(framework).partition("@")[0] == "trl"


def _taken(job: MergedJob) -> tuple[str, ...]:
    """Options of training that the job's trainer takes."""
    return (*TRAINING, *LAYOUT) if _megatron(job.facts.get("rl.trainer")) else TRAINING


def stand_in(job: MergedJob) -> None:
    """Say the sequence and micro-batch of post-training, which its lengths come to, before anything follows from them.

    TRL's trainers of preferences cut a pair's sequences to one length, in which the prompt has no part of its own.
    """
    _check_given(job)
    if not job.algorithm:
        return
    facts, options = job.facts, job.options
    facts.setdefault("rl.framework", "trl")
    if options.get("kernels") == "fused":  # Liger's, whose losses hold no logits
        facts.setdefault("rl.logits", "fused")
    if generates(job.algorithm) and _trains_by_trl(facts["rl.framework"]):
        _online(job)
    lengths = [parse_tokens(facts[name], name) for name in ("rl.prompt", "rl.response") if facts.get(name)]
    if generates(job.algorithm):
        options["seq_len"] = sum(lengths) or 1
    elif options.get("seq_len") is None and len(lengths) == 2:
        options["seq_len"] = sum(lengths)
    if facts.get("rl.micro_tokens"):
        options.setdefault("micro_batch", 1)


def _check_given(job: MergedJob) -> None:
    """Refuse words of post-training that are none, or that stand beside files of no post-training."""
    unknown = next((name for name in job.settings if name.startswith("rl.")), None)
    if unknown is not None:
        raise UnknownNameError("set", unknown, "must be rl. and an option of memcalc rl", ROLE_KEYS)
    if not job.algorithm:
        given = next((name for name in job.facts if name.startswith("rl.") and name not in job.origins), None)
        if given is not None:
            raise CombinationError("set", given, "the files train on the next token")


def check_counted(job: MergedJob, given: Mapping[str, Any]) -> None:
    """Refuse what is given beside the files and post-training does not count."""
    named = {SETTINGS.get(name, name): value for name, value in given.get("settings", {}).items()}
    for name, value in {**given, **named}.items():
        if value is None or name in ("settings", *PRESETS, *_COUNTED, *_taken(job)) or name in JOB_KEYS:
            continue
        raise CombinationError(name.replace("_", "-"), value, f"{job.algorithm} takes the options of memcalc rl alone")


def _online(job: MergedJob) -> None:
    """TRL's defaults of a trainer that generates."""
    facts, algorithm = job.facts, job.algorithm
    facts.setdefault("rl.response", _RESPONSE)
    facts.setdefault("rl.samples", _SAMPLES[algorithm])
    if facts.get("rl.reference") is None:
        facts["rl.reference"] = bool(facts.get("rl.beta", _KL.get(algorithm, 0)))


def lacking_roles(job: MergedJob) -> Iterator[tuple[str, str]]:
    """What no file of a job of post-training says: the option, and why it is asked for."""
    if not job.algorithm or not generates(job.algorithm):
        return
    facts = job.facts
    if not facts.get("rl.prompt"):
        yield "rl.prompt", "the longest prompt of the data, which TRL does not cut"
    if _trains_by_trl(facts["rl.framework"]) and not facts.get("rl.vllm") and "rl.engine" not in facts:
        yield "rl.engine", "use_vllm is off, and generation by Transformers itself has no figures: vllm, to count one"
    if facts.get("rl.apart") and not facts.get("rl.engine_gpus"):
        yield "rl.engine_gpus", "a server of its own generates, on GPUs that its own command says"


def role_words(job: MergedJob, dirs: tuple[str, ...]) -> dict[str, Any]:
    """The keywords of :func:`memcalc.rl` for a merged job."""
    facts, options = job.facts, job.options
    keywords = {name[3:]: facts[name] for name in ROLE_KEYS if facts.get(name) is not None}
    keywords |= {name: _typed(options[name]) for name in _taken(job) if options.get(name) not in (None, ())}
    keywords |= {name: facts[name] for name in ("model", "gpu", "node") if facts.get(name) is not None}
    separate = facts.get("rl.apart") and generates(job.algorithm)
    apart = int(parse_tokens(keywords["engine_gpus"], "engine-gpus")) if separate else 0
    keywords["gpus"] = int(options["gpus"]) + apart
    if not keywords.get("micro_tokens"):
        keywords["micro_batch"] = int(options["micro_batch"])
    if _trains_by_trl(keywords["framework"]) or keywords["framework"] == "llamafactory":
        keywords |= _trl(job, keywords)
    for name in ("critic_model", "reward_model"):
        if name in keywords:
            keywords[name] = model_named(str(keywords[name]), dirs=dirs, option=f"--set rl.{name}=…")
    if not generates(job.algorithm):
        keywords["prompt"] = int(options["seq_len"]) // 2
        keywords["response"] = int(options["seq_len"]) - keywords["prompt"]
    return keywords


def _trl(job: MergedJob, keywords: dict[str, Any]) -> dict[str, Any]:
    """What TRL's trainers come to: prompts of a step, sequences of an engine, and what shards."""
    extra: dict[str, Any] = {}
    if job.options.get("framework"):
        extra["trainer"] = str(job.options["framework"])
    origin = job.origins.get("accumulation")
    if origin and not origin[1].default and int(job.facts["accumulation"]) == 1:  # no gradients of earlier ones
        extra["mini_batch"] = keywords["micro_batch"] * int(job.options["gpus"])
    if not generates(keywords["algorithm"]):
        return extra
    trainers = int(job.options["gpus"])
    steps = _generated_steps(job, keywords["micro_batch"] * trainers)
    samples = keywords["micro_batch"] * steps * trainers
    if samples % int(keywords["samples"]) == 0:
        extra["prompts"] = samples // int(keywords["samples"])
    if not job.facts.get("rl.apart") and "max_seqs" not in keywords:
        # generation/vllm_generation.py: as many sequences as one generation of the ranks of an engine
        extra["max_seqs"] = keywords["micro_batch"] * steps * int(keywords.get("engine_tp", 1))
    return extra


def _generated_steps(job: MergedJob, samples: int) -> int:
    """Micro-batches for which responses are generated at once, where one of all ranks has so many samples.

    TRL 1.10 trainer/grpo_config.py, rloo_config.py (__post_init__): those of an optimizer step where neither is said.
    """
    facts, name = job.facts, "generation_batch_size"
    batch, steps = int(facts.get("rl.generation_batch") or 0), int(facts.get("rl.accumulation") or 0)
    if batch and steps:
        raise CombinationError(name, batch, f"steps_per_generation {steps} stands beside it, and TRL takes one of both")
    if batch % samples:
        raise CombinationError(
            name, batch, f"must be a multiple of the {samples} samples of a micro-batch of all ranks"
        )
    return batch // samples or steps or int(facts.get("accumulation") or 1)


def _typed(value: Any) -> Any:
    """A value as it is typed: lists with commas."""
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else value


def answer(job: MergedJob, configs: tuple[Config, ...], dirs: tuple[str, ...], *, advice: bool = True) -> Rl:
    """The answer of ``memcalc rl`` for a merged job, with what was noticed in its files."""
    keywords = role_words(job, dirs)
    if not isinstance(keywords["model"], str):
        raise MissingError("the files describe a model by its sizes, which post-training does not take: give --model.")
    from memcalc.posttraining import rl

    result = rl(**keywords, preset_dirs=dirs, advice=advice)
    deferred = _deferred(keywords, result, dirs) if job.facts["rl.framework"] == "verl" else ()
    findings = [(config, finding) for config in configs for finding in config.findings]
    noted = tuple(
        f"{config.document.path.name}: {finding.message}"
        for config, finding in (*findings, *job.findings)
        if finding.severity != "note"
    )
    return result.model_copy(update={"warnings": (*noted, *deferred, *_left_out(job, configs), *result.warnings)})


def _deferred(keywords: Mapping[str, Any], result: Rl, dirs: tuple[str, ...]) -> Iterator[str]:
    """Say where the release that always defers reductions holds more than the GPU has.

    verl 483b8a00 (v0.9.0, August 2026) workers/engine/fsdp/transformer_impl.py, _gradient_sync_context, asks no key (PR
    7095); releases with the key (PR 7458, and its backport to 0.9) have it off.
    """
    fixed = "whole_gradients" in keywords or _megatron(keywords.get("trainer")) or keywords.get("lora")
    if fixed or result.verdict == "does-not-fit":
        return
    from memcalc.posttraining import rl

    other = rl(**keywords, whole_gradients=True, preset_dirs=dirs, advice=False)
    if other.verdict != result.verdict:
        yield (
            "verl 0.9.0 always keeps gradients whole until a step's last micro-batch, with which this "
            f"{_VERDICTS[other.verdict]}: --set rl.whole_gradients=true counts it."
        )


_VERDICTS = {"does-not-fit": "does not fit", "tight": "is tight"}


def _left_out(job: MergedJob, configs: tuple[Config, ...]) -> Iterator[str]:
    """Options and fields of training that the files state and post-training does not count; what they leave open."""
    names = [
        name
        for name, value in job.options.items()
        if name not in (*_COUNTED, *_taken(job)) and name in job.origins and str(value) not in ("none", "False")
    ]
    names += [name for name in job.settings if name in job.origins and not job.origins[name][1].default]
    if names:
        yield f"what the files say of {', '.join(sorted(names))} is not counted in post-training."
    launched = any(config.document.kind in ("flags", "shell") for config in configs)
    if job.options.get("framework") == "ddp" and "zero" not in job.origins and not launched:
        yield "no file says what ranks share: each is counted with all weights, gradients and states (DDP)."
    if job.facts.get("varying_lengths") and not generates(job.algorithm):
        yield "every sequence counts with the longest length, to which rows are cut: shorter ones take less."
