"""What each post-training framework does by default, and what each algorithm needs: data with eras.

Read in verl-project/verl 1dda039b (0.10), huggingface/trl f2cd5771 (1.10) and 1.16.0, OpenRLHF/OpenRLHF 3c3be623
(0.11) and NVIDIA-NeMo/RL 7ea279ab. A release is named as in ``verl@0.10``; older ones were not read. TRL's bytes of a
logit were measured besides: DPO and GRPO trainers of its 1.10.0 under bf16 autocast, live tensors of a step on the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from memcalc.errors import InputError, UnknownNameError
from memcalc.units import MIB


@dataclass(frozen=True, slots=True)
class Choices:
    """What a framework can be told of its trainer and its engines, each the simplest first."""

    zero: tuple[int, ...]
    """How far trained weights are sharded over several GPUs."""
    park: tuple[str, ...]
    """What of trained models can leave the GPU between phases."""
    sleep: tuple[str, ...]
    """Levels of sleep of an engine on the same GPUs."""
    trains: tuple[str, ...]
    """Frameworks of ``memcalc estimate`` that shard and train for it, as far as they are modelled."""
    offload: tuple[str, ...] = ("none",)
    """What its trainer can keep on the host."""
    packs: bool = True
    """Whether a micro-batch can be a budget of tokens."""
    fuses: bool = False
    """Whether it has a kernel of log-probabilities without logits."""


@dataclass(frozen=True, slots=True)
class Toolkit:
    """One release of a framework."""

    name: str
    """Name and release."""
    trainer: str
    """What shards and trains on several GPUs: a framework of ``memcalc estimate``."""
    precision: str
    """Of the trained weights; the trainer's own where empty."""
    alone: str
    """What trains on one."""
    zero: int
    """How far they are sharded over several GPUs."""
    recompute: str
    """Whether blocks are checkpointed by default."""
    micro_batch: int
    """Samples of a micro-batch; 0 where it has no default."""
    utilization: float
    """Share of a GPU that a colocated engine may take."""
    apart: float
    """The same where engines have GPUs to themselves."""
    engine_tp: int
    """Ranks of an engine."""
    max_seqs: int
    """Sequences that an engine runs at once; 0 for the engine's own default."""
    batched: int
    """Tokens of an engine's step; 0 for the engine's own default."""
    sleep: str
    """What a colocated engine gives back outside the rollout."""
    parks: tuple[str, ...]
    """What of trained models leaves the GPU between its phases."""
    empties: bool
    """Whether the trainer gives its cache back before the engine wakes up."""
    reads: float
    """Bytes of a logit in a pass of log-probabilities without gradients."""
    trains: float
    """The same at the height of an update."""
    entropy: float
    """What the entropy adds to each."""
    completions: bool
    """Whether logits are of the response alone; else of prompt and response."""
    kl: bool
    """Whether a reference is there by default."""
    bucket: int
    """What weights pass through on their way to an engine on the same GPU [bytes]."""
    merges: bool
    """Whether adapters are merged with all weights gathered at once."""
    choices: Choices
    """What it can be told beside these defaults."""
    source: str
    swaps: bool = False
    """Whether the reference waits on the host, and is put in the policy's place while it is read."""
    reference_on_host: int = 0
    """Bytes of a weight of a reference that stays on the host and is fetched unit by unit; 0 where it is on the GPU."""
    unpads: bool = False
    """Whether padding is removed, so that a micro-batch of samples has the tokens of the data."""
    frozen_fp32: bool = False
    """Whether weights under adapters stay in fp32."""
    reduces_wide: bool = False
    """Whether FSDP is told to reduce in fp32."""
    widths: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """By algorithm ``reads`` and ``trains`` where they differ; also of those that have no logits elsewhere."""
    fuses: tuple[str, ...] = ()
    """Algorithms whose log-probabilities come from a kernel that holds no logits, unless told otherwise."""

    narrow: float = 0
    """``trains`` where all is in 16 bits without autocast, one row in fp32 left out; 0 where it is the same."""
    at_once: bool = False
    """Whether an engine on the trainer's GPUs runs all its samples of a step at once, so that no limit is set."""
    scores: bool = False
    """Whether its fine-tuning reads log-probabilities of tokens too, as its updates do; else it has the plain loss."""
    tiles: bool = False
    """Whether its own kernel without logits makes them in tiles, with the head's gradient in fp32."""

    def width(self, algorithm: str, *, gradients: bool) -> float:
        """Bytes of a logit at the height of an update, or of a pass without gradients."""
        return self.widths.get(algorithm, (self.reads, self.trains))[gradients]


VERL = Toolkit(
    "verl@0.10", trainer="fsdp1", alone="fsdp1", precision="bf16-mixed", zero=3, recompute="full",
    micro_batch=0, utilization=0.5, apart=0.9, engine_tp=2, max_seqs=256, batched=8192, sleep="2", parks=(),
    empties=True, reads=4, trains=6, entropy=4, completions=False, kl=False, bucket=2048 * MIB, merges=False,
    choices=Choices(
        (3,), ("none", "optimizer", "params,optimizer"), ("2",), ("fsdp1", "fsdp2", "megatron"), fuses=True,
    ),
    reference_on_host=4, unpads=True, frozen_fp32=True, reduces_wide=True, scores=True,
    source="verl workers/engine_workers.py, workers/engine/fsdp/transformer_impl.py, workers/config/rollout.py, "
    "bucketed_weight_transfer.py, workers/utils/losses.py@1dda039b",
)  # fmt: skip
TRL = Toolkit(
    "trl@1.10", trainer="deepspeed", alone="hf", precision="", zero=3, recompute="full", micro_batch=8,
    utilization=0.3, apart=0.9, engine_tp=1, max_seqs=0, batched=4096, sleep="0", parks=(), empties=False,
    reads=8, trains=16, entropy=0, completions=True, kl=False, bucket=0, merges=True,
    choices=Choices(
        (3, 2), ("none",), ("0", "2"), ("deepspeed", "hf", "ddp", "fsdp1", "fsdp2"), ("none", "optimizer"),
        packs=False, fuses=True,
    ),
    narrow=8, at_once=True,
    source="trl trainer/grpo_trainer.py, trainer/utils.py, generation/vllm_generation.py@f2cd5771",
)  # fmt: skip
TRL_FUSED = replace(
    TRL, name="trl@1.15", fuses=("dpo", "kto", "grpo", "dapo", "rloo", "sft"), tiles=True,
    source="trl 1.15.0 and 1.16.0 trainer/utils.py (add_fused_lm_head), kernels/chunked_logprob.py",
)  # fmt: skip
LLAMAFACTORY = replace(
    TRL, name="llamafactory@0.9", utilization=0, completions=False, widths={"reward": (0, 6), "kto": (12, 20)},
    narrow=0,  # logits are cast to fp32 where nothing else is
    source="LLaMA-Factory train/dpo/trainer.py, train/kto/trainer.py, train/trainer_utils.py@ff6d4d12; "
    "trl models/modeling_value_head.py",
)  # fmt: skip
OPENRLHF = Toolkit(
    "openrlhf@0.11", trainer="deepspeed", alone="deepspeed", precision="bf16-mixed", zero=2, recompute="none",
    micro_batch=1, utilization=0.5, apart=0.95, engine_tp=1, max_seqs=0, batched=0, sleep="0", parks=(),
    empties=True, reads=6, trains=12, entropy=8, completions=False, kl=True, bucket=0, merges=False,
    choices=Choices((2, 3), ("none", "optimizer"), ("0", "1"), ("deepspeed",), ("none", "optimizer")),
    source="OpenRLHF models/actor.py, trainer/ray/ppo_actor.py, utils/deepspeed/deepspeed_utils.py@3c3be623",
)  # fmt: skip
NEMO = Toolkit(
    "nemo-rl@0.5", trainer="fsdp2", alone="fsdp2", precision="bf16-mixed", zero=3, recompute="none",
    micro_batch=4, utilization=0.6, apart=0.9, engine_tp=1, max_seqs=0, batched=0, sleep="1",
    parks=("optimizer", "params"), empties=True, reads=12, trains=12, entropy=0, completions=False, kl=True, bucket=0,
    merges=False, choices=Choices((3,), ("params,optimizer",), ("1",), ("fsdp2",)), swaps=True, scores=True,
    source="NeMo-RL models/policy/workers/dtensor_policy_worker_v2.py, models/automodel/train.py, "
    "algorithms/loss/loss_functions.py (LossInputType.LOGPROB of NLLLossFn too), "
    "models/generation/vllm/vllm_worker.py, examples/configs/grpo_math_1B.yaml@7ea279ab",
)  # fmt: skip
TOOLKITS = {
    "trl": (TRL, TRL_FUSED), "verl": (VERL,), "openrlhf": (OPENRLHF,), "nemo-rl": (NEMO,),
    "llamafactory": (LLAMAFACTORY,),
}  # fmt: skip
"""By name: the eras that were read, the oldest first; a release is of the last one that began before it, and the newest
counts where none is said."""


def toolkit_of(name: str) -> Toolkit:
    """The defaults of a framework.

    >>> toolkit_of("verl").utilization
    0.5
    """
    bare, at, release = str(name).partition("@")
    if bare not in TOOLKITS:
        raise UnknownNameError("framework", bare, f"must be one of {', '.join(TOOLKITS)}", TOOLKITS)
    eras = TOOLKITS[bare]
    if not at:
        return eras[-1]
    if len(eras) == 1 and release != eras[0].name.partition("@")[2]:
        raise InputError("framework", name, f"the release that was read is {eras[0].name}")
    wanted = _release(name, release)
    begun = [era for era in eras if _release(era.name, era.name.partition("@")[2]) <= wanted]
    if not begun:
        raise InputError("framework", name, f"the releases that were read begin with {eras[0].name}")
    return begun[-1]


def _release(name: str, text: str) -> tuple[int, ...]:
    """A release as numbers that compare."""
    parts = text.split(".")
    if not 0 < len(parts) < 5 or not all(part.isdecimal() and len(part) < 5 for part in parts):
        raise InputError("framework", name, "its release must be numbers, as in trl@1.15")
    return tuple(map(int, parts))


@dataclass(frozen=True, slots=True)
class Recipe:
    """What an algorithm trains and reads."""

    rows: int = 1
    """Sequences that one sample puts into a forward."""
    online: bool = False
    """Whether responses are generated."""
    critic: bool = False
    """Whether a second model is trained that values tokens."""
    frozen: bool = False
    """Whether it has a reference by nature; else only by a KL term."""
    head: bool = True
    """Whether the trained model has logits."""
    log_probs: bool = True
    """Whether its loss reads log-probabilities of tokens; else it is the plain loss of fine-tuning."""


RECIPES = {
    "grpo": Recipe(online=True),
    "dapo": Recipe(online=True),
    "rloo": Recipe(online=True),
    "ppo": Recipe(online=True, critic=True, frozen=True),
    "dpo": Recipe(rows=2, frozen=True),
    "kto": Recipe(frozen=True),
    "orpo": Recipe(rows=2),
    "simpo": Recipe(rows=2),
    "reward": Recipe(rows=2, head=False),
    "sft": Recipe(log_probs=False),
}
"""The algorithms by name."""


def recipe_of(toolkit: Toolkit, algorithm: str) -> Recipe:
    """What an algorithm trains and reads by one release of a framework.

    >>> recipe_of(VERL, "sft").log_probs, recipe_of(TRL, "sft").log_probs
    (True, False)
    """
    recipe = RECIPES[algorithm]
    return replace(recipe, log_probs=recipe.log_probs or toolkit.scores)
