"""What tests/fuzz.py throws: command lines with their files, requests of the page, and configs for each reader."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import fuzz_readers

from memcalc.convert.formats import base
from memcalc.specs.options import COMMAND_LINE, OPTIONS
from memcalc.specs.posttraining import ENGINE_OPTIONS, RL_OPTIONS, TRAINING
from memcalc.specs.strategy import FRAMEWORKS
from memcalc.specs.strict import Option
from memcalc.ui.answers import REQUESTS

ROOT = Path(__file__).resolve().parents[1]
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
    "workload.image_pixels=1", "workload.eval_micro_batch=9999999", "workload.eval_new_tokens=5", "rl.prompt=512",
)  # fmt: skip
KINDS = ("llama", "gpt2", "mixtral", "gemma3_text", "t5", "qwen2_vl", "mamba2", "jamba")
FORMATS = ("rich", "plain", "markdown", "csv", "json", "latex", "html", "svg", "xml", "")
SPECIAL: dict[str, tuple[str, ...]] = {
    "lengths": ("300:1800:4k", "1:1:1", "4k:300:1", "1:100000000:100000000", "nan:1:2", "lengths.csv", "lengths.json",
        "lengths.txt", "lengths.npy"),
    "image_size": ("1024x768", "1x1", "0x9", "100000x100000", "9x", "640", "-1x-1", "1x100000000"),
    "recompute": ("full", "none", "attention", "every-2", "segments-3", "sqrt", "modules:mlp,norm", "block-4",
        "uniform-2", "selective-ops"),
    "offload": ("none", "optimizer", "params", "activations", "optimizer,params"),
    "lora": ("8", "16:all-linear", "64:q_proj,v_proj", "1000000", "1:x"),
    "park": ("none", "optimizer", "params,optimizer", "params", "x"),
    "engine": ("vllm", "sglang", "vllm@0.8", "vllm@0.16", "sglang@0.4", "vllm@99", "tgi"),
    "trainer": ("fsdp2", "deepspeed", "megatron", "hf", "x"),
    "utilization": ("0.1", "0.5", "0.9", "1", "0.000001", "90%", "2"),
    "expert_imbalance": ("1", "1.5", "1000", "0.5"),
    "other": ("1", "10GiB", "70 GB", "1e30", "-1"),
    "node": ("dgx-a100", "dgx-h100", "x"),
}  # fmt: skip
"""Values of options that are neither counts nor names."""
COMMANDS = {
    "plan": ("job", "sizes"), "estimate": ("job",), "explain": ("job",), "ladder": ("job",), "report": ("job",),
    "check": ("files", "job"), "diff": ("pair", "job"), "max": ("quantity", "job"), "min": ("quantity", "job"),
    "export": ("saved",), "sweep": ("sweep",), "validate": ("runs",), "calibrate": ("runs",), "triage": ("log", "job"),
    "models": ("name",), "gpus": ("name",), "nodes": ("name",), "serve": ("engine",), "rl": ("roles",),
}  # fmt: skip
"""Commands, and what stands behind them; `probe` measures a GPU, and the page of `ui` is asked in its place."""
NAMED = {
    "plan --algorithm": ("plan", "roles", "sizes"), "triage of an engine": ("triage", "start", "place"),
    "check of a script": ("check", "script", "place"), "triage of a snapshot": ("triage", "snapshot", "job"),
    **{f"{command} of a framework": (command, "framed") for command in ("plan", "estimate", "ladder", "explain")},
    **{f"{command} of a framework": (command, "quantity", "framed") for command in ("max", "min")},
    "diff of a framework": ("diff", "changes", "framed"), "serve with an engine": ("serve", "served"),
    **{f"{command} of an algorithm": (command, "trained") for command in ("rl", "plan")},
}  # fmt: skip
"""The same where a command reads several kinds of thing."""
OUT_OF_MEMORY = (
    b"torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 39.39 "
    b"GiB of which 1.00 GiB is free. Of the allocated memory 36.00 GiB is allocated by PyTorch."
)
STARTED = (
    b"INFO 04-24 10:11:12 [core.py:58] Initializing a V1 LLM engine (v0.19.1) with config: "
    b"model='meta-llama/Llama-3.1-8B-Instruct', dtype=torch.bfloat16, max_seq_len=8192, tensor_parallel_size=1, "
    b"pipeline_parallel_size=1, quantization=None, enforce_eager=False, kv_cache_dtype=auto\n"
    b"INFO non-default args: {'gpu_memory_utilization': 0.9, 'max_num_seqs': 256, 'max_num_batched_tokens': 8192}\n"
    b"(EngineCore pid=1) INFO [gpu_model_runner.py:4879] Model loading took 15.1 GiB memory and 31.6 seconds\n"
    b"(EngineCore pid=1) INFO [gpu_worker.py:358] Available KV cache memory: 51.2 GiB\n"
    b"(EngineCore pid=1) INFO [kv_cache_utils.py:1305] GPU KV cache size: 419,000 tokens\n"
    b"INFO Sleep mode freed 60.1 GiB memory, 4.2 GiB memory is still in use.\n"
)
REFUSED = (
    b"ValueError: Free memory on device cuda:0 (31.05/79.19 GiB) on startup is less than desired GPU memory "
    b"utilization (0.6, 47.51 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.\n"
)
FULL = b"vllm serve Qwen/Qwen2.5-7B --tensor-parallel-size 2\nValueError: No available memory for the cache blocks.\n"
SNAPSHOT = b'{"segments": [{"total_size": 2097152, "allocated_size": 512, "blocks": [{"size": 512, "state": "x"}]}]}'
VERL = (
    b"python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.max_prompt_length=1024 "
    b"data.max_response_length=$((2 * 1024)) data.train_batch_size=256 actor_rollout_ref.model.path=Qwen/Qwen2.5-1.5B "
    b"actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576 "
    b"actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=8 "
    b"actor_rollout_ref.rollout.gpu_memory_utilization=0.6 trainer.n_gpus_per_node=4 trainer.nnodes=2\n"
)
OPENRLHF = (
    b"deepspeed --num_gpus 8 --module openrlhf.cli.train_dpo --model.model_name_or_path Qwen/Qwen2.5-1.5B "
    b"--data.max_len 2048 --ds.zero_stage 3\n"
)
TRL = (
    b"trl grpo --model_name_or_path Qwen/Qwen2.5-1.5B-Instruct --per_device_train_batch_size 4 --num_generations 16 "
    b"--max_completion_length 768 --use_vllm true --vllm_gpu_memory_utilization 0.25 --beta 0.04\n"
)
SBATCH = (
    b"#SBATCH --nodes=2\n#SBATCH --gpus-per-node=8\n#MEMCALC --model llama-2-7b --gpu a100-80g\n"
    b"srun torchrun --nproc_per_node 8 train.py --deepspeed ds.json --per_device_train_batch_size 1\n"
)
LENGTHS = (b"length\n12\n4000\n300\n", b"[1, 2, 3, 4096]", b"5\n6\n7\n", b"\x93NUMPY\x01\x00\x16\x00{'descr': '<i8'}\n")


@dataclass(frozen=True)
class Case:
    """One input."""

    target: str
    """A command, `page`, `http`, or `read`."""
    words: list[str]
    files: dict[str, bytes] = field(default_factory=dict)
    """By name."""

    def line(self) -> str:
        """The case as one line that `--replay` takes."""
        files = {name: content.hex() for name, content in self.files.items()}
        return json.dumps({"target": self.target, "words": self.words, "files": files})

    @classmethod
    def of(cls, line: str) -> Case:
        """The case of a line."""
        case = json.loads(line)
        files = {name: bytes.fromhex(content) for name, content in case["files"].items()}
        return cls(case["target"], case["words"], files)


class Cases:
    """Makers of cases by name, all from one seed."""

    def __init__(self, number: int, saved: bytes) -> None:
        self.random, self._saved_plan = random.Random(number), saved  # noqa: S311
        self.models = sorted(path.stem for path in (ROOT / "presets/models").glob("*.toml"))
        self.gpus = sorted(path.stem for path in (ROOT / "presets/gpus").glob("*.toml"))
        configs = (path for path in (ROOT / "tests/configs").rglob("*") if path.is_file() and path.suffix != ".md")
        self.configs = {path.name: path.read_bytes() for path in sorted(configs)}
        runs = sorted((ROOT / "presets/runs").glob("*.toml"), key=lambda path: path.stat().st_size)[:6]
        self.runs = [path.read_bytes()[:20_000] for path in runs]
        self.presets = [path.read_bytes() for path in sorted((ROOT / "presets/models").glob("*.toml"))[:40]]

    def makers(self) -> dict[str, Callable[[], Case]]:
        """By name; a name stays the same from one run to the next."""
        made: dict[str, Callable[[], Case]] = {}
        for name, parts in {**{key: (key, *value) for key, value in COMMANDS.items()}, **NAMED}.items():
            made[name] = partial(self._command, *parts)
        made |= {f"page {request}": partial(self._page, request) for request in REQUESTS}
        made["page over HTTP"] = self._http
        for name, kinds in base.FORMATS.items():
            own, keys = fuzz_readers.seeds(name, kinds[0]), fuzz_readers.keys_of(name)
            made[f"read {name}"] = partial(self._read, name, base.get_format(name).kind, own, keys)
        return made

    def _command(self, command: str, *parts: str) -> Case:
        words, files = [command], {}
        for part in parts:
            more, named = getattr(self, f"_{part}")()
            words += more
            files |= named
        if self.random.random() < 0.3:
            words += ["--format", self.random.choice(FORMATS)]
        if self.random.random() < 0.1:
            words.insert(self.random.randrange(1, len(words) + 1), self.random.choice(BAD))
        return Case("command", words, files)

    # ------------------------------------------------------------------------------------------------- options

    def _job(self) -> tuple[list[str], dict[str, bytes]]:
        words, files = [], {}
        if self.random.random() < 0.85:
            model, files = self._model()
            words += ["--model", model, "--gpu", self.random.choice(self.gpus)]
        words += self._some(COMMAND_LINE, files)
        if self.random.random() < 0.1:
            words += ["--set", self.random.choice(SETTINGS)]
        return words, files

    def _framed(self) -> tuple[list[str], dict[str, bytes]]:
        """What is right but for one to three options or settings of a framework, which may not go together."""
        words = ["--model", self.random.choice(self.models), "--gpu", self.random.choice(self.gpus)]
        words += ["--framework", self.random.choice(FRAMEWORKS)]
        words += ["--gpus", self.random.choice(("1", "2", "4", "8", "16"))] if self.random.random() < 0.8 else []
        rows = [row for row in OPTIONS if row.name not in {"model", "gpu", "gpus", "framework", "calibration", "set"}]
        for row in self.random.sample(rows, self.random.randrange(1, 4)):
            words += self._option(row) if row.panel else ["--set", f"{row.key}={self._value(row)}"]
        return words, {}

    def _changes(self) -> tuple[list[str], dict[str, bytes]]:
        """Two sides of a comparison, each of one or two options with right values."""
        rows = [row for row in OPTIONS if row.panel and row.name not in {"gpu", "calibration", "set"}]
        sides = []
        for _ in range(2):
            chosen = self.random.sample(rows, self.random.randrange(1, 3))
            sides.append(",".join(f"{row.name}={self._value(row)}" for row in chosen))
        return sides, {}

    def _served(self) -> tuple[list[str], dict[str, bytes]]:
        """What is right but for one to three options of an engine, which may not go together."""
        words = ["--model", self.random.choice(self.models), "--gpu", self.random.choice(self.gpus)]
        words += ["--engine", self.random.choice(("vllm", "sglang", "vllm@0.8", "vllm@0.16", "sglang@0.4"))]
        rows = [row for row in ENGINE_OPTIONS if row.name not in {"model", "gpu", "engine"}]
        for row in self.random.sample(rows, self.random.randrange(1, 4)):
            words += self._option(row)
        return words, {}

    def _trained(self) -> tuple[list[str], dict[str, bytes]]:
        """An algorithm of a framework of post-training, and one to three options which may not go together."""
        words = ["--model", self.random.choice(self.models), "--gpu", self.random.choice(self.gpus)]
        words += ["--algorithm", self.random.choice(("grpo", "dapo", "ppo", "dpo", "kto", "orpo", "reward", "sft"))]
        words += ["--framework", self.random.choice(("trl", "verl", "openrlhf", "nemo-rl"))]
        words += ["--gpus", self.random.choice(("1", "2", "4", "8", "16")), "--prompt", "512", "--response", "1024"]
        given = {"algorithm", "framework", "model", "gpu", "prompt", "response"}
        rows = [row for row in RL_OPTIONS if row.name not in given]
        for row in self.random.sample(rows, self.random.randrange(1, 4)):
            words += self._option(row)
        return words, {}

    def _engine(self) -> tuple[list[str], dict[str, bytes]]:
        model, files = self._model()
        words = ["--model", model, "--gpu", self.random.choice(self.gpus)]
        return [*words, *self._some(ENGINE_OPTIONS, files), *self._few(("gpus", "tp", "pp"))], files

    def _roles(self) -> tuple[list[str], dict[str, bytes]]:
        model, files = self._model()
        words = ["--model", model, "--gpu", self.random.choice(self.gpus)]
        if self.random.random() < 0.9:
            words += ["--algorithm", self.random.choice(("grpo", "dapo", "ppo", "dpo", "kto", "orpo", "reward", "sft"))]
            words += ["--framework", self.random.choice(("trl", "verl", "openrlhf", "nemo-rl"))]
            words += ["--prompt", self.random.choice(NUMBERS[:12]), "--response", self.random.choice(NUMBERS[:12])]
        others = [option for option in RL_OPTIONS if option.name not in {"algorithm", "framework", "prompt"}]
        return [*words, *self._some(others, files), *self._few(("gpus", *TRAINING))], files

    def _place(self) -> tuple[list[str], dict[str, bytes]]:
        words = ["--gpu", self.random.choice(self.gpus)] if self.random.random() < 0.9 else []
        return [*words, *self._few(("model", "gpus", "tp", "pp", "node", "seq_len"))], {}

    def _few(self, names: tuple[str, ...]) -> list[str]:
        rows = [row for row in COMMAND_LINE if row.name in names]
        return [word for row in self.random.sample(rows, self.random.randrange(3)) for word in self._option(row)]

    def _some(self, options: Any, files: dict[str, bytes]) -> list[str]:
        words: list[str] = []
        for option in self.random.sample(list(options), min(len(options), self.random.randrange(6))):
            if option.name not in {"model", "gpu", "algorithm", "framework", "prompt"} or self.random.random() < 0.05:
                words += self._option(option)
        for name in words:
            if name.startswith("lengths."):
                files[name] = self._broken(self.random.choice(LENGTHS))
        return words

    def _option(self, option: Option) -> list[str]:
        flag = f"--{option.name.replace('_', '-')}"
        if option.kind == "flag":
            return [self.random.choice((flag, flag.replace("--", "--no-", 1)))]
        return [flag, self._value(option)]

    def _value(self, option: Option) -> str:
        if option.completed_by:
            chosen: list[str] = self.gpus if option.completed_by == "gpus" else self.models
        elif option.kind == "flag":
            chosen = ["true", "false"]
        else:
            chosen = list(SPECIAL.get(option.name, ())) or [str(value) for value in option.values]
            chosen = chosen or list(NUMBERS[:8] if option.kind == "count" else NUMBERS)
        return self.random.choice(BAD if self.random.random() < 0.08 else chosen)

    def _model(self) -> tuple[str, dict[str, bytes]]:
        chance = self.random.random()
        if chance < 0.7:
            return self.random.choice(self.models), {}
        if chance < 0.8:
            return "m.toml", {"m.toml": self._broken(self.random.choice(self.presets))}
        config = {
            "model_type": self.random.choice(KINDS),
            "hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 4, "intermediate_size": 1024,
        }  # fmt: skip
        for _ in range(self.random.randrange(4)):
            key = self.random.choice([*config, "num_key_value_heads", "vocab_size", "sliding_window", "layer_types"])
            config[key] = self.random.choice((None, 0, -1, 1, 7, 2**31, 2**70, 1e300, "x", [], {}, True, [1] * 9))
        return "m/config.json", {"m/config.json": json.dumps(config).encode()}

    # --------------------------------------------------------------------------------------------------- files

    def _files(self) -> tuple[list[str], dict[str, bytes]]:
        chosen = self.random.sample(sorted(self.configs), self.random.randrange(1, 3))
        return chosen, {name: self._broken(self.configs[name]) for name in chosen}

    def _script(self) -> tuple[list[str], dict[str, bytes]]:
        return ["run.sh"], {"run.sh": self._broken(self.random.choice((VERL, OPENRLHF, TRL, SBATCH)))}

    def _pair(self) -> tuple[list[str], dict[str, bytes]]:
        words = ["recompute=full", "recompute=none,zero=2", "tp=2", "micro_batch=4", "", "x=1", "zero=9", "model=gpt2"]
        return self.random.choices(words, k=2), {}

    def _quantity(self) -> tuple[list[str], dict[str, bytes]]:
        return [self.random.choice(("seq-len", "micro-batch", "model", "gpus", "gpus", ""))], {}

    def _sizes(self) -> tuple[list[str], dict[str, bytes]]:
        return ["--gpus", self.random.choice(("1", "2", "8", "6", "16"))], {}

    def _saved(self) -> tuple[list[str], dict[str, bytes]]:
        form = self.random.choice(("fsdp2", "deepspeed", "trainer", "megatron", "torchtitan", "axolotl", "nothing"))
        words = ["saved.json", "--to", form] if self.random.random() < 0.7 else ["saved.json"]
        return words, {"saved.json": self._broken(self._saved_plan)}

    def _sweep(self) -> tuple[list[str], dict[str, bytes]]:
        text = b'[jobs]\nmodel = ["gpt2"]\ngpu = ["a100-40g"]\nzero = [2, 3]\n[[exclude]]\nzero = 3\n'
        words = ["sweep.toml", "--output", "table.csv", "--force", "--jobs", "1"]
        return words, {"sweep.toml": self._broken(text)}

    def _runs(self) -> tuple[list[str], dict[str, bytes]]:
        return ["runs.toml"], {"runs.toml": self._broken(self.random.choice(self.runs))}

    def _log(self) -> tuple[list[str], dict[str, bytes]]:
        return ["job.log"], {"job.log": self._broken(OUT_OF_MEMORY)}

    def _start(self) -> tuple[list[str], dict[str, bytes]]:
        chosen = self.random.choices((STARTED, REFUSED, FULL, OUT_OF_MEMORY), k=self.random.randrange(1, 4))
        return ["engine.log"], {"engine.log": self._broken(b"".join(chosen))}

    def _snapshot(self) -> tuple[list[str], dict[str, bytes]]:
        return ["snapshot.json"], {"snapshot.json": self._broken(SNAPSHOT)}

    def _name(self) -> tuple[list[str], dict[str, bytes]]:
        return [self.random.choice((*self.models, *BAD))], {}

    def _broken(self, content: bytes) -> bytes:
        """Bytes changed at random: cut, doubled, exchanged, a number of another size, or something of another kind."""
        data = bytearray(content)
        for _ in range(self.random.choice((0, 0, 1, 2, 5))):
            at = self.random.randrange(len(data) + 1)
            digits = [place for place, byte in enumerate(data) if 48 <= byte < 58]
            if digits and self.random.random() < 0.4:
                at = self.random.choice(digits)
                data[at : at + 1] = self.random.choice((*BAD[:13], *NUMBERS)).encode("utf-8", "replace")[:400]
                continue
            piece = self.random.choice(BAD[:20]).encode("utf-8", "replace")[:40]
            end = at + self.random.choice((0, 1, 4, 40))
            data[at:end] = self.random.choice((b"", piece, bytes(data[:end])[-80:], b"\x00", b"[" * 80, b"{"))
        return bytes(data)

    # --------------------------------------------------------------------------------- the page, and the readers

    def _link(self) -> str:
        words, _ = self._job()
        pairs = [(words[at].removeprefix("--"), words[at + 1]) for at in range(0, len(words) - 1, 2)]
        if self.random.random() < 0.2:
            pairs.append(("config", self._model()[1].get("m/config.json", b"{}").decode()))
        return urlencode(pairs, errors="replace")

    def _page(self, request: str) -> Case:
        if request == "compare":
            return Case("page", [request, urlencode({"a": self._link(), "b": self._link()})])
        if request != "check":
            return Case("page", [request, self._link()])
        _, files = self.random.choice((self._files, self._script))()
        texts: dict[str, Any] = {name: content.decode("utf-8", "replace") for name, content in files.items()}
        if self.random.random() < 0.2:
            texts[self.random.choice(BAD)] = self.random.choice(("", "{}", 1, None))
        text = json.dumps({"files": texts, "job": self._link()})
        return Case("page", [request, text if self.random.random() < 0.9 else self.random.choice(BAD)])

    def _http(self) -> Case:
        """One request as a server passes it on: method, path, query, body, headers."""
        request = self.random.choice((*REQUESTS, "../estimate", "x", ""))
        path = self.random.choice((f"/api/{request}", "/", f"/{request}", quote(self.random.choice(BAD)[:300])))
        headers = {"host": self.random.choice(("127.0.0.1:8765", "localhost", "[::1]:1", "evil.example", *BAD[:8]))}
        if self.random.random() < 0.3:
            headers[self.random.choice(("origin", "sec-fetch-site"))] = self.random.choice(
                ("null", "http://127.0.0.1:8765", "same-origin", "cross-site", *BAD)
            )
        body = self.random.choice((self._link(), self.random.choice(BAD), "\udcff", "x" * 70_000))
        method = self.random.choice(("GET", "POST", "HEAD", "PUT", "OPTIONS"))
        return Case("http", [method, path, self.random.choice((self._link(), "")), json.dumps(headers), body])

    def _read(self, name: str, kind: str, own: list[str], keys: list[str]) -> Case:
        text = fuzz_readers.case(self.random, kind, own, keys)
        path = f"{name}{fuzz_readers.ENDINGS[kind]}"
        return Case("read", [name, path], {path: text.encode("utf-8", "replace")})
