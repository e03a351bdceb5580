"""Commands in a YAML, read as a script: a task of SkyPilot with its cluster, a functional test of Megatron-LM.

SkyPilot 0.10 (docs/source/reference/yaml-spec.rst, running-jobs/environment-variables.rst): `run` is bash, its
variables are those of `envs`, and two of SkyPilot's own are known before the job runs. Megatron-LM d98e8a64.
"""

from __future__ import annotations

import math
import re
import shlex
from collections import defaultdict
from dataclasses import replace
from typing import Any

from memcalc.convert.config import Config, ConfigReader
from memcalc.convert.document import Document
from memcalc.convert.formats.base import Format

_BESIDE = frozenset({"resources", "setup", "num_nodes", "envs", "file_mounts", "workdir"})
"""Keys of which a task has one at least beside its commands."""
_SMALLER = {"a100": "a100-40g", "v100": "v100-16g"}
"""GPUs whose name without a size is that of the smaller one (sky/catalog: A100 beside A100-80GB)."""
_ASKED = "resources.accelerators"


def read(document: Document) -> Config:
    """Return what a task asks for; its commands are a document of their own, with the line numbers of this one."""
    reader = ConfigReader(document, "manifest", "SkyPilot 0.10")
    nodes = reader.integer("num_nodes", 1, low=1) or 1
    reader.set("nodes", nodes, "num_nodes")
    known = {"SKYPILOT_NUM_NODES": str(nodes)}
    listed = _accelerators(reader)
    counts, names = {count for _, count in listed}, sorted({name for name, _ in listed})
    if len(counts) == 1:
        reader.set("gpus_per_node", each := counts.pop(), _ASKED)
        known["SKYPILOT_NUM_GPUS_PER_NODE"] = str(each)
    if len(names) == 1:
        reader.set("gpu", _SMALLER.get(names[0], names[0]), _ASKED)
    elif names:
        reader.ask("gpu", _ASKED, ", ".join(names), "asks for one of several")
    known |= {str(key): str(value) for key, value in reader.table("envs").items() if value is not None}
    reader.refer("launch", "run", document=_script(document, reader.text("run"), known))
    return Config(document, "manifest", tuple(reader.settings), tuple(reader.findings), tuple(reader.references))


def _accelerators(reader: ConfigReader) -> list[tuple[str, int]]:
    """The GPUs that each node may have: names as presets write them, and how many."""
    resources = reader.table("resources")
    others = [resources.get(key) for key in ("any_of", "ordered")]
    choices = [resources, *(choice for other in others if isinstance(other, list) for choice in other)]
    listed: list[tuple[str, int]] = []
    for choice in choices:
        value: Any = choice.get("accelerators") if isinstance(choice, dict) else None
        entries = value if isinstance(value, list) else [value] if isinstance(value, str) else []
        pairs = [*value.items()] if isinstance(value, dict) else [str(entry).partition(":")[::2] for entry in entries]
        for name, stated in pairs:
            count = "1" if stated in ("", None) else str(stated)
            if not re.fullmatch(r"\d{1,4}(\.\d+)?", count) or float(count) == 0:
                raise reader.error(_ASKED, stated, "must be a number of GPUs behind their name, as in H100:8")
            listed.append((re.sub(r"gb$", "g", str(name).lower()), math.ceil(float(count))))
    return listed


def _script(document: Document, body: str, known: dict[str, str]) -> Document:
    """The commands as a script in which each line has the number that it has in the task."""
    lines = [f"export {key}={shlex.quote(value)}" for key, value in known.items() if re.fullmatch(r"[A-Za-z_]\w*", key)]
    span = document.spans.get(("run",))  # one that is merged in by <<: has none
    first = document.text.count("\n", 0, span.begin) + (document.text[span.begin] in "|>") if span else 1
    text = "; ".join(lines).replace("\n", " ") + "\n" * max(1, first) + body
    return replace(document, kind="shell", text=text, data={}, find_spans=dict, part=True, twice={})


MODEL_ARGS, _VARIABLES = "MODEL_ARGS", "ENV_VARS"
"""Tables of Megatron-LM's functional tests (tests/functional_tests): flags with values, and variables to export."""
_LAUNCH = "torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NUM_NODES"


def tested_script(document: Document) -> Document:
    """What a functional test of Megatron-LM runs, as a script in which each flag has the line that it has in the test.

    shell_test_utils/_run_training.sh: `true` is a flag alone, a list in brackets its words, and variables are filled
    in. Which script runs a recipe beside it says, as does the folder of the test; it is pretrain_gpt.py by default.
    """
    variables, folders = document.data.get(_VARIABLES), document.path.absolute().parts
    stated = variables.items() if isinstance(variables, dict) else ()
    exports = [f"export {name}={_word(value)}; " for name, value in stated if re.fullmatch(r"[A-Za-z_]\w*", str(name))]
    kind = folders[folders.index("test_cases") + 1] if "test_cases" in folders[:-2] else "gpt"
    script = "pretrain_gpt.py" if kind not in ("bert", "t5", "hybrid") else f"pretrain_{kind}.py"
    lines: dict[int, list[str]] = defaultdict(list)
    lines[document.line((MODEL_ARGS,))].append(f"{''.join(exports)}{_LAUNCH} {script}")
    for flag, value in document.data[MODEL_ARGS].items():
        if value is not False and value is not None:
            values = [] if value is True else re.findall(r"\S+", value.strip()[1:-1]) if _is_listed(value) else [value]
            lines[document.line((MODEL_ARGS, flag))].append(" ".join([str(flag), *map(_word, values)]))
    first, last = min(lines), max(lines)
    text = "\n" * (first - 1) + " \\\n".join(" ".join(lines[number]) for number in range(first, last + 1)) + "\n"
    return replace(document, kind="shell", text=text, data={}, find_spans=dict, part=True, twice={})


def _is_listed(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"\[[^]]+\]", value.strip()) is not None


def _word(value: Any) -> str:
    """A word in which variables are filled in."""
    return '"' + re.sub(r'(["`\\])', r"\\\1", str(value)).replace("\n", " ") + '"'


def _recognise(document: Document) -> bool:
    data = document.data
    return isinstance(data, dict) and isinstance(data.get("run"), str) and not _BESIDE.isdisjoint(data)


FORMAT = Format("manifest", "SkyPilot task", "SkyPilot 0.10", _recognise, read, kind="yaml")
