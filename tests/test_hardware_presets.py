"""Every GPU and node preset, found by glob; lookup by name, alias and file; what is refused."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

import memcalc
from memcalc import catalog
from memcalc.cli.app import app
from memcalc.errors import FileError, InputError, MemcalcError, UnknownNameError
from memcalc.planner.budget import capacity
from memcalc.specs.hardware import GPU, Node
from memcalc.terms.overhead import workspaces_of
from memcalc.units import GIB

PRESETS = Path(__file__).resolve().parents[1] / "presets"
GPU_FILES = sorted(path for path in (PRESETS / "gpus").glob("*.toml") if path.stem != "aliases")
NODE_FILES = sorted(path for path in (PRESETS / "nodes").glob("*.toml") if path.stem != "aliases")
ALIASES = [
    (kind, alias, name)
    for kind in ("gpu", "node")
    for alias, name in tomllib.loads((PRESETS / f"{kind}s" / "aliases.toml").read_text(encoding="utf-8")).items()
]

MINE = """
vendor = "nvidia"
arch = "Ampere"
memory_bytes = 42_000_000_000
bandwidth_bytes_per_s = 1e12
gpus_per_node = 4
flash_attention = true
date = "2026-11"
[peak_flops]
bf16 = 1e14
[source]
memory = "measured here"
"""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep the presets of whoever runs the tests out of them."""
    monkeypatch.chdir(tmp_path)
    for name in ("XDG_CONFIG_HOME", "HOME", "APPDATA"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    return tmp_path


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


# ---------------------------------------------------------- the files, one by one


@pytest.mark.parametrize("path", GPU_FILES, ids=lambda path: path.stem)
def test_gpu_preset(path: Path) -> None:
    gpu = catalog.gpu(path.stem)
    assert gpu.name == path.stem == path.stem.lower()
    assert {"memory", "compute", "bandwidth"} <= gpu.source.keys()
    assert (gpu.nvlink_bytes_per_s is None) or "interconnect" in gpu.source
    assert (gpu.context_bytes is None) or "context" in gpu.source
    assert 10 * GIB < gpu.memory_bytes < 300 * GIB
    assert (gpu.compute_capability is not None) == (gpu.vendor == "nvidia")
    assert 1e11 < gpu.bandwidth_bytes_per_s <= 8e12


@pytest.mark.parametrize("path", GPU_FILES, ids=lambda path: path.stem)
def test_torch_sees_a_little_less_than_nvidia_smi(path: Path) -> None:
    """The driver keeps some memory: torch's total is below nvidia-smi's, by less than 4 %."""
    gpu = catalog.gpu(path.stem)
    if gpu.nvidia_smi_bytes is not None:
        assert 0.96 * gpu.nvidia_smi_bytes < gpu.memory_bytes < gpu.nvidia_smi_bytes


@pytest.mark.parametrize("path", GPU_FILES, ids=lambda path: path.stem)
def test_dtypes_follow_the_generation(path: Path) -> None:
    """Volta and Turing have neither bf16 nor fused attention; fp8 begins with Ada and Hopper (8.9)."""
    gpu = catalog.gpu(path.stem)
    if gpu.compute_capability is not None:
        capability = float(gpu.compute_capability)
        assert gpu.supports("bf16") == gpu.supports("tf32") == gpu.flash_attention == (capability >= 8.0)
        assert gpu.supports("fp8") == (capability >= 8.9)
    rates = gpu.peak_flops
    assert rates.get("fp32", 0) <= rates.get("bf16", rates.get("fp16", 0)) <= rates.get("fp8", float("inf"))


@pytest.mark.parametrize("path", NODE_FILES, ids=lambda path: path.stem)
def test_node_preset(path: Path) -> None:
    node = catalog.node(path.stem)
    gpu = catalog.gpu(node.gpu)
    assert node.name == path.stem
    assert node.gpu == gpu.name, "a node names its GPU by the preset's own name"
    assert node.source["links"]
    assert (node.internode_bytes_per_s_per_gpu is None) or "network" in node.source
    assert (node.host_memory_bytes is None) or "host" in node.source
    assert (node.host_memory_bytes_per_s is None) or {"host", "host_rate"} <= node.source.keys()
    assert node.gpus_per_host * node.hosts == node.gpus
    assert node.intra_link_bytes_per_s in {gpu.nvlink_bytes_per_s, gpu.pcie_bytes_per_s}
    host = node.tier("host")
    assert (host.capacity_bytes if host else None) == node.host_memory_bytes
    rates = [tier.bandwidth_bytes_per_s for tier in node.tiers]
    assert rates == sorted(rates, reverse=True), "fastest first"


def test_at_most_one_default_node_for_a_gpu() -> None:
    defaults = [node.gpu for node in catalog.nodes() if node.default]
    assert len(defaults) == len(set(defaults))


@pytest.mark.parametrize(("kind", "alias", "name"), ALIASES)
def test_an_alias_leads_to_its_preset_and_hides_none(kind: str, alias: str, name: str) -> None:
    lookup: Callable[[str], GPU | Node] = getattr(catalog, kind)
    found = lookup(alias)
    assert found.name == name
    assert alias in found.aliases
    assert not (PRESETS / f"{kind}s" / f"{alias}.toml").exists()


def test_lists_are_whole() -> None:
    assert [gpu.name for gpu in catalog.gpus()] == sorted(path.stem for path in GPU_FILES)
    assert {node.name for node in catalog.nodes()} == {path.stem for path in NODE_FILES}


# ---------------------------------------------------------- public anchors


@pytest.mark.parametrize(
    ("name", "dtype", "multiprocessors", "multiply_adds", "clock"),
    [
        # NVIDIA Tesla V100 GPU Architecture, WP-08608-001, table 1: 80 SMs, 8 tensor cores of 64 FMA each, 1530 MHz
        ("v100-32g", "fp16", 80, 8 * 64, 1.530e9),
        # NVIDIA A100 Tensor Core GPU Architecture, table 1: 108 SMs, 4 tensor cores of 256 FMA each, 1410 MHz
        ("a100-80g", "bf16", 108, 4 * 256, 1.410e9),
        # NVIDIA H100 Tensor Core GPU Architecture, table 2: 132 SMs, 4 tensor cores of 512 FMA each, 1830 MHz
        ("h100", "bf16", 132, 4 * 512, 1.830e9),
        # NVIDIA Ada GPU Architecture, table 2: 128 SMs, 4 tensor cores of 64 FMA each with fp32 sums, 2520 MHz
        ("rtx-4090", "fp16", 128, 4 * 64, 2.520e9),
    ],
)
def test_peak_rate_follows_from_units_and_clock(
    name: str, dtype: str, multiprocessors: int, multiply_adds: int, clock: float
) -> None:
    peak = 2 * multiprocessors * multiply_adds * clock
    assert catalog.gpu(name).peak_flops[dtype] == pytest.approx(peak, rel=0.004)  # type: ignore[index]


@pytest.mark.parametrize(
    ("name", "width_bits", "transfers_per_s"),
    [
        (
            "a100-40g",
            5120,
            2.430e9,
        ),  # NVIDIA A100 40GB PCIe product brief PB-10137-001: 5120 bit, 1215 MHz, two a clock
        ("rtx-3090", 384, 19.5e9),  # NVIDIA Ampere GA102 GPU Architecture, table 2: 384 bit GDDR6X at 19.5 Gb/s
        ("rtx-4090", 384, 21.0e9),  # NVIDIA Ada GPU Architecture, table 2: 384 bit GDDR6X at 21 Gb/s
    ],
)
def test_bandwidth_follows_from_bus_and_clock(name: str, width_bits: int, transfers_per_s: float) -> None:
    assert catalog.gpu(name).bandwidth_bytes_per_s == pytest.approx(width_bits / 8 * transfers_per_s, rel=0.002)


@pytest.mark.parametrize(
    ("name", "total_bytes", "tolerance"),
    [
        ("a100-40g", 42_298_834_944, 2**20),  # bottlerocket-os/bottlerocket#3873: deviceQuery's exact total
        ("mi300x", 196_592 * 2**20, 2**20),  # ROCm/ROCm#4203: total_memory=196592MB
        ("rtx-4090", 23.64 * GIB, 0.01 * GIB),  # 3DTopia/Phidias-Diffusion#8: "total capacity of 23.64 GiB"
        ("a30", 23.53 * GIB, 0.04 * GIB),  # google/RB-Modulation#5: "24G in A30", 23.53 GiB
        ("gb300", 276.50 * GIB, 0.006 * GIB),  # stas00/ml-engineering debug/pytorch.md: "total capacity of 276.50 GiB"
        ("mi355x", 287.98 * GIB, 0.006 * GIB),  # public logs of ROCm: "total capacity of 287.98 GiB"
    ],
)
def test_capacity_is_what_public_reports_show(name: str, total_bytes: float, tolerance: float) -> None:
    assert catalog.gpu(name).memory_bytes == pytest.approx(total_bytes, abs=tolerance)


# MLPerf: mlcommons/training_results_v5.1 at 4da2d1cd, the files of systems that are named below


@pytest.mark.parametrize(
    ("name", "mebibytes"),
    [
        ("gb200", 189_471),  # NVIDIA/systems/tyche_ngpu72_ngc25.09_nemo.json
        ("gb300", 284_208),  # NVIDIA/systems/theia_ngpu72_ngc25.09_nemo.json
        ("b300", 275_040),  # Supermicro/systems/SYS-822GS-NB3RT.json
    ],
)
def test_total_is_what_mlperf_lists(name: str, mebibytes: int) -> None:
    assert catalog.gpu(name).nvidia_smi_bytes == mebibytes * 2**20


@pytest.mark.parametrize(
    ("name", "adapters", "gigabits", "gpus"),
    [
        ("gb200-nvl72", 4, 400, 4),  # MLPerf, NVIDIA tyche_ngpu72: four ConnectX-7 NDR a tray of four GPUs
        ("gb300-nvl72", 4, 800, 4),  # MLPerf, NVIDIA theia_ngpu72: four ConnectX-8 XDR a tray of four GPUs
        ("hgx-b300", 8, 800, 8),  # MLPerf, Supermicro SYS-822GS-NB3RT: eight ConnectX-8 XDR
        ("2xh100-nvl", 1, 80, 2),  # Azure, Standard_NC80adis_H100_v5: 80,000 Mb/s
        ("hgx-h800", 8, 400, 8),  # DeepSeek-V3, arXiv:2412.19437, section 3.2.2: 50 GB/s a GPU
        ("8xmi300x", 8, 400, 8),  # Azure, ND MI300X v5: 8 x 400 Gb/s NDR
        ("8xmi325x", 8, 400, 8),  # ROCm docs, vLLM with MoRI: eight ConnectX-7, one a GPU
        ("8xmi355x", 8, 400, 8),  # MLPerf Inference 6.1, Crusoe: eight Pollara 400
    ],
)
def test_network_is_that_of_the_adapters(name: str, adapters: int, gigabits: int, gpus: int) -> None:
    node = catalog.node(name)
    assert node.internode_bytes_per_s_per_gpu == adapters * gigabits * 1e9 / 8 / gpus
    assert node.default
    assert catalog.node_for(catalog.gpu(node.gpu)).name == name


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("hgx-b300", 32 * 96 * GIB),  # MLPerf, Supermicro SYS-822GS-NB3RT: 32 x 96 GB
        ("8xmi300x", 1850 * GIB),  # Azure, ND MI300X v5
        ("8xmi325x", 24 * 96 * GIB),  # MLPerf, AMD MI325X_EPYC_9575F_pytorch_llama2_70b: 24 x 96 GB
        ("8xmi355x", 24 * 128 * GIB),  # MLPerf, AMD MI355X_EPYC_9575F_pytorch: 24 x 128 GB
        ("2xh100-nvl", 640 * GIB),  # Azure, Standard_NC80adis_H100_v5
    ],
)
def test_host_memory_is_that_of_the_modules(name: str, size: int) -> None:
    assert catalog.node(name).host_memory_bytes == size


@pytest.mark.parametrize(
    ("name", "channels", "transfers_per_s"),
    [
        ("hgx-h100", 2 * 8, 4.8e9),  # MLPerf, H200-SXM-141GBx8: modules of DDR5-4800, two Xeon 8480C
        ("dgx-a100-80g", 2 * 8, 3.2e9),  # DDR4-3200, two EPYC 7742
        ("dgx-1-v100", 2 * 4, 2.133e9),  # DDR4-2133, two Xeon E5-2698 v4
        ("hgx-b300", 2 * 8, 6.4e9),  # MLPerf, Lenovo SR680aV4: DDR5-6400, two Xeon 6747P
        ("8xmi355x", 24, 6.0e9),  # MLPerf, Supermicro 8xMI355X_2xEPYC_9575F: 24 modules at 6000 MT/s
    ],
)
def test_host_rate_follows_from_channels(name: str, channels: int, transfers_per_s: float) -> None:
    """A channel moves eight bytes a transfer."""
    assert catalog.node(name).host_memory_bytes_per_s == pytest.approx(8 * channels * transfers_per_s, rel=1e-3)


@pytest.mark.parametrize(("name", "tray_terabytes"), [("gb200-nvl72", 1.7), ("gb300-nvl72", 2.0)])
def test_a_rack_is_one_nvlink_domain_of_18_trays(name: str, tray_terabytes: float) -> None:
    """72 GPUs with 130 TB/s both ways in all (NVIDIA); a tray's coherent memory, GPUs included, is MLPerf's figure."""
    node = catalog.node(name)
    gpu = catalog.gpu(node.gpu)
    assert (node.gpus, node.hosts, node.gpus_per_host) == (72, 18, gpu.gpus_per_node)
    assert 2 * 72 * (node.intra_link_bytes_per_s or 0) == pytest.approx(130e12, rel=0.01)
    tray = (capacity(node, "host") or 0) + 4 * (gpu.nvidia_smi_bytes or 0)
    assert round(tray / 2**40, 1) == tray_terabytes


@pytest.mark.parametrize(("dtype", "rack_petaflops"), [("bf16", 180), ("fp8", 360), ("fp4", 1080)])
def test_gb300_makes_up_its_rack(dtype: str, rack_petaflops: int) -> None:
    """The rack's dense figures: https://verda.com/blog/gb300-nvl72-architecture."""
    assert 72 * catalog.gpu("gb300").peak_flops[dtype] == rack_petaflops * 1e15  # type: ignore[index]


def test_h100_nvl_is_its_data_sheet() -> None:
    """NVIDIA H100 data sheet, column H100 NVL: 1671 and 3341 TFLOP/s with sparsity, 3.9 TB/s, 600 GB/s both ways."""
    gpu = catalog.gpu("h100-nvl")
    assert [gpu.peak_flops[name] for name in ("bf16", "fp8")] == pytest.approx([1671e12 / 2, 3341e12 / 2], rel=1e-3)
    assert gpu.bandwidth_bytes_per_s == pytest.approx(3.9e12, rel=0.02)
    assert catalog.node("2xh100-nvl").intra_link_bytes_per_s == gpu.nvlink_bytes_per_s == 600e9 / 2


# ---------------------------------------------------------- what a node's figures decide


@pytest.mark.parametrize("path", NODE_FILES, ids=lambda path: path.stem)
def test_a_network_that_is_not_known_is_said_to_be_assumed(path: Path) -> None:
    """On two nodes it is, where the preset has none; on one node there is nothing to assume."""
    node = catalog.node(path.stem)
    words: dict[str, Any] = {"model": "gpt2", "gpu": node.gpu, "node": node.name, "precision": "fp32"}
    one, two = (memcalc.estimate(**words, gpus=count * node.gpus) for count in (1, 2))
    assert "network" not in one.assumptions
    assert ("network" in two.assumptions) == (node.internode_bytes_per_s_per_gpu is None)
    if node.internode_bytes_per_s_per_gpu is None:
        assert two.assumptions["network"] == f"12.5 GB/s per GPU (of {node.name} none is known)"


def test_a_plan_over_nodes_says_which_network_it_assumes() -> None:
    words = ["plan", "--model", "gpt2", "--gpu", "rtx-3090", "--precision", "fp32", "--recompute", "none"]
    one, two = (CliRunner().invoke(app, [*words, "--gpus", gpus, "--format", "plain"]) for gpus in ("4", "8"))
    assert one.exit_code == two.exit_code == 0
    assert "network" not in one.output
    assert "network assumed: 12.5 GB/s per GPU (of 4x3090 none is known)" in " ".join(two.output.split())


def test_a_rack_is_launched_and_offloaded_to_by_the_tray() -> None:
    """Eight GPUs of a rack are two trays: what is offloaded has to fit into the 960 GiB of one."""
    words: dict[str, Any] = {"model": "llama-3.1-8b", "gpu": "gb200", "gpus": 8, "framework": "deepspeed", "zero": 3}
    found = memcalc.estimate(**words, offload="optimizer")
    facts = found.hardware
    assert (facts.node, facts.nodes, facts.gpus_per_node) == ("gb200-nvl72", 2, 4)
    alone = memcalc.estimate(**words, offload="optimizer", node="gb200-nvl72")
    rank = sum(term.bytes for term in found.off_gpu if term.tier == "host")
    assert alone.host_memory == found.host_memory == 4 * rank
    large = memcalc.estimate(**{**words, "model": "llama-3.1-405b"}, offload="optimizer")
    assert any("each of the 18 hosts of gb200-nvl72 has 960.0 GiB" in text for text in large.warnings)


def test_hosts_share_the_gpus_of_a_node_alike() -> None:
    data = catalog.node("gb300-nvl72").model_dump() | {"hosts": 16}
    with pytest.raises(InputError, match="hosts must divide the 72 GPUs"):
        catalog.validated(Node, data, "node preset odd")


# ---------------------------------------------------------- lookup


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("H100", "h100"),
        ("h100-sxm5-80gb", "h100"),
        ("A100-SXM4-40GB", "a100-40g"),
        ("rtx 4090", "rtx-4090"),
        ("RTX_4090", "rtx-4090"),
        (" t4 ", "t4"),
        ("V100", "v100-32g"),
    ],
)
def test_case_spaces_and_underscores_do_not_matter(typed: str, name: str) -> None:
    assert catalog.gpu(typed).name == name


@pytest.mark.parametrize(("typed", "near"), [("h1000", "h100"), ("rtx-4080", "rtx-4090"), ("mi300", "mi300x")])
def test_an_unknown_name_is_answered_with_the_nearest(typed: str, near: str) -> None:
    with pytest.raises(UnknownNameError, match=f"did you mean '{near}'"):
        catalog.gpu(typed)


@pytest.mark.parametrize("name", ["", ".", "..", "../gpus/h100", "aliases", "h100\x00", "a/b", "x" * 10_000, "~", "*"])
def test_a_name_never_leads_out_of_the_presets(name: str) -> None:
    with pytest.raises(MemcalcError):
        catalog.gpu(name)


@pytest.mark.parametrize("name", [None, 7, True, b"h100", ["h100"]])
def test_a_name_is_text(name: object) -> None:
    with pytest.raises(InputError, match="must be the name of a preset"):
        catalog.gpu(name)  # type: ignore[arg-type]


def test_the_order_of_search(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A given directory wins over memcalc.toml, that over the user's directory, and that over what is shipped."""
    sizes: list[int] = []
    home = elsewhere / "home"
    monkeypatch.setattr(catalog, "config_dir", lambda: home)
    for size, path in ((1, "home/gpus/h100.toml"), (2, "memcalc.toml"), (3, "given/gpus/H100.toml")):
        text = MINE.replace("42_000_000_000", str(size))
        if path == "memcalc.toml":
            text = text.replace("[", "[gpu.h100.")
            text = f"[gpu.h100]{text}"
        write(elsewhere / path, text)
        sizes.append(catalog.gpu("h100", [elsewhere / "given"] if size == 3 else ()).memory_bytes)
    assert sizes == [1, 2, 3]
    assert catalog.gpu("h100-sxm", [elsewhere / "given"]).memory_bytes == 3, (
        "an alias leads to what replaces the preset"
    )


def test_a_project_table_brings_its_own_aliases(elsewhere: Path) -> None:
    text = MINE.replace("[", "[gpu.mine.").replace("vendor", 'aliases = ["my card"]\nvendor', 1)
    write(elsewhere / "memcalc.toml", f"[gpu.mine]{text}")
    assert catalog.gpu("My Card").name == "mine"
    assert "mine" in catalog.names("gpu")


def test_a_file_of_ones_own(elsewhere: Path) -> None:
    path = write(elsewhere / "dir" / "mine.toml", MINE)
    assert catalog.gpu(str(path)).name == "mine"
    assert catalog.gpu("dir/mine.toml").memory_bytes == 42_000_000_000


def test_node_for_a_gpu_with_and_without_a_named_node(elsewhere: Path) -> None:
    assert catalog.node_for(catalog.gpu("h100")).name == "hgx-h100"
    made = catalog.node_for(catalog.gpu("gaudi2"))
    assert (made.gpus, made.host_memory_bytes, made.tiers) == (8, None, ())
    path = write(elsewhere / "mine.toml", MINE)
    assert catalog.node_for(catalog.gpu(str(path))).gpus == 4


def test_a_node_is_read_where_it_names_the_gpu_in_any_quotes_and_no_other_is(elsewhere: Path) -> None:
    write(elsewhere / "own" / "nodes" / "another.toml", "gpu = 'h100'\nnot TOML")
    text = (PRESETS / "nodes" / "dgx-a100-40g.toml").read_text(encoding="utf-8")
    write(
        elsewhere / "own" / "nodes" / "mine.toml",
        text.replace('"dgx-a100-40g"', "'mine'").replace('"a100-40g"', "'a100-40g'"),
    )
    assert catalog.node_for(catalog.gpu("a100-40g"), ("own",)).name == "mine"


def test_every_gpu_has_a_node() -> None:
    assert all(catalog.node_for(gpu).gpu == gpu.name for gpu in catalog.gpus())


@pytest.mark.parametrize(
    ("platform", "environ", "expected"),
    [
        ("linux", {"HOME": "/home/u"}, "/home/u/.config/memcalc/presets"),
        ("linux", {"HOME": "/home/u", "XDG_CONFIG_HOME": "/x"}, "/x/memcalc/presets"),
        ("linux", {"HOME": "/home/u", "XDG_CONFIG_HOME": "relative"}, "/home/u/.config/memcalc/presets"),
        ("darwin", {"HOME": "/Users/u"}, "/Users/u/Library/Application Support/memcalc/presets"),
        ("win32", {"APPDATA": "/c/u"}, "/c/u/memcalc/presets"),
        ("linux", {}, None),
        ("win32", {}, None),
    ],
)
def test_config_dir(platform: str, environ: dict[str, str], expected: str | None) -> None:
    found = catalog.config_dir(platform, environ)
    assert (found.as_posix() if found else None) == expected


# ---------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('[source]\nmemory = "measured here"\n', "", "key 'source' is missing"),
        ('memory = "measured here"\n', "", "source"),
        ("measured here", "", "source.memory"),
        ("memory_bytes", "memory_byte", "memory_bytes"),
        (MINE, "", "key 'vendor' is missing"),
        ("42_000_000_000", "-1", "must be greater than 0"),
        ("42_000_000_000", "0", "must be greater than 0"),
        ("42_000_000_000", "true", "memory_bytes"),
        ("42_000_000_000", "42e9", "memory_bytes"),
        ("42_000_000_000", "9223372036854775808", "memory_bytes"),
        ("1e12", "nan", "bandwidth_bytes_per_s"),
        ("1e12", "inf", "bandwidth_bytes_per_s"),
        ("bf16", "bf17", "peak_flops.bf17"),
        ('"nvidia"', '"acme"', "vendor"),
        ('"2026-11"', '"yesterday"', "date"),
        ("flash_attention = true", "flash_attention = true\nflash = 1", "unknown key 'flash'"),
    ],
)
def test_a_bad_preset_is_refused_in_one_sentence(elsewhere: Path, old: str, new: str, said: str) -> None:
    assert old in MINE
    path = write(elsewhere / "mine.toml", MINE.replace(old, new))
    with pytest.raises(InputError) as caught:
        catalog.gpu(str(path))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xff\xfe\x00", "must be UTF-8 text"),
        (b"name = ", "must be TOML"),
        (b"a = 1\na = 2", "must be TOML"),
        (b"#" * (2**20 + 1), "must be at most 1 MiB"),
        (b"a = " + b"[" * 100_000, "must be TOML"),
        (b"a = " + b"9" * 10_000, "must be TOML"),
    ],
    ids=["binary", "truncated", "twice", "large", "deep", "digits"],
)
def test_an_unreadable_file_is_refused(elsewhere: Path, content: bytes, said: str) -> None:
    path = elsewhere / "mine.toml"
    path.write_bytes(content)
    with pytest.raises(FileError, match=said):
        catalog.gpu(str(path))


def test_what_is_not_a_regular_file_is_refused(elsewhere: Path) -> None:
    (elsewhere / "folder.toml").mkdir()
    for name in ("folder.toml", "absent.toml", "/dev/zero"):
        with pytest.raises(FileError, match="must be an existing regular file"):
            catalog.gpu(name)
    with pytest.raises(FileError, match="must be a directory"):
        catalog.gpu("h100", ["absent"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[gpus.x]\n", "did you mean 'gpu'"),
        ("gpu = 1\n", "must hold one table a preset"),
        ("[gpu]\nx = 1\n", "must hold one table a preset"),
    ],
)
def test_a_bad_project_file_is_refused(elsewhere: Path, text: str, said: str) -> None:
    write(elsewhere / "memcalc.toml", text)
    with pytest.raises(InputError, match=said):
        catalog.gpu("h100")


def test_a_bad_alias_file_is_refused(elsewhere: Path) -> None:
    write(elsewhere / "given" / "gpus" / "aliases.toml", "mine = 3\n")
    with pytest.raises(InputError, match="must be alias"):
        catalog.gpu("mine", [elsewhere / "given"])


def test_a_tier_stands_once() -> None:
    node = catalog.node("hgx-h100")
    data = node.model_dump() | {"tiers": [node.tiers[0], node.tiers[0]]}
    with pytest.raises(InputError, match="may occur once"):
        catalog.validated(Node, data, "node preset twice")


def test_a_spec_is_frozen() -> None:
    with pytest.raises(ValidationError):
        catalog.gpu("h100").memory_bytes = 1  # type: ignore[misc]


# ------------------------------------------------------------------ what stands beside the tensors, by vendor


def overhead_bytes(gpu: str, gpus: int = 1, **words: Any) -> tuple[int, int, int, tuple[str, ...]]:
    """Return context, communicators and BLAS workspaces of an estimate, and its warnings."""
    job: dict[str, Any] = {"model": "gpt2", "gpu": gpu, "gpus": gpus, "micro_batch": 1}
    found = memcalc.estimate(**job, **words)
    handles = sum(term.bytes for term in found.terms if term.name == "BLAS workspaces")
    return found.budget.context, found.budget.libraries, handles, found.warnings


def test_every_vendor_of_a_preset_has_its_row_with_sources() -> None:
    table = tomllib.loads((PRESETS / "vendors.toml").read_text(encoding="utf-8"))
    assert set(table) == {catalog.gpu(path.stem).vendor for path in GPU_FILES}
    for name in table:
        vendor = catalog.vendor(name)
        rows = [vendor.context, vendor.world, vendor.group, *vendor.handle, *vendor.engine]
        assert all(row is None or row.source for row in rows)
    nvidia = catalog.vendor("nvidia")
    assert None not in (nvidia.context, nvidia.world, nvidia.group)
    assert nvidia.handle[0].capability is None


@pytest.mark.parametrize(
    ("gpu", "handle", "engine"),
    [
        ("a100-80g", 8320 * 1024, 4 * 2**20),
        ("h100", 32 * 2**20, 32 * 2**20),
        ("b200", 8320 * 1024, 32 * 2**20),
        ("v100-16g", 8320 * 1024, 4 * 2**20),
        ("mi300x", 8320 * 1024, 4 * 2**20),
    ],
)
def test_workspaces_are_those_of_the_sources(gpu: str, handle: int, engine: int) -> None:
    """PyTorch's CublasHandlePool.cpp and TransformerEngine's gemm.py, by GPU; other vendors borrow the default."""
    assert workspaces_of(catalog.gpu(gpu)) == (handle, engine)


def test_nothing_of_nvidia_is_borrowed() -> None:
    for path in GPU_FILES:
        gpu = catalog.gpu(path.stem)
        if gpu.vendor == "nvidia":
            assert not any("no figure measured on" in text for text in overhead_bytes(gpu.name, 2)[3])


def test_figures_of_another_vendor_are_named() -> None:
    """The 0.8 GiB were fitted on NVIDIA's GPUs."""
    context, libraries, handles, warnings = overhead_bytes("mi355x", 8)
    assert (context, libraries, handles) == (512 * 2**20, 819 * 2**20, 2 * 8320 * 1024)
    (said,) = [text for text in warnings if "no figure measured on" in text]
    parts = "the context, communicators and BLAS workspaces"
    assert said.startswith(f"{parts}: no figure measured on AMD (ROCm, RCCL) is known")
    assert said.endswith("those of NVIDIA (CUDA, NCCL) are counted for mi355x.")


def test_only_what_counts_is_named() -> None:
    (said,) = [text for text in overhead_bytes("mi355x", 1)[3] if "no figure measured on" in text]
    assert said.startswith("the context and BLAS workspaces: ")
    (said,) = [text for text in overhead_bytes("gaudi3", 8, framework="megatron")[3] if "no figure measured on" in text]
    assert said.startswith("the context, communicators, BLAS workspaces and TransformerEngine's workspace: ")


def test_ascend_has_buffers_of_its_own() -> None:
    """HCCL keeps twice HCCL_BUFFSIZE, 200 MB, for each communicator (CANN 8.5): world, TP, DP, TP and PP, optimizer."""
    _, libraries, _, warnings = overhead_bytes("ascend-910b", 8, framework="megatron", tp=2)
    assert libraries == 5 * 2 * 200 * 2**20
    assert not any("communicators" in text for text in warnings)


def test_searches_name_them_too() -> None:
    words: dict[str, Any] = {"model": "gpt2", "gpu": "mi300x", "framework": "ddp", "recompute": "none"}
    plan = memcalc.plan(**words, gpus=2, micro_batch=1)
    assert any("no figure measured on AMD" in text for text in plan.warnings)
    most = memcalc.largest("micro-batch", **words, gpus=2)
    assert any("no figure measured on AMD" in text for text in most.warnings)


def test_a_node_given_as_a_gpu_leads_to_both_options_and_the_reverse() -> None:
    for given, said in (
        ({"gpu": "dgx-a100-40g"}, "it is a node: give --gpu a100-40g --node dgx-a100-40g"),
        ({"gpu": "h100", "node": "h100"}, "it is a GPU: give --node hgx-h100, or leave --node out"),
    ):
        with pytest.raises(UnknownNameError, match=said):
            memcalc.estimate(model="llama-3-8b", **given)
