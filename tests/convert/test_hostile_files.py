"""Hostile files: each is answered with one sentence and its exit code, in bounded memory and time, and nothing is run.

Each case is checked in a process of its own, whose memory is limited; the time limit only cuts off what hangs.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from memcalc.convert.document import read_document
from memcalc.errors import FileError, MemcalcError, MissingError
from memcalc.preflight import check
from memcalc.results.check import Check

MEMORY = 1 << 30
"""Bytes that a case may use beyond what the process has as it begins."""
HANG_S = 120
GIVEN = {"model": "llama-2-7b", "gpu": "a100-80g", "gpus": 8, "seq_len": 2048, "micro_batch": 1}
DEEP = 100_000


def answered(*paths: Path) -> tuple[int, str]:
    """Check files in a limited process; return the exit code and the sentence."""
    out, into = os.pipe()
    child = os.fork()
    if not child:
        _limited_check(into, paths)
    os.close(into)
    with os.fdopen(out, encoding="utf-8") as stream:
        said = stream.read()
    os.waitpid(child, 0)
    code, text = json.loads(said or '[-1, "the process died: it hung, or took too much memory"]')
    return code, text


def _limited_check(into: int, paths: tuple[Path, ...]) -> None:
    signal.alarm(HANG_S)
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    try:
        check([str(path) for path in paths], **GIVEN)
        answer = (0, "")
    except MemcalcError as error:
        answer = (error.exit_code, str(error))
    except BaseException:  # noqa: BLE001 (whatever it is, the test shows it)
        answer = (-1, traceback.format_exc()[-1500:])
    os.write(into, json.dumps(answer).encode())
    os._exit(0)


def refused(path: Path, said: str = "", code: int = 2) -> str:
    found, text = answered(path)
    assert found == code, text
    assert "\n" not in text
    assert len(text) < 1000
    assert said in text, text
    return text


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + at)}: &{chr(98 + at)} [{', '.join([f'*{chr(97 + at)}'] * 9)}]\n" for at in range(12)
)
TEXTS: dict[str, tuple[str, str, str]] = {
    # name: file name, text, what the sentence must say
    "yaml bomb": ("c.yaml", BOMB, "must be at most"),
    "yaml merge bomb": (
        "c.yaml",
        "a: &a {x: 1}\n" + "".join(f"k{at}: &k{at} {{<<: [{', '.join(['*a'] * 50)}]}}\n" for at in range(2000)),
        "must be at most",
    ),
    "yaml loop": ("c.yaml", "a: &a\n  b: *a\n", ""),
    "yaml python": ("c.yaml", "a: !!python/object/apply:os.system ['touch {canary}']\n", "without the tag"),
    "yaml python name": ("c.yaml", "!!python/name:os.system : 1\n", ""),
    "yaml own tag": ("c.yaml", "a: !vault x\n", "without the tag !vault"),
    "yaml binary": ("c.yaml", "a: !!binary aGk=\n", "without the tag"),
    "yaml two documents": ("c.yaml", "a: 1\n---\nb: 2\n", "another document"),
    "yaml keys": ("c.yaml", "[1, 2]: 3\n", "texts as keys"),
    "yaml list": ("c.yaml", "- 1\n- 2\n", "must be a table"),
    "yaml text": ("c.yaml", "hello\n", "must be a table"),
    "yaml deep": ("c.yaml", "[" * DEEP, "nest"),  # PyYAML from 6.0.4 on says it in its own words
    "yaml deep block": ("c.yaml", "".join(f"{' ' * at}a:\n" for at in range(1200)), "must nest at most"),
    "yaml deep keys": ("c.yaml", "? " * DEEP, ""),
    "yaml number": ("c.yaml", f"a: {'9' * 100_000}\n", "usual size"),
    "yaml sexagesimal": ("c.yaml", f"a: {':'.join(['59'] * 100_000)}\n", ""),
    "yaml date": ("c.yaml", "a: 9999-99-99\n", "usual size"),
    "yaml tabs": ("c.yaml", "a:\n\tb: 1\n", "must be YAML"),
    "yaml anchor": ("c.yaml", "a: *b\n", "must be YAML"),
    "yaml twice many": ("c.yaml", "a: {b: 1}\n" * 60_000, "must be at most"),
    "yaml wide": ("c.yaml", "".join(f"k{at}: 1\n" for at in range(60_000)), "must be at most"),
    "json deep": ("c.json", '{"a":' * DEEP, "nesting"),
    "json deep lists": ("c.json", '{"a": ' + "[" * DEEP + "]" * DEEP + "}", "nesting"),
    "json nested": ("c.json", '{"a":' * 70 + "1" + "}" * 70, "must nest at most"),
    "json twice": ("c.json", '{"zero_optimization": {"stage": 2, "stage": 3}}', "has the key"),
    "json many twice": ("c.json", "{" + ", ".join(f'"k{at % 20_000}": 1' for at in range(40_000)) + "}", "has the key"),
    "json number": ("c.json", '{"train_batch_size": ' + "9" * 100_000 + "}", "usual size"),
    "json float": ("c.json", '{"train_batch_size": 1e999}', "train_batch_size"),
    "json nan": ("c.json", '{"train_batch_size": NaN}', "train_batch_size"),
    "json list": ("c.json", "[1]", "must be a table"),
    "json cut": ("c.json", '{"zero_optimization": {"stage": 2', "must be JSON"),
    "json comment": ("c.json", '{"a": 1, // b\n}', "must be JSON"),
    "json kinds": ("c.json", '{"zero_optimization": 3}', "zero_optimization 3: must be a table"),
    "json surrogate": ("c.json", '{"zero_optimization": {"stage": "\\ud800"}}', "stage"),
    "toml deep": ("c.toml", "a = " + "[" * DEEP, "usual size"),
    "toml deep tables": ("c.toml", "a = " + "{b = " * 5000 + "1" + "}" * 5000, ""),
    "toml dots": ("c.toml", ".".join(["a"] * 100_000) + " = 1\n", "dots in a line"),
    "toml dots in lines": (
        "c.toml",
        "".join(f"{'.'.join(['a'] * 200)}.k{at} = 1\n" for at in range(200)),
        "must nest at most",
    ),
    "toml twice": ("c.toml", "a = 1\na = 2\n", "must be TOML"),
    "toml number": ("c.toml", f"a = {'9' * 100_000}\n", "usual size"),
    "shell loop": (
        "c.sh",
        "X=aaaaaaaaaaaaaaaa\n" + "X=$X$X$X\n" * 500 + "torchrun $X t.py\n",
        "must be a script of at most",
    ),
    "shell recursion": ("c.sh", "f() { f a; f b; }\nf\ntorchrun t.py\n", "must be a script of at most"),
    "shell brackets": ("c.sh", "( " * DEEP, "must nest at most"),
    "shell quotes": ("c.sh", "torchrun 't.py --a\n", "a quote of line 1 is not closed"),
    "shell expansions": ("c.sh", "torchrun " + "${A:-" * DEEP + "\n", "a bracket of line 1 is not closed"),
    "shell commands": ("c.sh", "torchrun " + "$(" * DEEP + "\n", "a bracket of line 1 is not closed"),
    "shell sums": ("c.sh", f"A=$(({'(' * 20_000}1{')' * 20_000}))\nB=$((9**9**9**9))\ntorchrun $A $B t.py\n", ""),
    "shell patterns": ("c.sh", f"A={'a' * 5000}\n[[ $A == {'*a' * 200}b ]] && B=1\ntorchrun t.py a.yaml\n", ""),
    "shell heredoc": (
        "c.sh",
        "cat <<EOF > ds.json\n{" * 2000 + "\ntorchrun t.py --deepspeed ds.json --output_dir o --do_train\n",
        "",
    ),
    "shell words": ("c.sh", "torchrun t.py " + "--a 1 " * 50_000, "must be a script of at most"),
    "shell in zsh": ("c.sh", "for f (*.py) { torchrun $f:t ${(j: :)x} =(ls) }\n", ""),
    "shell writes yaml": ("c.sh", f"cat <<E > a.yaml\n{'[' * 5000}\nE\ntorchrun t.py a.yaml\n", ""),
    "no text": ("c.json", "", "must be JSON"),
    "no script": ("c.sh", "", ""),
    "empty yaml": ("c.yaml", "", ""),
    "binary name": ("c.weird\u202ename", "\x01\x02", ""),
    "control": ("c.json", '{"zero_optimization": {"stage": "\\u001b[31m\\n"}}', "stage"),
}


FINE = ("shell sums", "shell in zsh")
"""With all else given these may be answered: what they hide is not asked for."""


@pytest.mark.parametrize("name", TEXTS)
def test_texts(tmp_path: Path, name: str) -> None:
    file, text, said = TEXTS[name]
    canary = tmp_path / "canary"
    path = tmp_path / file
    path.write_text(text.replace("{canary}", str(canary)), encoding="utf-8")
    code, sentence = answered(path)
    assert code in ((0, 2, 3) if name in FINE else (2, 3)), sentence
    assert "\n" not in sentence
    assert "\x1b" not in sentence
    assert len(sentence) < 1000
    assert said in sentence, sentence
    assert not canary.exists()


@pytest.mark.parametrize("ending", ["json", "yaml", "toml", "sh"])
@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("a = 'é'\n".encode("latin-1"), "must be UTF-8 text"),
        ('{"a": 1}'.encode("utf-16"), "must be UTF-8 text"),
        (b"a\0b", "without NUL"),
        (b"\xff\xfe\x00\x01" * 100, "must be UTF-8 text"),
        (b"x" * ((1 << 20) + 1), "at most 1 MiB"),
    ],
    ids=["latin-1", "utf-16", "nul", "bytes", "large"],
)
def test_encodings_and_sizes(tmp_path: Path, ending: str, content: bytes, said: str) -> None:
    path = tmp_path / f"c.{ending}"
    path.write_bytes(content)
    refused(path, said)


def test_a_hundred_megabytes_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    with path.open("wb") as stream:
        stream.truncate(100 << 20)
    refused(path, "at most 1 MiB")


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.mkdir()


def _loop(path: Path) -> None:
    path.symlink_to(path)


def _nowhere(path: Path) -> None:
    path.symlink_to("/nonexistent/x")


def _absent(_: Path) -> None:
    pass


@pytest.mark.parametrize("make", [_fifo, _folder, _loop, _nowhere, _absent])
def test_what_is_no_file(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "c.json"
    make(path)
    refused(path, "file '")


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/null", "/dev/full", "/proc/self/mem", "/proc/self/environ"])
def test_devices(device: str) -> None:
    if not Path(device).exists():
        pytest.skip(f"no {device} here")
    code, said = answered(Path(device))
    assert code == 2, said
    assert "HOME=" not in said


# ----------------------------------------------------------------------------------------------- files that name files

LAUNCH = "deepspeed --num_gpus 2 t.py --output_dir o --do_train --deepspeed {path}\n"
DEEPSPEED = '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}'


def only_deepspeed(tmp_path: Path, path: str) -> tuple[Path, Path]:
    """A folder with a script that names a file, and a folder beside it."""
    job, other = tmp_path / "job", tmp_path / "other"
    job.mkdir()
    other.mkdir()
    (other / "ds.json").write_text(DEEPSPEED, encoding="utf-8")
    (job / "run.sh").write_text(f"deepspeed --num_gpus 2 pretrain_gpt.py --deepspeed_config {path}\n", encoding="utf-8")
    return job / "run.sh", other


def named_by(tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    """The answer about a script that names a file, its other references left out."""
    from memcalc.convert import argument_source

    monkeypatch.setattr(argument_source, "format_of", lambda _: "")
    monkeypatch.chdir(tmp_path / "job" if (tmp_path / "job").exists() else tmp_path)
    script, _ = (
        only_deepspeed(tmp_path, path) if not (tmp_path / "job").exists() else (tmp_path / "job" / "run.sh", None)
    )
    monkeypatch.chdir(script.parent)
    return answered(script)


@pytest.mark.parametrize(
    "path", ["../other/ds.json", "/etc/passwd.json", "ds.json", "../../../../etc/hostname.json", "//ds.json"]
)
def test_what_lies_elsewhere_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    code, said = named_by(tmp_path, path, monkeypatch)
    assert code == 3
    assert "run.sh names" in said


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, other = only_deepspeed(tmp_path, "ds.json")
    (script.parent / "ds.json").symlink_to(other / "ds.json")
    code, said = named_by(tmp_path, "ds.json", monkeypatch)
    assert code == 2
    assert "it leads out of" in said


@pytest.mark.parametrize("content", [None, "[" * 5000, "\0"])
def test_a_hostile_file_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None) -> None:
    script, _ = only_deepspeed(tmp_path, "ds.json")
    if content is None:
        os.mkfifo(script.parent / "ds.json")
    else:
        (script.parent / "ds.json").write_text(content, encoding="utf-8")
    code, said = named_by(tmp_path, "ds.json", monkeypatch)
    assert code == 2
    assert "ds.json" in said


def test_scripts_that_name_each_other_end(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text("bash b.sh\n", encoding="utf-8")
    (tmp_path / "b.sh").write_text("bash a.sh\n", encoding="utf-8")
    code, said = answered(tmp_path / "a.sh")
    assert code in (0, 3), said


def test_a_chain_of_scripts_ends(tmp_path: Path) -> None:
    for at in range(40):
        (tmp_path / f"s{at}.sh").write_text(f"bash s{at + 1}.sh\n", encoding="utf-8")
    refused(tmp_path / "s0.sh", "at most 16 files")


def test_the_command_itself_answers_so(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(BOMB, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "memcalc", "check", str(path)],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 2
    assert not done.stdout
    assert "Traceback" not in done.stderr
    assert "must be at most 50,000 values" in " ".join(done.stderr.split())


def test_a_name_too_long_for_a_file_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(f"base_model: x\nmicro_batch_size: 1\ndeepspeed: {'a' * 5000}.json\n")
    with pytest.raises(MissingError, match="is neither here nor beside it"):
        check([str(tmp_path / "a.yaml")], model="llama-2-7b", gpu="h100", gpus=8, seq_len=128)


def test_where_yaml_cannot_be_read_the_file_and_the_cure_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    path = tmp_path / "sft.yaml"
    path.write_text("output_dir: out\n", encoding="utf-8")
    with pytest.raises(FileError, match=r"sft\.yaml': YAML needs PyYAML: pip install 'memcalc\[configs\]'"):
        check([str(path)], **GIVEN)


def test_of_a_key_that_stands_twice_the_last_counts_as_for_pyyaml(tmp_path: Path) -> None:
    """axolotl, TRL and Accelerate read by `yaml.safe_load` (PyYAML 6.0.3); a whole table gives way to the last one."""
    text = "base_model: x\nmicro_batch_size: 7\nsequence_len: 64\nlora: {a: {b: 1}}\nmicro_batch_size: 2\nlora: 3\n"
    path = tmp_path / "a.yaml"
    path.write_text(text, encoding="utf-8")
    assert read_document(path).data == yaml.safe_load(text)
    result = check([str(path)], **{**GIVEN, "micro_batch": None})
    assert isinstance(result, Check)
    assert result.estimate.strategy.micro_batch == 2
    told = {finding.field: finding for finding in result.files[0].findings if finding.code == "MC003"}
    assert (told["micro_batch_size"].line, told["lora"].line) == (5, 6)
    assert "stands twice: the last counts" in told["lora"].message


def test_a_key_that_stands_twice_stops_what_omegaconf_reads(tmp_path: Path) -> None:
    """LLaMA-Factory's and torchtune's parsers raise "found duplicate key" (OmegaConf 2.3)."""
    path = tmp_path / "a.yaml"
    path.write_text("model_name_or_path: x\nstage: sft\nfinetuning_type: full\ncutoff_len: 8\ncutoff_len: 9\n")
    refused(path, "has the key 'cutoff_len' twice (line 5), at which LLaMA-Factory")
