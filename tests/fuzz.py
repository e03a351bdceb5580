"""Throw words and files at every command: `python tests/fuzz.py --minutes 5 [--seed N] [--only NAME] [--replay LINE]`.

In one process with a bound on its memory and on the time of each case, from the small seeds that are committed: the
configs of tests/configs, presets, runs files, and what the program itself saves. Whatever comes, a command ends with 0
to 3 and, where it refuses, with one line; it opens no socket, starts no process and writes nowhere but where it was
told. A case that does not is printed as one line that `--replay` takes. tests/fuzz_readers.py does the same, deeper,
for the readers alone.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import resource
import shlex
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memcalc.cli.registry import Group
from memcalc.specs.options import COMMAND_LINE

ROOT = Path(__file__).resolve().parents[1]
LONGEST_S = 30
"""Processor time of one case; what takes longer hangs."""
MOST_MEMORY = 4 << 30
"""Address space of the process [bytes]."""
MOST_RESIDENT = 1 << 30
"""What stays of it over all cases [bytes]."""
CODES = frozenset({0, 1, 2, 3})
BAD = (
    "", " ", "-1", "0", "1e400", "9" * 400, "nan", "inf", "1.5", "0x10", "１２", "None", "true", "a" * 3000,
    "\x1b[31mx", "\u202e", "é", "../../etc/passwd", "/dev/null", "2/4/8", "any", "not:8", "2..8", "8..2", ",", "/",
    "=", "a=b", "4k", "4M tokens", "0 tokens", "modules:", "every-0", "every-99999", "segments-1", "block-0", "fsdp2@",
    "hf@2019-01", "megatron@99.99", "16:", "0:all-linear", "{}", "${HOME}", "$(id)", "%s%n", "\\", "'", '"', "<script>",
)  # fmt: skip
NUMBERS = ("1", "2", "3", "4", "8", "16", "64", "128", "512", "1000", "4096", "131072", "1048576", "1000000000")
SETTINGS = (
    "strategy.reduce_dtype=bf16", "model.n_layers=2", "model.hidden=96", "gpu.memory_bytes=1", "workload.seq_len=nan",
    "strategy.zero=9", "model.vocab=999999999999", "model.ffn=0", "model.kv_heads=3", "a.b.c=1", "=", "strategy.=1",
)  # fmt: skip
COMMANDS = {
    "plan": ("job", "sizes"), "estimate": ("job",), "explain": ("job",), "ladder": ("job",), "report": ("job",),
    "check": ("files", "job"), "diff": ("pair", "job"), "max": ("quantity", "job"), "min": ("gpus", "job"),
    "export": ("saved",), "sweep": ("sweep",), "validate": ("runs",), "calibrate": ("runs",), "triage": ("log", "job"),
    "models": ("name",), "gpus": ("name",), "nodes": ("name",),
}  # fmt: skip
OUT_OF_MEMORY = (
    b"torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 39.39 "
    b"GiB of which 1.00 GiB is free. Of the allocated memory 36.00 GiB is allocated by PyTorch."
)
FORMATS = ("rich", "plain", "markdown", "csv", "json", "latex", "html", "svg", "xml", "")


@dataclass
class Seeds:
    """What cases are made of."""

    models: list[str]
    gpus: list[str]
    configs: list[Path]
    runs: list[Path]
    saved: list[bytes]
    texts: list[bytes] = field(default_factory=list)

    @classmethod
    def found(cls, folder: Path) -> Seeds:
        """Those that are committed, and a plan that is saved now."""
        saved = folder / "seed.json"
        run(("plan", "--model", "gpt2", "--gpu", "a100-40g", "--gpus", "2", "--save", str(saved)))
        configs = [path for path in (ROOT / "tests/configs").rglob("*") if path.is_file() and path.suffix != ".md"]
        runs = sorted((ROOT / "presets/runs").glob("*.toml"), key=lambda path: path.stat().st_size)[:6]
        return cls(
            models=sorted(path.stem for path in (ROOT / "presets/models").glob("*.toml")),
            gpus=sorted(path.stem for path in (ROOT / "presets/gpus").glob("*.toml")),
            configs=sorted(configs),
            runs=runs,
            saved=[saved.read_bytes()],
            texts=[
                OUT_OF_MEMORY,
                b'{"segments": [{"total_size": 2097152, "allocated_size": 512, "blocks": []}]}',
                b'[jobs]\nmodel = ["gpt2"]\ngpu = ["a100-40g"]\n',
            ],
        )


class Cases:
    """Cases, one after another, from a seed."""

    def __init__(self, seeds: Seeds, number: int, only: str) -> None:
        self.seeds, self.random, self.only = seeds, random.Random(number), only  # noqa: S311

    def __iter__(self) -> Iterator[tuple[list[str], dict[str, bytes]]]:
        """Yield command lines, and the files that they name."""
        while True:
            command = self.only or self.random.choice(list(COMMANDS))
            words, files = [command], {}
            for part in COMMANDS[command]:
                more, named = getattr(self, f"_{part}")()
                words += more
                files |= named
            if self.random.random() < 0.3:
                words += ["--format", self.random.choice(FORMATS)]
            if self.random.random() < 0.1:
                words.insert(self.random.randrange(1, len(words) + 1), self.random.choice(BAD))
            yield words, files

    def _job(self) -> tuple[list[str], dict[str, bytes]]:
        words, files = [], {}
        if self.random.random() < 0.85:
            model, files = self._model()
            words += ["--model", model, "--gpu", self.random.choice(self.seeds.gpus)]
        for option in self.random.sample(COMMAND_LINE, self.random.randrange(6)):
            if option.name in {"model", "gpu"}:
                continue
            words += self._option(option)
        if self.random.random() < 0.1:
            words += ["--set", self.random.choice(SETTINGS)]
        return words, files

    def _option(self, option: Any) -> list[str]:
        flag = f"--{option.name.replace('_', '-')}"
        if option.kind == "flag":
            return [self.random.choice((flag, flag.replace("--", "--no-", 1)))]
        chosen = [str(value) for value in option.values] or list(NUMBERS[:8] if option.kind == "count" else NUMBERS)
        return [flag, self.random.choice(BAD if self.random.random() < 0.08 else chosen)]

    def _model(self) -> tuple[str, dict[str, bytes]]:
        if self.random.random() < 0.7:
            return self.random.choice(self.seeds.models), {}
        config = {
            "model_type": self.random.choice(("llama", "gpt2", "mixtral", "gemma3_text", "t5", "qwen2_vl")),
            "hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 4, "intermediate_size": 1024,
        }  # fmt: skip
        for _ in range(self.random.randrange(4)):
            key = self.random.choice([*config, "num_key_value_heads", "vocab_size", "sliding_window", "layer_types"])
            config[key] = self.random.choice((None, 0, -1, 1, 7, 2**31, 2**70, 1e300, "x", [], {}, True, [1] * 9))
        return "m/config.json", {"m/config.json": json.dumps(config).encode()}

    def _files(self) -> tuple[list[str], dict[str, bytes]]:
        chosen = self.random.sample(self.seeds.configs, self.random.randrange(1, 3))
        return [path.name for path in chosen], {path.name: self._broken(path.read_bytes()) for path in chosen}

    def _pair(self) -> tuple[list[str], dict[str, bytes]]:
        words = ["recompute=full", "recompute=none,zero=2", "tp=2", "micro_batch=4", "", "x=1", "zero=9", "model=gpt2"]
        return self.random.choices(words, k=2), {}

    def _quantity(self) -> tuple[list[str], dict[str, bytes]]:
        return [self.random.choice(("seq-len", "micro-batch", "model", "gpus", ""))], {}

    def _gpus(self) -> tuple[list[str], dict[str, bytes]]:
        return ["gpus"], {}

    def _sizes(self) -> tuple[list[str], dict[str, bytes]]:
        return ["--gpus", self.random.choice(("1", "2", "8", "6", "16"))], {}

    def _saved(self) -> tuple[list[str], dict[str, bytes]]:
        form = self.random.choice(("fsdp2", "deepspeed", "trainer", "megatron", "torchtitan", "axolotl", "nothing"))
        words = ["saved.json", "--to", form] if self.random.random() < 0.7 else ["saved.json"]
        return words, {"saved.json": self._broken(self.random.choice(self.seeds.saved))}

    def _sweep(self) -> tuple[list[str], dict[str, bytes]]:
        return ["sweep.toml", "--output", "table.csv", "--force"], {"sweep.toml": self._broken(self.seeds.texts[2])}

    def _runs(self) -> tuple[list[str], dict[str, bytes]]:
        return ["runs.toml"], {"runs.toml": self._broken(self.random.choice(self.seeds.runs).read_bytes()[:20_000])}

    def _log(self) -> tuple[list[str], dict[str, bytes]]:
        return ["job.log"], {"job.log": self._broken(self.random.choice(self.seeds.texts[:2]))}

    def _name(self) -> tuple[list[str], dict[str, bytes]]:
        return [self.random.choice((*self.seeds.models, *BAD))], {}

    def _broken(self, content: bytes) -> bytes:
        """Bytes changed at random: cut, doubled, exchanged, or values of another kind in their place."""
        data = bytearray(content)
        for _ in range(self.random.choice((0, 0, 1, 2, 5))):
            at = self.random.randrange(len(data) + 1)
            piece = self.random.choice(BAD[:20]).encode("utf-8", "replace")[:40]
            end = at + self.random.choice((0, 1, 4, 40))
            data[at:end] = self.random.choice((b"", piece, bytes(data[:end])[-80:], b"\x00", b"[" * 80, b"{"))
        return bytes(data)


def run(words: Sequence[str]) -> tuple[int, str, str]:
    """Run a command line in this process; its exit code and what it wrote."""
    import typer.main

    from memcalc.cli.app import app

    group: Group = typer.main.get_command(app)  # type: ignore[assignment]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = group.main(list(words), prog_name="memcalc", standalone_mode=False) or 0
        except SystemExit as end:
            code = int(end.code or 0)
    return code, out.getvalue(), err.getvalue()


def fault(words: Sequence[str]) -> str:
    """What is wrong with how a command line ends; nothing where it is as it must be."""
    signal.setitimer(signal.ITIMER_PROF, LONGEST_S)
    try:
        code, out, err = run(words)
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is the finding
        return f"{type(error).__name__}: {traceback.format_exc(limit=-2)}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    if code not in CODES:
        return f"exit code {code}"
    if code in {2, 3} and err.count("\n") > 1:
        return f"more than one line: {err[:200]!r}"
    if any(letter in out for letter in ("\u202e", "\x00")):
        return "a character that no terminal should see"
    return ""


FORBIDDEN = ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.fork", "socket.connect", "socket.bind")


def forbid(seen: Counter[str]) -> None:
    """Count what no command may do."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in FORBIDDEN:
            seen[f"{event} {str(arguments)[:80]}"] += 1

    sys.addaudithook(hook)


def _late(*_: object) -> None:
    raise TimeoutError(f"longer than {LONGEST_S} s")


def replayed(line: str) -> str:
    """The fault of a case that was printed."""
    case = json.loads(line)
    _write({name: bytes.fromhex(content) for name, content in case["files"].items()})
    return fault(case["words"])


def _write(files: dict[str, bytes]) -> None:
    for name, content in files.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(content)


def main() -> int:
    """Run cases until the time is up; the exit code says whether any failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=sorted(COMMANDS), default="")
    parser.add_argument("--replay", default="")
    given = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    signal.signal(signal.SIGPROF, _late)
    seen: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CONFIG_HOME"] = folder
        os.chdir(folder)
        if given.replay:
            sys.stdout.write(f"{replayed(given.replay) or 'as it must be'}\n")
            return 0
        seeds = Seeds.found(Path(folder))
        forbid(seen)
        failed, ran, end = 0, 0, time.monotonic() + given.minutes * 60
        for words, files in Cases(seeds, given.seed, given.only):
            if time.monotonic() > end:
                break
            _write(files)
            ran += 1
            if wrong := fault(words):
                failed += 1
                named = {name: content.hex() for name, content in files.items()}
                sys.stdout.write(
                    f"{wrong}\n  {shlex.join(words)[:300]}\n  {json.dumps({'words': words, 'files': named})}\n"
                )
                sys.stdout.flush()
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    sys.stdout.write(
        f"{ran:,} cases, {failed} failed, {resident >> 20} MiB at the most, forbidden: {dict(seen) or 'nothing'}\n"
    )
    return int(bool(failed or seen) or resident > MOST_RESIDENT)


if __name__ == "__main__":
    sys.exit(main())
