"""How many ranks a launcher starts, on how many nodes: from its options, the GPUs that it sees, and Slurm's tasks."""

from __future__ import annotations

import re

from memcalc.convert.config import Reading
from memcalc.convert.environment import visible
from memcalc.convert.launchers import Launch
from memcalc.convert.shell import Script

__all__ = ["read_ranks"]


def read_ranks(reading: Reading, launch: Launch, script: Script) -> None:
    """State how many ranks the launcher starts."""
    settings = {**script.variables, **launch.command.settings}
    seen = visible({name: word.text for name, word in settings.items() if not word.unknown})
    if launch.launcher == "torchrun" or "nproc_per_node" in launch.settings:
        _torchrun(reading, launch, seen)
    elif launch.launcher == "deepspeed":
        _deepspeed(reading, launch, seen)
    elif launch.launcher == "accelerate":
        _accelerate(reading, launch, seen)
    elif launch.launcher == "shell":
        _from(reading, "gpus_per_node", "NGPU")
    elif launch.launcher == "tune" and any(word.text.endswith("_single_device") for word in launch.arguments[:1]):
        reading.say("gpus", 1, "tune run")  # torchtune's own recipes for one GPU, whatever it sees
    elif launch.launcher in ("llamafactory-cli", "axolotl", "lmf", "tune"):
        _from(reading, "gpus", f"{launch.launcher} --num_processes")
        _from(reading, "nodes", "NNODES")
        _from(reading, "gpus_per_node", "NPROC_PER_NODE")
        if seen is not None and not reading.has("NPROC_PER_NODE"):
            reading.say("gpus_per_node", seen, "CUDA_VISIBLE_DEVICES")
    elif launch.launcher == "python" and launch.step:
        tasks = reading.raw("#SBATCH --ntasks-per-node") or reading.raw("srun --ntasks-per-node")
        if tasks is not None:
            key = "#SBATCH --ntasks-per-node" if reading.has("#SBATCH --ntasks-per-node") else "srun --ntasks-per-node"
            reading.say("gpus_per_node", reading.whole(key, low=1), key)
    elif launch.launcher == "python" and not any(one.word == "gpus_per_node" for one in reading.said):
        reading.say("gpus", 1, "python")


def _from(reading: Reading, word: str, key: str) -> None:
    value = reading.whole(key, low=1)
    if value is not None:
        reading.say(word, value, key)
    elif (key,) in reading.document.unknown and not _said(reading, word):
        _ask(reading, word, key)


def _said(reading: Reading, word: str) -> bool:
    return any(one.word == word and one.value is not None for one in reading.said)


def _torchrun(reading: Reading, launch: Launch, seen: int | None) -> None:
    """`--nproc-per-node` is a number, gpu or auto; with `--nnodes 1:4` the fewest nodes count: each then keeps most."""
    lead = f"{launch.launcher} --"
    each, nodes = f"{lead}nproc_per_node", f"{lead}nnodes"
    number = str(reading.raw(each, "")).lower()
    if number in ("gpu", "auto"):
        if seen is not None:
            reading.say("gpus_per_node", seen, "CUDA_VISIBLE_DEVICES")
        elif not _said(reading, "gpus_per_node"):
            _ask(reading, "gpus_per_node", each)
    elif (each,) not in reading.document.unknown:
        reading.say("gpus_per_node", reading.whole(each, 1, low=1), each)
    elif not _said(reading, "gpus_per_node"):
        _ask(reading, "gpus_per_node", each)
    text = str(reading.raw(nodes, ""))
    if re.fullmatch(r"\d{1,7}:\d{1,7}", text):
        least = int(text.partition(":")[0])
        reading.say("nodes", max(least, 1), nodes)
        reading.note("note", "MC004", nodes, f"{nodes} {text}: counted with {least}, where each GPU keeps the most")
    elif (nodes,) not in reading.document.unknown:
        reading.say("nodes", reading.whole(nodes, 1, low=1), nodes)
    elif not _said(reading, "nodes"):
        _ask(reading, "nodes", nodes)
    reading.harmless(*(key for key in reading.document.data if key.startswith(lead)))


def _accelerate(reading: Reading, launch: Launch, seen: int | None) -> None:
    """Its own format reads the options; the GPUs that it sees count where no number of processes is said."""
    if "num_processes" not in launch.settings and "config_file" not in launch.settings:
        says = (
            "without --config_file accelerate reads default_config.yaml of the user's cache, which counts for nothing"
        )
        reading.note("note", "MC004", "accelerate", says)
        if seen is not None:
            reading.say("gpus_per_node", seen, "CUDA_VISIBLE_DEVICES")
    reading.harmless(*(key for key in reading.document.data if key.startswith("accelerate --")))


def _deepspeed(reading: Reading, launch: Launch, seen: int | None) -> None:
    """`--num_gpus` and `--num_nodes`, or `--include host:0,1@other:0`; else a hostfile, or the GPUs that there are."""
    lead = "deepspeed --"
    included = str(reading.raw(f"{lead}include", ""))
    number = f"{lead}num_gpus" if "num_gpus" in launch.settings else f"{lead}num_accelerators"
    if included:
        hosts = [host.partition(":") for host in included.split("@")]
        slots = {len(filter_) for _, _, slot in hosts if (filter_ := [one for one in slot.split(",") if one])}
        if len(slots) == 1 and all(slot for _, _, slot in hosts):
            reading.say("gpus_per_node", slots.pop(), f"{lead}include")
        else:
            _ask(reading, "gpus_per_node", f"{lead}include")
        reading.say("nodes", len(hosts), f"{lead}include")
        reading.harmless(*(key for key in reading.document.data if key.startswith(lead)))
        return
    _from(reading, "gpus_per_node", number)
    _from(reading, "nodes", f"{lead}num_nodes")
    if not _said(reading, "gpus_per_node"):
        if seen is not None:
            reading.say("gpus_per_node", seen, "CUDA_VISIBLE_DEVICES")
        elif "hostfile" in launch.settings:
            _ask(reading, "gpus_per_node", f"{lead}hostfile")
    if not _said(reading, "nodes") and not any(one.word == "nodes" for one in reading.said):
        if "hostfile" in launch.settings:
            _ask(reading, "nodes", f"{lead}hostfile")
        else:
            reading.say("nodes", 1, f"{lead}num_nodes")
    reading.harmless(*(key for key in reading.document.data if key.startswith(lead)))


def _ask(reading: Reading, word: str, key: str) -> None:
    """Leave a word to be asked for: what stands under the key does not tell it."""
    reading.ask(word, key, reading.document.unknown.get((key,)) or str(reading.raw(key, key)))
