"""What is built and installed: every package listed, the presets in the wheel, the version in one place."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import memcalc

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
TEST_COMMAND = "pip install torch==2.13.0 && pip install -e '.[test]' && pytest -n auto --dist loadfile"

USE = """
import sys
sys.path.insert(0, sys.argv[1])
from memcalc import catalog
assert sys.argv[1] in catalog.__file__, catalog.__file__
print(len(catalog.gpus()), len(catalog.nodes()), catalog.gpu("h100-sxm").name)
"""


def test_every_package_is_listed() -> None:
    """A new folder of the package must be named in pyproject.toml, or the wheel would lack it."""
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "memcalc").rglob("__init__.py")}
    found = {".".join(folder.parts) for folder in folders} | {"memcalc.presets"}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == found


def test_version_and_public_names() -> None:
    assert memcalc.__version__ == PROJECT["project"]["version"]
    assert all(hasattr(memcalc, name) for name in memcalc.__all__)
    assert dir(memcalc) == sorted(memcalc.__all__)
    with pytest.raises(AttributeError, match="no attribute 'estimates'"):
        _ = memcalc.estimates


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", ".ci/run"])
def test_the_test_command_is_the_same_everywhere(name: str) -> None:
    assert TEST_COMMAND in (ROOT / name).read_text(encoding="utf-8")


def test_importing_the_package_loads_nothing_heavy() -> None:
    """`import memcalc` must stay fast, and must work without torch."""
    code = "import sys, memcalc, memcalc.catalog; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "transformers", "numpy", "pydantic", "typer", "rich"} & set(loaded)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy what is installed, so that building it writes nothing into the repository."""
    copies = tmp_path_factory.mktemp("clone")
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, copies)
    for name in ("memcalc", "presets"):
        shutil.copytree(ROOT / name, copies / name, ignore=shutil.ignore_patterns("*.pyc"))
    return copies


def pip(*command: str | Path) -> None:
    """Run pip without a network: what builds the package is installed already."""
    quiet = ["--disable-pip-version-check", "--no-input"]
    alone = ["--no-build-isolation", "--no-deps", "--no-index"]
    line = [sys.executable, "-m", "pip", *quiet, *map(str, command), *alone]
    subprocess.run(line, check=True, capture_output=True, timeout=300, stdin=subprocess.DEVNULL)


def python(*command: str | Path, path: list[Path], cwd: Path) -> str:
    """Return what Python prints with only `path`, and what memcalc depends on, to import from.

    Without `site` (-S) no `.pth` file is read, so that an editable install of the repository is not found.
    """
    libraries = [entry for entry in sys.path if Path(entry).name == "site-packages"]
    entries = os.pathsep.join(map(str, [*path, *libraries]))
    environ = {**os.environ, "PYTHONPATH": entries, "XDG_CONFIG_HOME": str(cwd), "PYTHONDONTWRITEBYTECODE": "1"}
    run = [sys.executable, "-S", *map(str, command)]
    done = subprocess.run(run, capture_output=True, text=True, check=False, cwd=cwd, env=environ)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("wheel")
    pip("wheel", "-w", built, clone)
    return next(built.glob("*.whl"))


@pytest.mark.slow
def test_the_wheel_holds_every_module_and_preset(wheel: Path) -> None:
    content = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "memcalc").rglob("*.py")}
    presets = {f"memcalc/{path.relative_to(ROOT)}" for path in (ROOT / "presets").rglob("*.[tj]*[ln]")}
    kinds = ("css", "js")
    parts = {str(path.relative_to(ROOT)) for kind in kinds for path in (ROOT / "memcalc").rglob(f"*.{kind}")}
    keys = {str(path.relative_to(ROOT)) for path in (ROOT / "memcalc" / "convert").rglob("*.t*")}
    assert modules | presets | parts | keys | {"memcalc/py.typed", "memcalc/presets/__init__.py"} <= content
    assert not any(name.startswith(("tests", "docs", "presets")) for name in content)


@pytest.mark.slow
def test_presets_load_from_zip_files_and_from_unpacked_copies(wheel: Path, clone: Path, tmp_path: Path) -> None:
    """The wheel as it is, its content, and a clone as it is downloaded, zipped and unpacked."""
    unpacked = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(unpacked)
    download = Path(shutil.make_archive(str(tmp_path / "download"), "zip", clone.parent, clone.name))
    gpus = len([path for path in (ROOT / "presets" / "gpus").glob("*.toml") if path.stem != "aliases"])
    for path in (wheel, unpacked, download / clone.name, clone):
        printed = python("-c", USE, path, path=[], cwd=tmp_path)
        assert printed.split()[::2] == [str(gpus), "h100"]


@pytest.mark.slow
def test_what_readme_says_runs_in_the_clones_root(clone: Path, tmp_path: Path) -> None:
    """Its `pip install .`, then its first command and its lines of Python, typed in the same place."""
    pip("install", "--target", tmp_path, clone)
    shipped = python("-c", "from memcalc import catalog; print(catalog.shipped())", path=[tmp_path], cwd=clone)
    assert shipped.strip() == str(clone / "presets"), "the clone's package comes first, with its own presets"
    page = (clone / "README.md").read_text(encoding="utf-8")
    command = re.search(r"(?m)^pip install \. && memcalc (.*)$", page)
    lines = re.search(r"(?s)```pycon\n(.*?)```", page)
    assert command
    assert lines
    printed = python("-m", "memcalc", *shlex.split(command[1]), path=[tmp_path], cwd=clone)
    assert "7b" in printed
    (clone / "lines.txt").write_text(lines[1], encoding="utf-8")
    code = "import doctest; print(doctest.testfile('lines.txt', module_relative=False))"
    assert python("-c", code, path=[tmp_path], cwd=clone).strip().startswith("TestResults(failed=0, attempted=5")
