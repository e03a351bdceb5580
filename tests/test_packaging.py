"""What is built and installed: every package listed, the presets in the wheel, the version in one place."""

from __future__ import annotations

import os
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
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel, without a network, from a copy of what goes into it."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "LICENSE", "README.md", "memcalc", "presets"):
        target = source / name
        origin = ROOT / name
        paths = [origin] if origin.is_file() else [path for path in origin.rglob("*") if path.suffix != ".pyc"]
        for path in (path for path in paths if path.is_file()):
            copy = target / path.relative_to(origin)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    command = [*pip, "wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w", str(built), str(source)]
    subprocess.run(command, check=True, capture_output=True, timeout=300, stdin=subprocess.DEVNULL)
    return next(built.glob("*.whl"))


@pytest.mark.slow
def test_the_wheel_holds_every_module_and_preset(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "memcalc").rglob("*.py")}
    presets = {f"memcalc/{path.relative_to(ROOT)}" for path in (ROOT / "presets").rglob("*.toml")}
    parts = {f"memcalc/report/page/page.{kind}" for kind in ("css", "js")}
    assert modules | presets | parts | {"memcalc/py.typed", "memcalc/presets/__init__.py"} <= held
    assert not any(name.startswith(("tests", "docs", "presets")) for name in held)


@pytest.mark.slow
def test_presets_load_from_the_wheel_itself_and_from_an_unpacked_copy(wheel: Path, tmp_path: Path) -> None:
    """The wheel is put on the path as it is, a zip file; then its content, as pip would install it."""
    unpacked = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(unpacked)
    gpus = len([path for path in (ROOT / "presets" / "gpus").glob("*.toml") if path.stem != "aliases"])
    environ = {**os.environ, "XDG_CONFIG_HOME": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    for place in (wheel, unpacked):
        run = [sys.executable, "-c", USE, str(place)]
        done = subprocess.run(run, capture_output=True, text=True, check=False, cwd=tmp_path, env=environ)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split()[::2] == [str(gpus), "h100"]
