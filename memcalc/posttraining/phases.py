"""The phases of a step, and what each role holds in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memcalc.formulas.activations import log_prob_bytes, split_log_prob_bytes, tiled_cast_bytes, tiled_log_prob_bytes
from memcalc.posttraining.figures import OF_STANDARD, logit_entries
from memcalc.results.posttraining import RlPhase

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.posttraining.figures import Trained
    from memcalc.posttraining.words import RlJob
    from memcalc.results.serving import Served
    from memcalc.specs.model import Model

PURE = ("bf16", "fp16")
"""Precisions without autocast, whose outputs are not cast to fp32."""


def is_pure(job: RlJob) -> bool:
    """Whether outputs stay in 16 bits: autocast over weights of 16 bits casts them to fp32 as any does.

    Accelerate 1.15 accelerator.py, ``prepare_model`` (``convert_outputs_to_fp32``).
    """
    return job.training.get("precision") in PURE and not job.training.get("autocast")


def logits_of(job: RlJob, model: Model, *, gradients: bool) -> int:
    """What log-probabilities hold of logits on one GPU [bytes]."""
    inputs, toolkit, recipe = job.inputs, job.toolkit, job.recipe
    if job.tiled:
        return tiled_logits(job, model, gradients=gradients)
    without = not recipe.head and inputs.algorithm not in toolkit.widths
    if without or not recipe.log_probs:
        return 0
    if job.megatron:
        height = ENTROPIES if inputs.entropy else TRAINED
        return megatron_logits(job, model, height if gradients else OF_STANDARD, gradients=gradients)
    rows, tokens = job.batch(gradients=gradients)
    if inputs.logits == "fused":
        return 0
    if toolkit.completions and recipe.online and not inputs.micro_tokens:
        tokens = inputs.response + 1
    each = toolkit.width(inputs.algorithm, gradients=gradients)
    if gradients and toolkit.narrow and is_pure(job) and inputs.algorithm not in toolkit.widths:
        entropy = 0 if recipe.online else 4  # of preferences made row by row, of generated answers in chunks
        narrow = log_prob_bytes(rows, tokens, model.vocab, toolkit.narrow)
        return int(narrow + log_prob_bytes(1, tokens, model.vocab, entropy))
    return int(log_prob_bytes(rows, tokens, model.vocab, each + toolkit.entropy * inputs.entropy))


def tiled_logits(job: RlJob, model: Model, *, gradients: bool) -> int:
    """What a kernel in tiles holds, which scores answers alone, and the final norm's copies of all tokens [bytes].

    TRL 1.16 trainer/utils.py, add_fused_lm_head: ``hidden_states[mask]``. The norm keeps its input in fp32 and what it
    has normalised in its own width (modeling_qwen2.py, Qwen2RMSNorm).
    """
    rows, tokens = job.batch(gradients=gradients)
    wide = str(job.training.get("precision")).endswith(("autocast", "fp32"))
    hidden = model.embedding_dim or model.hidden
    packed = job.inputs.micro_tokens or job.inputs.mean_length or not job.recipe.log_probs
    scored = rows * (tokens if packed else min(tokens, job.inputs.response))
    copies = tiled_cast_bytes(scored, model.vocab, hidden, 2) * wide
    trained = 0 if job.lora else 6 - 2 * wide
    tile = tiled_log_prob_bytes(scored, model.vocab, hidden * gradients, 2, trained)
    return int(tile + copies + gradients * (8 if wide else 6) * rows * tokens * hidden)


# verl 1dda039b workers/engine/megatron/transformer_impl.py (_lm_head_logits_processor), trainer/ppo/ray_trainer.py,
# utils/megatron/tensor_parallel.py (_VocabParallelEntropy): fp32 logits are divided in place, and the loss makes its
# softmax in them. Backward of the division has both gradients at once. The entropy takes a copy of the logits and a
# softmax of its own, and is always read with old log-probs.
TRAINED, ENTROPIES = 8, 12
"""Bytes of a logit in an update, and in a pass or an update with the entropy, by Megatron-LM's workers."""


def megatron_logits(job: RlJob, model: Model, each: int, *, gradients: bool = False) -> int:
    """Logits of the last stage, at so many bytes an entry, or what the kernel holds that has none [bytes]."""
    if job.inputs.logits == "fused":
        rows, tokens = job.batch(gradients=gradients)
        width = (model.embedding_dim or model.hidden) if gradients else 0
        shared, part = -(-rows * tokens // job.degree("cp")), -(-model.vocab // job.degree("tp"))
        return int(split_log_prob_bytes(shared, part, width))
    return each * logit_entries(job, model, gradients=gradients)


def frozen_weights(job: RlJob, model: Trained, width: int = 2) -> int:
    """A GPU's share of such a model that is only read, at so many bytes a weight [bytes]."""
    shards = job.shard_gpus if model.stage == 3 else 1
    return -(-width * model.largest // shards)


POLICY, CRITIC, REFERENCE, REWARD = "policy", "critic", "reference", "reward model"
LOGITS, ENGINE, BESIDE, TRANSFER = "logits", "engine", "contexts", "weights under way"
OUTSIDE = ("context", "outside PyTorch", "CUDA graphs")
"""What an engine that sleeps keeps on the GPU."""


@dataclass(frozen=True)
class Cast:
    """All roles of a job."""

    job: RlJob
    model: Model
    policy: Trained
    critic: Trained | None
    reward: Trained | None
    """A reward model, of which only a pass without gradients is used."""
    reference: int
    """What a GPU keeps of the reference [bytes]; 0 where it is on the host, is the policy itself or takes turns."""
    reference_away: int
    """What the host keeps of it for each GPU where it never stays there [bytes]."""
    judge: int
    """What a GPU keeps of the reward model [bytes]."""
    served: Served | None = None
    largest_utilization: float | None = None
    """The largest share that an engine may take beside what trained models keep once they were trained."""

    @property
    def shares(self) -> bool:
        """Whether engines are on the trainer's GPUs."""
        return self.served is not None and not self.job.inputs.engine_gpus

    @property
    def idle(self) -> dict[str, int]:
        """What every role keeps on a GPU while another works [bytes]."""
        parks, away = self.job.parks, "params" in self.job.parks
        roles = {POLICY: self.policy.idle(parks)}
        if self.critic is not None:
            roles[CRITIC] = self.critic.idle(parks)
        if self.reference and not away:
            roles[REFERENCE] = self.reference
        if self.judge and not away:
            roles[REWARD] = self.judge
        return roles

    @property
    def resting(self) -> int:
        """What all roles and the trainer's context keep of a GPU [bytes]."""
        return sum(self.idle.values()) + self.policy.beside

    @property
    def starting(self) -> int:
        """The same when engines start, before the first optimizer step, in which its states appear [bytes]."""
        trained = [model for model in (self.policy, self.critic) if model is not None]
        late = sum(model.optimizer - model.early for model in trained)
        return self.resting - late * ("optimizer" not in self.job.parks)

    def awake(self, other: int) -> int:
        """What an engine holds of a GPU that it shares with so much else [bytes]."""
        return self.served.device - other if self.served else 0

    @property
    def asleep(self) -> int:
        """What an engine keeps outside the rollout [bytes]."""
        if self.served is None or not self.shares:
            return 0
        if self.job.inputs.sleep == "0":
            return self.awake(self.starting)
        return max(sum(stage.size(name) for name in OUTSIDE) for stage in self.served.stages)


def phases_of(cast: Cast) -> Iterator[RlPhase]:
    """The phases in their order."""
    job, policy = cast.job, cast.policy
    reads = logits_of(job, cast.model, gradients=False)
    again = megatron_logits(job, cast.model, ENTROPIES) if job.megatron else reads
    if cast.served is not None:
        yield _rollout(cast, "rollout")
    if cast.reward is not None:
        yield _phase(cast, "reward", {REWARD: cast.judge + cast.reward.forward})
    resident = policy.resident(job.parks)
    if cast.served is not None:
        yield _phase(cast, "old log-probs", {POLICY: resident + policy.forward, LOGITS: again})
    if job.reference:
        roles = {REFERENCE: cast.reference + policy.forward, LOGITS: reads}
        if not cast.reference and not cast.reference_away:
            roles = {POLICY: resident + policy.forward, LOGITS: reads}
        yield _phase(cast, "reference log-probs", roles)
    if cast.critic is not None:
        yield _phase(cast, "values", {CRITIC: cast.critic.states + cast.critic.forward})
    yield _update(cast)
    if cast.critic is not None:
        yield _phase(cast, "critic update", {CRITIC: cast.critic.states + cast.critic.update}, cast.critic.cached)
    if cast.served is not None:
        yield _sync(cast)
        if cast.shares and job.inputs.sleep != "0":
            yield _rollout(cast, "wake-up")


def _phase(cast: Cast, name: str, active: dict[str, int], cached: int = 0) -> RlPhase:
    """A phase of the trainer: who is active, and what the others keep."""
    roles = {**cast.idle, **active, BESIDE: cast.policy.beside}
    if cast.asleep:
        roles[ENGINE] = cast.asleep
    total = sum(roles.values())
    gpus = "shared" if cast.shares or cast.served is None else "trainer"
    return RlPhase(name=name, gpus=gpus, roles=_nonzero(roles), allocated=total, device=total + cached)


def _update(cast: Cast) -> RlPhase:
    """The policy's update; a reference's logits of the same batch are gone before backward is at its height."""
    policy = cast.policy
    trains = logits_of(cast.job, cast.model, gradients=True)
    beside_logits = policy.head + trains > policy.update
    height = policy.head if beside_logits else policy.update
    roles = {POLICY: policy.states + height, LOGITS: trains * beside_logits}
    return _phase(cast, "update", roles, policy.cached)


def _rollout(cast: Cast, name: str) -> RlPhase:
    """Engines at work, on GPUs of their own or beside what the trainer leaves."""
    if not cast.shares:
        size = cast.awake(0)
        return RlPhase(name=name, gpus="engine", roles={ENGINE: size}, allocated=size, device=size)
    cached = 0 if cast.job.toolkit.empties else cast.policy.cached
    roles = {ENGINE: cast.awake(cast.starting), **cast.idle, BESIDE: cast.policy.beside}
    total = sum(roles.values())
    return RlPhase(name=name, gpus="shared", roles=_nonzero(roles), allocated=total, device=total + cached)


def _sync(cast: Cast) -> RlPhase:
    """New weights on their way: the shard, a gathered tensor or all of them, a bucket, and the engine's weights."""
    job, policy = cast.job, cast.policy
    tensor = cast.model.vocab * (cast.model.embedding_dim or cast.model.hidden)
    tensor *= 1 + (job.degree("tp") > 1)  # shards of all ranks, and what is put together of them
    gathered = policy.largest if job.toolkit.merges and job.lora else tensor
    under_way = 2 * gathered + job.toolkit.bucket
    roles = {**cast.idle, POLICY: policy.resident(job.parks)}
    roles |= {TRANSFER: under_way, BESIDE: policy.beside}
    if cast.shares and cast.served is not None:
        weights = max(stage.size("weights") for stage in cast.served.stages)
        roles[ENGINE] = cast.asleep + (weights if job.inputs.sleep != "0" else 0)
    total = sum(roles.values())
    gpus = "shared" if cast.shares else "trainer"
    return RlPhase(name="weight sync", gpus=gpus, roles=_nonzero(roles), allocated=total, device=total)


def _nonzero(roles: dict[str, int]) -> dict[str, int]:
    return {name: size for name, size in roles.items() if size}
