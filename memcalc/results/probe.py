"""The answers about measurements: a probe, a recorded module, a calibration."""

from typing import Literal

from memcalc.results.estimates import Answer, schema
from memcalc.specs.calibration import Calibration, Part
from memcalc.specs.strict import Frozen

ProbeStatus = Literal["planned", "measured", "oom", "failed", "skipped", "waiting"]
"""Would run; ran; ran out of memory; ended otherwise without a result; left out, with the reason; not reached."""


class ProbeFigure(Frozen):
    """One figure of a run beside its prediction [bytes]."""

    name: str
    """allocated, reserved, device, or a phase of the second step."""
    measured: int
    """As read [bytes]."""
    predicted: int
    """As estimated [bytes]."""
    error: float
    """Predicted over measured, less one."""


class ProbedJob(Frozen):
    """One job of a probe."""

    id: str
    """Within the suite."""
    kind: str
    """Which measurement, such as ``step``, ``machine`` or ``rates``."""
    status: ProbeStatus
    """What became of it."""
    reason: str = ""
    """Why it was left out, or how it ended."""
    memory: int = 0
    """Predicted need of device memory [bytes]."""
    need: float = 0.0
    """Rough need of time [s]."""
    ranks: int = 1
    """Processes, [1]."""
    meant_to_fail: bool = False
    """Whether it is there to run out of memory."""
    figures: tuple[ProbeFigure, ...] = ()
    """Those that have a prediction; empty for a job that did not run."""
    seconds: float | None = None
    """Measured time of one step [s]."""
    found: str = ""
    """In words, of a measurement of the machine."""


class Probed(Answer):
    """The answer of ``memcalc probe``."""

    schema_: Literal["memcalc.probe/1"] = schema("memcalc.probe/1")
    device: str
    """``cuda`` or ``cpu``."""
    gpu: str
    """The preset."""
    name: str
    """What the driver calls the GPU."""
    capacity: int
    """Of the GPU [bytes]; 0 for a CPU."""
    free: int
    """What other processes left of it [bytes]."""
    suite: str
    """``full``, ``small``, ``steps`` or ``machine``."""
    dry_run: bool
    """Whether jobs were planned and none was run."""
    jobs: tuple[ProbedJob, ...]
    """Those of the suite, in the order in which they are run."""
    counts: dict[str, int]
    """Jobs by status."""
    resumed: int = 0
    """Results that an earlier, interrupted call had left."""
    need: float = 0.0
    """Rough need of time of the jobs that would run, or that wait [s]."""
    output: str = ""
    """The runs file; empty after a dry run."""
    commands: tuple[str, ...] = ()
    """What can be done next."""


class ModulePart(Frozen):
    """A block, or what stands before or after the blocks."""

    path: str
    """Of the block within the module; ``outside the blocks`` for all else."""
    name: str
    """The class of the module."""
    parameters: int
    """Trained elements, [1]."""
    saved: int
    """Bytes that it keeps for backward."""


class SavedTensor(Frozen):
    """One storage that autograd keeps for backward."""

    part: str
    """Path of the block; ``embedding``, ``between`` or ``head`` outside the blocks."""
    module: str
    """Path of the innermost module that ran when it was kept."""
    node: str
    """Who keeps it, as ``MmBackward0.self``."""
    shape: tuple[int, ...]
    """As the first that keeps it sees it."""
    dtype: str
    """As torch calls it, such as ``bfloat16``."""
    bytes: int
    """Of the whole storage."""
    weight: str
    """The parameter that it is a 16-bit copy of, if it is one."""


class ModuleComponents(Frozen):
    """Bytes alive at the peak; their sum is the peak."""

    parameters: int
    """Weights."""
    gradients: int
    """Of the parameters."""
    optimizer: int
    """States of the optimizer."""
    activations: int
    """All that is none of the others: what is kept for backward, and temporaries."""
    buffers: int
    """Of the module: no memory of an allocator or a framework is in it."""
    inputs: int
    """What the module is called with."""


class ModuleProbe(Answer):
    """The answer."""

    schema_: Literal["memcalc.probe-module/1"] = schema("memcalc.probe-module/1")
    module: str
    """As it was named."""
    torch: str
    """The version that ran the steps."""
    loss: str
    """What was taken as the loss."""
    precision: str
    """In which the steps were run."""
    recompute: str
    """Which blocks are computed again in backward."""
    optimizer: str
    """Whose steps were run."""
    micro_batch: int
    """Sequences of one forward, [1]."""
    seq_len: int
    """Tokens a sequence; 1 where the module's inputs take no length."""
    parameters: int
    """Trained elements, [1]."""
    peak: int
    """The largest sum of live tensors in the second step [bytes]."""
    peak_phase: str
    """forward, loss, backward or step."""
    peak_at: str
    """The part and operator at which it stands."""
    components: ModuleComponents
    """At the peak [bytes]."""
    phases: dict[str, int]
    """Largest sums of live tensors in forward, loss, backward and step of the second step [bytes]."""
    first_phases: dict[str, int]
    """Those of the first step, before which the optimizer has no states."""
    saved: int
    """Bytes that one micro-batch keeps for backward, weights and their copies left out."""
    parts: tuple[ModulePart, ...]
    """What is outside the blocks, then block by block."""
    tensors: tuple[SavedTensor, ...]
    """Every storage that one micro-batch keeps for backward."""
    file: str
    """Where the recorded model was written, if it was."""
    notes: tuple[str, ...]
    """What was noted while the model was recorded; empty where none was."""


class CalibratedFigure(Frozen):
    """One figure of the shipped data beside what was measured."""

    part: Part
    """What it belongs to."""
    name: str
    """Within its part; with its class of allocator, or what a rate is of."""
    unit: str
    """Of ``shipped``, ``fitted``, ``low`` and ``high``; ``-`` for a share."""
    shipped: float | None
    """None where no figure is shipped."""
    fitted: float
    """As measured on this kind of GPU."""
    low: float | None = None
    """Ends of the readings, or of refits without a part of the rows; none for an end of a range."""
    high: float | None = None
    """The upper end, where ``low`` is the lower one."""
    rows: int
    """Readings that it stands on, [1]."""
    written: bool
    """Whether held-back rows are predicted better with its part."""


class Calibrated(Answer):
    """The answer of ``memcalc calibrate``."""

    schema_: Literal["memcalc.calibrate/1"] = schema("memcalc.calibrate/1")
    gpu: str
    """The preset that was calibrated."""
    figures: tuple[CalibratedFigure, ...]
    """All that were fitted, those that are not written among them."""
    calibration: Calibration
    """What the file holds."""
    not_predicted: tuple[str, ...]
    """Rows that memcalc cannot predict, which are not used."""
