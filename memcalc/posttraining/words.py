"""What post-training is told, read and checked word by word, and completed by its framework's defaults."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

from memcalc.errors import AbsentError, CombinationError, InputError, MissingError, UnknownNameError
from memcalc.planner.request import flag, one_of
from memcalc.posttraining.frameworks import RECIPES, TOOLKITS, Recipe, Toolkit, recipe_of, toolkit_of
from memcalc.serving.engines import number, value_of
from memcalc.specs.posttraining import LAYOUT, RL_OPTIONS, RL_WORDS, TRAINING, RlInputs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from memcalc.specs.strict import Option

MOST_RESPONSES = 100_000_000
"""Responses of a step, as sequences of a training job."""
PARKED = ("optimizer", "params")
OFFLINE_ALONE = ("engine", "engine_tp", "engine_gpus", "utilization", "max_seqs", "sleep", "prompts", "samples")


@dataclass(frozen=True)
class RlJob:
    """A job with every default resolved."""

    model: str
    gpu: str
    gpus: int
    node: str | None
    inputs: RlInputs
    training: Mapping[str, Any]
    """Words of ``memcalc estimate``."""
    toolkit: Toolkit
    recipe: Recipe
    reference: bool
    parks: tuple[str, ...]
    dirs: tuple[str, ...]

    @property
    def length(self) -> int:
        """The longest sequence [tokens]."""
        return self.inputs.prompt + self.inputs.response

    @property
    def unpadded(self) -> bool:
        """Whether the tokens of a micro-batch are those of the data."""
        return self.toolkit.unpads and not self.inputs.padded

    def batch(self, *, gradients: bool) -> tuple[int, int]:
        """Rows of a micro-batch on a rank, pairs as two, and the tokens of each; packed samples are one row.

        A rank has no more samples than its share of an optimizer step, or of all that was generated where
        log-probabilities are read. One of them may be of the longest length. Under Megatron-LM a rank is all GPUs that
        share one micro-batch.
        """
        inputs = self.inputs
        samples = inputs.mini_batch if gradients else inputs.prompts * max(1, inputs.samples)
        most = -(-samples // self.ranks) or MOST_RESPONSES
        longest = self.length * self.recipe.rows
        tokens = inputs.micro_tokens if gradients else inputs.logprob_tokens or inputs.micro_tokens
        if tokens:
            return 1, max(longest, min(tokens, most * (inputs.mean_length or longest)))
        rows = min(inputs.micro_batch if gradients else inputs.logprob_batch or inputs.micro_batch, most)
        if inputs.mean_length:
            return 1, max(self.length, rows * inputs.mean_length)
        return rows * self.recipe.rows, self.length

    @property
    def one_micro_batch(self) -> bool:
        """Whether an optimizer step is known to be one micro-batch on each rank."""
        inputs = self.inputs
        share = -(-inputs.mini_batch // self.ranks)
        if inputs.micro_tokens:
            return 0 < share * (inputs.mean_length or self.length * self.recipe.rows) <= inputs.micro_tokens
        return 0 < share <= inputs.micro_batch

    @property
    def tiled(self) -> bool:
        """Whether log-probabilities are made in tiles of logits."""
        return self.inputs.logits == "fused" and self.toolkit.tiles and self.recipe.head

    @property
    def critic(self) -> RlJob:
        """The same job with the micro-batches and checkpoints of its critic in the place of the policy's."""
        inputs = self.inputs
        changes: dict[str, Any] = {}
        if inputs.critic_micro_tokens:
            changes |= dict.fromkeys(("micro_tokens", "logprob_tokens"), inputs.critic_micro_tokens)
        elif inputs.critic_micro_batch:
            rows = inputs.critic_micro_batch
            changes |= {"micro_batch": rows, "logprob_batch": rows, "micro_tokens": 0, "logprob_tokens": 0}
        if inputs.critic_recompute:
            changes["recompute"] = inputs.critic_recompute
        return self.changed(**changes) if changes else self

    @property
    def trainer_gpus(self) -> int:
        """GPUs that the trained models are on."""
        return self.gpus - self.inputs.engine_gpus

    @property
    def megatron(self) -> bool:
        """Whether Megatron-LM trains."""
        return self.trainer.partition("@")[0] == "megatron"

    def degree(self, *names: str) -> int:
        """GPUs over which a layout spreads in these ways, [1]."""
        return prod(int(self.training.get(name) or 1) for name in names)

    @property
    def ranks(self) -> int:
        """Micro-batches that are trained on at once, [1]."""
        return max(1, self.trainer_gpus // self.degree("tp", "pp", "cp"))

    @property
    def shard_gpus(self) -> int:
        """GPUs that share one set of states: fewer than all where there are replicas of the shards."""
        return max(1, self.trainer_gpus // int(self.training.get("dp_replicate") or 1))

    @property
    def trainer(self) -> str:
        """What shards and trains."""
        return self.inputs.trainer or self.usual_trainer

    @property
    def usual_trainer(self) -> str:
        """What does so where nobody says otherwise."""
        return self.toolkit.trainer if self.trainer_gpus > 1 else self.toolkit.alone

    @property
    def lora(self) -> bool:
        """Whether adapters are trained."""
        return bool(self.training.get("lora"))

    def changed(self, **changes: Any) -> RlJob:
        """The same job with other inputs; ``recompute`` and ``zero`` are words of training."""
        trains = {name: changes.pop(name) for name in (*TRAINING, *LAYOUT) if name in changes}
        parks = parked(changes.get("park", ",".join(self.parks)))
        inputs = self.inputs.model_copy(update=changes)
        return replace(self, inputs=inputs, parks=parks, training={**self.training, **trains})


def read_words(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Each word by itself; a name that no option has is refused."""
    known = (*RL_WORDS, *TRAINING, *LAYOUT)
    unknown = next((name for name in raw if name not in known), None)
    if unknown is not None:
        raise UnknownNameError("word", unknown, f"must be one of {', '.join(known)}", known)
    rows = [option for option in RL_OPTIONS if raw.get(option.name) is not None]
    return {option.name: _value(option, raw[option.name]) for option in rows}


def _value(option: Option, value: Any) -> Any:
    return 0 if option.name == "engine_gpus" and str(value) == "0" else value_of(option, value)


def parked(text: str) -> tuple[str, ...]:
    """What leaves the GPU between phases."""
    names = tuple(part.strip() for part in text.split(",") if part.strip() not in {"", "none"})
    for name in names:
        one_of(name, "park", PARKED)
    return tuple(name for name in PARKED if name in names)


def completed(
    model: str, gpu: str, gpus: int, node: str | None, raw: Mapping[str, Any], dirs: tuple[str, ...],
    assumptions: dict[str, str],
) -> RlJob:  # fmt: skip
    """The job of some words; what only the user can tell is asked for, and each default noted."""
    given = read_words(raw)
    ask(given)
    toolkit = toolkit_of(given["framework"])
    recipe = recipe_of(toolkit, given["algorithm"])
    if not recipe.online:
        _refuse(given)
    elif not toolkit.utilization:
        raise CombinationError("algorithm", given["algorithm"], f"what {toolkit.name} generates is not counted")
    _check_trainer(given.get("trainer", ""), toolkit)
    _check_lengths(given, toolkit, recipe)
    _check_critic(given, recipe)
    usual = _defaults(given, toolkit, recipe)
    for name, value in usual.items():
        if name not in given and value not in (0, "", 0.0):
            assumptions[name] = str(value)
    inputs = RlInputs(**{**usual, **given})
    if toolkit.at_once and inputs.prompts and not inputs.engine_gpus and "max_seqs" not in given:
        # TRL 1.10 trainer/grpo_trainer.py: per_device_train_batch_size * steps_per_generation * tensor_parallel_size
        samples = inputs.prompts * max(1, inputs.samples)
        inputs = inputs.model_copy(update={"max_seqs": -(-samples * inputs.engine_tp // gpus)})
    reference = inputs.reference
    if reference is None:
        reference = recipe.frozen or (recipe.online and toolkit.kl)
        assumptions["reference"] = "yes" if reference else "none"
    if inputs.engine_gpus >= gpus:
        raise CombinationError("engine-gpus", inputs.engine_gpus, f"fewer than the {gpus} GPUs must be left to train")
    if inputs.prompts * max(1, inputs.samples) > MOST_RESPONSES:
        allowed = f"prompts and samples must come to at most {MOST_RESPONSES:,} responses in a step"
        raise CombinationError("prompts", inputs.prompts, allowed)
    training = {name: raw[name] for name in (*TRAINING, *LAYOUT) if raw.get(name) is not None}
    shares = recipe.online and not inputs.engine_gpus
    parks = parked(inputs.park) if inputs.park else toolkit.parks if shares else ()
    job = RlJob(model, gpu, gpus, node, inputs, training, toolkit, recipe, reference, parks, dirs)
    _check_layout(job)
    return job


def _check_layout(job: RlJob) -> None:
    """Refuse a layout that the trainer has not, or that does not come out even, and what is not modelled of one."""
    inputs, training = job.inputs, job.training
    degrees = {**{name: training.get(name) for name in LAYOUT}, "expert_tp": inputs.expert_tp or None}
    degrees["stage_split"] = inputs.stage_split or None
    stated = next((name for name, value in degrees.items() if value is not None), None)
    if not job.megatron:
        if stated is not None:
            names = ", ".join(name.replace("_", "-") for name in degrees)
            allowed = f"{job.trainer} has no such layout: {names} are for --trainer megatron"
            raise CombinationError(flag(stated), degrees[stated], allowed)
        return
    for name in LAYOUT:
        if training.get(name) is not None and not (str(training[name]).isdecimal() and int(training[name])):
            raise InputError(name, training[name], "must be a whole number of at least 1")
    if job.trainer_gpus % job.degree("tp", "pp", "cp"):
        raise CombinationError(
            "gpus", job.trainer_gpus, f"must be a multiple of tp x pp x cp, {job.degree('tp', 'pp', 'cp')}"
        )
    split_fields(inputs.stage_split)
    for name, value, what in (
        ("algorithm", inputs.algorithm * (job.recipe.critic or not job.recipe.online), "a critic or pairs"),
        ("reward-model", inputs.reward_model, "a reward model"),
        ("lora", training.get("lora"), "adapters"),
        ("padded", inputs.padded, "padded samples"),
        ("whole-gradients", inputs.whole_gradients, "FSDP's gradients"),
        ("dp-replicate", training.get("dp_replicate"), "replicas of FSDP's shards"),
    ):
        if value and str(value) not in ("1", "none"):
            raise CombinationError(name, value, f"memcalc rl has no figures for {what} by megatron")


_SIZED = {"first": "strategy.first_stage_layers", "last": "strategy.last_stage_layers"}
_ENDS = {"embedding": "strategy.embedding_in_split", "loss": "strategy.loss_in_split"}


def split_fields(text: str) -> dict[str, str]:
    """The fields of a strategy that say how blocks part over stages.

    >>> split_fields("last=6,embedding")
    {'strategy.last_stage_layers': '6', 'strategy.embedding_in_split': 'true'}
    """
    fields: dict[str, str] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, _, size = part.partition("=")
        if name in _SIZED and size.isdecimal() and int(size):
            fields[_SIZED[name]] = size
        elif part in _ENDS:
            fields[_ENDS[part]] = "true"
        else:
            raise InputError("stage-split", text, "must be any of first=N, last=N, embedding and loss, with commas")
    return fields


def ask(given: Mapping[str, Any], *, searched: bool = False) -> None:
    """Ask in one sentence for what only the user can tell; of a plan, which is ``searched``, the step's size too."""
    if lacking := _lacking(given, searched=searched):
        raise _needs(lacking)


def gpus_of(gpus: int | str | None, raw: Mapping[str, Any], *, searched: bool = False) -> int:
    """How many GPUs a question is about; where it does not say, that is asked for with all else that it lacks."""
    if gpus is None:
        raise _needs(["--gpus", *_lacking(read_words(raw), searched=searched)])
    return number(gpus, "gpus")


def _needs(lacking: Sequence[str]) -> MissingError:
    return MissingError(f"post-training needs more: give {'; '.join(lacking)}.")


def _lacking(given: Mapping[str, Any], *, searched: bool) -> list[str]:
    known = {"algorithm": tuple(RECIPES), "framework": tuple(TOOLKITS)}
    lacking = [f"--{name} ({', '.join(names)})" for name, names in known.items() if name not in given]
    if not {"prompt", "response"} <= given.keys():
        lacking.append("--prompt and --response (the longest of each, in tokens)")
    recipe = RECIPES[given["algorithm"]] if "algorithm" in given else None
    if searched and recipe is not None and recipe.online and not given.get("prompts"):
        lacking.append("--prompts (of a step) and --samples (of each prompt)")
    toolkit = toolkit_of(given["framework"]) if "framework" in given else None
    stated = searched or not given.keys().isdisjoint(("micro_batch", "micro_tokens"))
    if toolkit is not None and not toolkit.micro_batch and not stated:
        lacking.append(f"--micro-batch or --micro-tokens, of which {toolkit.name.partition('@')[0]} has no default")
    return lacking


def _defaults(given: Mapping[str, Any], toolkit: Toolkit, recipe: Recipe) -> dict[str, Any]:
    """The framework's own values."""
    if "micro_batch" in given and "micro_tokens" in given:
        raise CombinationError("micro-tokens", given["micro_tokens"], "--micro-batch is given too")
    usual: dict[str, Any] = {"logits": "fused"} if given["algorithm"] in toolkit.fuses else {}
    if "micro_tokens" not in given and "micro_batch" not in given:
        usual["micro_batch"] = toolkit.micro_batch
    if "logprob_tokens" in given and "logprob_batch" in given:
        raise CombinationError("logprob-tokens", given["logprob_tokens"], "--logprob-batch is given too")
    for name in ("micro_tokens", "logprob_tokens"):
        if name in given and given[name] < given["prompt"] + given["response"]:
            raise InputError(flag(name), given[name], "must hold one prompt with its response")
    if recipe.online:
        apart = bool(given.get("engine_gpus"))
        usual |= {"engine_tp": toolkit.engine_tp, "max_seqs": toolkit.max_seqs}
        usual |= {"samples": 1} if given.get("prompts") else {}
        usual["utilization"] = toolkit.apart if apart else toolkit.utilization
        usual["sleep"] = "0" if apart else toolkit.sleep
    return usual


def _check_trainer(trainer: str, toolkit: Toolkit) -> None:
    """Refuse what the framework does not train by, or what is not modelled of it."""
    known = toolkit.choices.trains
    if trainer and trainer.partition("@")[0] not in known:
        raise UnknownNameError("trainer", trainer, f"{toolkit.name} is counted as trained by {', '.join(known)}", known)


def _check_lengths(given: Mapping[str, Any], toolkit: Toolkit, recipe: Recipe) -> None:
    """Refuse what is said of padding where it is not removed, or where tokens are counted instead of samples."""
    for name in ("mean_length", "padded"):
        if given.get(name) and not (toolkit.unpads and recipe.online):
            raise CombinationError(flag(name), given[name], f"{toolkit.name} pads samples to the longest of a batch")
    mean, longest = given.get("mean_length", 0), given["prompt"] + given["response"]
    if given.get("micro_tokens") and given.get("padded"):
        raise CombinationError(flag("padded"), True, "--micro-tokens says how many tokens a micro-batch has")
    if given.get("micro_tokens") and mean and not given.get("mini_batch"):
        allowed = "--micro-tokens says how many tokens a micro-batch has; --mini-batch, of how many samples at the most"
        raise CombinationError(flag("mean_length"), mean, allowed)
    if mean > longest:
        raise InputError(flag("mean_length"), mean, f"must be at most the longest prompt and response, {longest:,}")
    if mean and given.get("padded"):
        raise CombinationError(flag("mean_length"), mean, "--padded makes every sample the longest")


def _check_critic(given: Mapping[str, Any], recipe: Recipe) -> None:
    """Refuse what is said of a critic where there is none, or twice."""
    named = [name for name in ("critic_micro_batch", "critic_micro_tokens", "critic_recompute") if given.get(name)]
    if named and not recipe.critic:
        raise CombinationError(flag(named[0]), given[named[0]], f"{given['algorithm']} has no critic")
    if named[:2] == ["critic_micro_batch", "critic_micro_tokens"]:
        raise CombinationError(flag(named[1]), given[named[1]], "--critic-micro-batch is given too")
    if 0 < given.get("critic_micro_tokens", 0) < given["prompt"] + given["response"]:
        allowed = "must hold one prompt with its response"
        raise InputError(flag("critic_micro_tokens"), given["critic_micro_tokens"], allowed)


def _refuse(given: Mapping[str, Any]) -> None:
    """Refuse the words of a rollout where nothing is generated."""
    for name in OFFLINE_ALONE:
        if name in given:
            raise CombinationError(flag(name), given[name], f"{given['algorithm']} generates nothing")


def check_engines(job: RlJob) -> None:
    """Refuse a split that does not come out even."""
    inputs = job.inputs
    pool = inputs.engine_gpus or job.gpus
    if pool % inputs.engine_tp:
        raise CombinationError("engine-tp", inputs.engine_tp, f"must divide the {pool} GPUs of the engines")
    if not job.model:
        raise AbsentError("model", "", "give --model")
