"""Hardware: the GPU, the node that holds several, and the slower memory behind them.

Every preset says where its figures come from; one without a source does not load.
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, PrivateAttr, field_validator, model_validator

from memcalc.specs.strict import Frozen

if TYPE_CHECKING:
    from memcalc.specs.calibration import Calibration

ComputeDtype = Literal["fp32", "tf32", "bf16", "fp16", "fp8", "fp4", "int8"]
"""What a matrix unit multiplies in; tf32 is fp32 data at reduced precision."""

Name = Annotated[str, Field(min_length=1, max_length=64)]
Bytes = Annotated[int, Field(gt=0, le=2**63 - 1, strict=True)]
"""A size [bytes]."""
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
"""A data rate [bytes/s] or an arithmetic rate [FLOP/s]."""
Count = Annotated[int, Field(gt=0, le=1_000_000, strict=True)]
Sources = Annotated[dict[str, Annotated[str, Field(min_length=1)]], Field(min_length=1)]
"""Where each group of figures was read: "memory", "compute", "bandwidth", …"""
Day = Annotated[str, Field(pattern=r"^\d{4}-\d{2}(-\d{2})?$")]
"""A date or a month, as in 2026-11-21."""


VendorName = Literal["nvidia", "amd", "intel", "huawei"]
Part = Literal["context", "world", "group", "handle", "engine"]
"""What a process has beside its tensors: its context, the communicator of all ranks and each further one, and the
workspaces of a BLAS handle and of TransformerEngine."""


class GPU(Frozen):
    """One accelerator as a process sees it.

    >>> gpu = GPU(name="x", vendor="nvidia", arch="Volta", memory_bytes=2**34, bandwidth_bytes_per_s=9e11,
    ...           peak_flops={"fp16": 1.1e14}, gpus_per_node=8, flash_attention=False,
    ...           source={"memory": "its datasheet"}, date="2026-11")
    >>> gpu.supports("fp16"), gpu.supports("bf16")
    (True, False)
    """

    name: Name
    """The preset's name, as typed after --gpu."""
    aliases: tuple[str, ...] = ()
    """Other names for it."""
    vendor: VendorName
    """Who makes it."""
    arch: str
    """Architecture, such as "Ampere"."""
    compute_capability: str | None = None
    """CUDA compute capability, such as "8.0"; none for other vendors."""
    memory_bytes: Bytes
    """Capacity [bytes] that torch reports to a process; less than nvidia-smi's total."""
    nvidia_smi_bytes: Bytes | None = None
    """Total [bytes] that nvidia-smi prints for the device."""
    context_bytes: Bytes | None = None
    """Memory [bytes] that one process holds outside the caching allocator, without NCCL; none where not measured."""
    eager_context_bytes: Bytes | None = None
    """The same where CUDA loads all kernels at once (before 11.7); none where not measured."""
    bandwidth_bytes_per_s: Rate
    """Memory bandwidth [bytes/s], the vendor's figure."""
    peak_flops: Annotated[dict[ComputeDtype, Rate], Field(min_length=1)]
    """Dense peak rate [FLOP/s] by dtype; a dtype that the chip lacks is left out."""
    nvlink_bytes_per_s: Rate | None = None
    """Rate [bytes/s] to the other GPUs of the node, one direction, all links of one GPU; none without such links."""
    pcie_bytes_per_s: Rate | None = None
    """Rate [bytes/s] of the PCIe slot, one direction."""
    c2c_bytes_per_s: Rate | None = None
    """Rate [bytes/s] of a coherent link to the CPU (NVLink-C2C), one direction."""
    gpus_per_node: Count
    """How many usually share a host [-]."""
    flash_attention: bool
    """Whether fused attention that never stores the scores runs on it."""
    note: str = ""
    """What a reader should know about the figures."""
    source: Sources
    """Where the figures come from, by group."""
    date: Day
    """When they were gathered."""
    _calibration: Any = PrivateAttr(default=None)

    @property
    def calibration(self) -> "Calibration | None":
        """What was measured on it, in place of shipped figures; no preset has it."""
        found: Calibration | None = self._calibration
        return found

    def calibrated(self, found: "Calibration") -> Self:
        """Return the same GPU with the figures of a calibration."""
        size = found.context and found.context.bytes
        other = self.model_copy(update={"context_bytes": size, "eager_context_bytes": size} if size else None)
        other._calibration = found  # noqa: SLF001 - a copy of the same class
        return other

    def supports(self, dtype: str) -> bool:
        """Say whether the chip multiplies in `dtype`."""
        return dtype in self.peak_flops

    @property
    def host_link_bytes_per_s(self) -> float | None:
        """Rate to host memory, one direction [bytes/s]: the coherent link where there is one, else PCIe."""
        return self.c2c_bytes_per_s or self.pcie_bytes_per_s

    @property
    def peer_link_bytes_per_s(self) -> float | None:
        """Rate to another GPU of the node, one direction [bytes/s]: NVLink where there is one, else PCIe."""
        return self.nvlink_bytes_per_s or self.pcie_bytes_per_s


class VendorFigure(Frozen):
    """A size that software takes on the GPUs of a vendor, or on some of them."""

    bytes: Bytes
    """As usual [bytes]."""
    high: Bytes | None = None
    """The most that was seen [bytes]; as usual where none is known."""
    capability: str | None = None
    """CUDA compute capability of the GPUs that it is for."""
    from_capability: str | None = None
    """The lowest of them, where it is for all from one on."""
    arch: tuple[str, ...] = ()
    """Parts of the name of their architecture, where it is for some alone."""
    source: Annotated[str, Field(min_length=1)]
    """Where the figure comes from."""

    def fits(self, gpu: GPU) -> bool:
        """Whether it is for a GPU."""
        given = float(gpu.compute_capability or 0)
        exact = self.capability is None or given == float(self.capability)
        above = self.from_capability is None or given >= float(self.from_capability)
        return exact and above and (not self.arch or any(part in gpu.arch for part in self.arch))


class Vendor(Frozen):
    """What a vendor's software takes beside the tensors of a process; a figure that is absent is not known."""

    title: Name
    """The vendor and its software, for sentences."""
    context: VendorFigure | None = None
    """Context of one process, where the GPU's preset has none."""
    world: VendorFigure | None = None
    """The communicator of all ranks."""
    group: VendorFigure | None = None
    """Each further communicator."""
    handle: tuple[VendorFigure, ...] = ()
    """Workspace of one BLAS handle: the last that fits the GPU."""
    engine: tuple[VendorFigure, ...] = ()
    """Workspace of TransformerEngine, likewise."""

    def figure(self, part: Part, gpu: GPU) -> VendorFigure | None:
        """Return the size of a part on a GPU, or None where it is not known."""
        known = getattr(self, part)
        rows = known if isinstance(known, tuple) else (known,)
        return next((row for row in reversed(rows) if row is not None and row.fits(gpu)), None)


class MemoryTier(Frozen):
    """Memory of a node that is slower than the GPU's own: host memory, a CXL expander, NVMe drives."""

    name: Literal["host", "cxl", "nvme"]
    """Kind of memory."""
    capacity_bytes: Bytes
    """Size [bytes] for the whole node."""
    bandwidth_bytes_per_s: Rate
    """Rate [bytes/s] for the whole node, in its slower direction; an upper limit."""
    source: Annotated[str, Field(min_length=1)]
    """Where the figures come from."""


class Node(Frozen):
    """GPUs that reach each other without the cluster's network: a host of them, or a rack of several hosts."""

    name: Name
    """The preset's name, as typed after --node."""
    aliases: tuple[str, ...] = ()
    """Other names for it."""
    gpu: Name
    """Name of the GPU preset that it holds."""
    gpus: Count
    """Number of GPUs [-]."""
    hosts: Count = 1
    """Machines that they sit in [-]: more than one in a rack, where each has its share of the GPUs and memory."""
    default: bool = False
    """Whether a job that names only this GPU is taken to run on such nodes."""
    runs: tuple[str, ...] = ()
    """Groups of published runs that ran on such nodes, and are predicted there."""
    host_memory_bytes: Bytes | None = None
    """Host memory [bytes]; none where it is the owner's choice."""
    host_memory_bytes_per_s: Rate | None = None
    """Rate [bytes/s] of that memory, all channels of the node; none where it is not known."""
    tiers: tuple[MemoryTier, ...] = ()
    """Slower memory behind the GPUs, fastest first."""
    intra_link_bytes_per_s: Rate | None = None
    """Rate [bytes/s] from one GPU to the others of the node, one direction."""
    internode_bytes_per_s_per_gpu: Rate | None = None
    """Rate [bytes/s] from one GPU to other nodes, one direction; none without a cluster network."""
    adapters: Count | None = None
    """Network adapters that this rate is of [-]; one a GPU where they are not known."""
    note: str = ""
    """What a reader should know about the figures."""
    source: Sources
    """Where the figures come from, by group."""
    date: Day
    """When they were gathered."""

    @field_validator("tiers")
    @classmethod
    def _each_tier_once(cls, tiers: tuple[MemoryTier, ...]) -> tuple[MemoryTier, ...]:
        names = [tier.name for tier in tiers]
        if len(set(names)) < len(names):
            raise ValueError(f"each of host, cxl, nvme may occur once, not {', '.join(names)}")
        return tiers

    @model_validator(mode="after")
    def _hosts_alike(self) -> Self:
        if self.gpus % self.hosts:
            raise ValueError(f"hosts must divide the {self.gpus} GPUs, not be {self.hosts}")
        return self

    @property
    def gpus_per_host(self) -> int:
        """Number of GPUs that one machine starts processes on [-]."""
        return self.gpus // self.hosts

    def tier(self, name: str) -> MemoryTier | None:
        """Return the tier called `name`, or None where the node has none."""
        return next((tier for tier in self.tiers if tier.name == name), None)
