"""A wheel and an sdist build, and install into a clean environment that has nothing of the checkout."""

import email
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import ltx2_fastpath

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("setup.cfg", "pyproject.toml", "README.md", "LICENSE", "NOTICE", "ltx2_fastpath", "patches")
BUILD = "import sys, setuptools.build_meta as backend; print(backend.build_{kind}(sys.argv[1]))"


def command(*arguments, cwd: Path, **environment) -> str:
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    done = subprocess.run(
        list(map(str, arguments)), cwd=cwd, env=variables | environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(kind: str, source: Path, out: Path) -> Path:
    """What `pip` and `build` do, without an environment of its own: no network."""
    out.mkdir(exist_ok=True)
    printed = command(sys.executable, "-c", BUILD.format(kind=kind), out, cwd=source)
    return out / printed.split()[-1]


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """(sdist, wheel built from the sdist), from a copy of the sources: nothing that an earlier build left is in it."""
    folder = tmp_path_factory.mktemp("packaging")
    checkout = folder / "checkout"
    checkout.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, checkout / name)
    sdist = build("sdist", checkout, folder / "dist")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return sdist, build("wheel", unpacked, folder / "dist")


@pytest.fixture(scope="module")
def clean_python(distributions, tmp_path_factory):
    """The interpreter of a fresh environment with the wheel installed, which finds torch and diffusers in this one."""
    folder = tmp_path_factory.mktemp("environment")
    command(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    command(*pip, "--no-deps", "--no-index", distributions[1], cwd=folder)
    site = Path(command(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    # A line in a .pth file puts a folder at the path's end and does not read the .pth files in there, such as that of an
    # editable install.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def test_wheel_holds_every_source_and_no_more(distributions):
    with zipfile.ZipFile(distributions[1]) as wheel:
        packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    expected = {f"ltx2_fastpath/{p.relative_to(ROOT / 'ltx2_fastpath')}" for p in (ROOT / "ltx2_fastpath").rglob("*.*")}
    expected |= {f"ltx2_fastpath/patches/{path.relative_to(ROOT / 'patches')}" for path in (ROOT / "patches").rglob("*.*")}
    expected = {name for name in expected if "__pycache__" not in name}
    assert packed == expected
    assert {"ltx2_fastpath/testing/models.py", "ltx2_fastpath/patches/transformer/parts.py"} <= packed
    assert {"ltx2_fastpath/py.typed", "ltx2_fastpath/ops/dtypes.cuh", "ltx2_fastpath/ops/rms_norm_modulate.cu"} <= packed


def test_metadata(distributions):
    with zipfile.ZipFile(distributions[1]) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(wheel.read(name))
        licences = {Path(name).name for name in wheel.namelist() if "/licenses/" in name}
    assert metadata["Version"] == ltx2_fastpath.__version__
    assert "Apache-2.0" in (metadata["License-Expression"], metadata["License"]) and licences == {"LICENSE", "NOTICE"}
    assert metadata.get_payload().startswith("# ltx2_fastpath")
    assert set(metadata.get_all("Provides-Extra")) == {"cuda", "test", "bench", "examples"}
    required = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert {line.split(">")[0].split(";")[0].strip() for line in required} == {
        "torch", "triton", "diffusers", "transformers", "accelerate",
    }  # fmt: skip


def test_sdist_has_the_patches(distributions):
    with tarfile.open(distributions[0]) as archive:
        names = archive.getnames()
    assert any(name.endswith("/patches/host.py") for name in names)
    assert any(name.endswith("/patches/transformer/host.py") for name in names)
    assert any(name.endswith("/ltx2_fastpath/ops/dtypes.cuh") for name in names)


CODE = """
import importlib.util, pathlib, ltx2_fastpath
from ltx2_fastpath.testing import models
from ltx2_fastpath.ops import cuda
from ltx2_fastpath.patches import ROOMS, host
assert [host.unknown_sources(room) for room in ROOMS] == [[]] * len(ROOMS)
assert importlib.util.find_spec("ltx2_fastpath.ltx2_fastpath") is None
transformer = models.tiny_transformer("2.3")
print(ltx2_fastpath.enable(transformer))
print(*(pathlib.Path(module.__file__).resolve() for module in (ltx2_fastpath, cuda, host)), sep="\\n")
"""


def test_installed_package_works_and_is_not_the_checkout(clean_python, tmp_path):
    handle, *files = command(clean_python, "-W", "error::DeprecationWarning:ltx2_fastpath", "-c", CODE, cwd=tmp_path).splitlines()
    assert handle.startswith("<FastPath lossless")
    environment = clean_python.parent.parent.resolve()
    assert len(files) == 3 and all(Path(file).is_relative_to(environment) for file in files)


def test_installed_machine_check_runs(clean_python, tmp_path):
    done = subprocess.run(
        [clean_python, "-m", "ltx2_fastpath", "--json"], cwd=tmp_path, capture_output=True, text=True, timeout=120,
        env={name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")},
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert done.returncode == (0 if found["outcome"]["active"] else 1)
    assert found["environment"]["ltx2_fastpath"] == ltx2_fastpath.__version__


IN_A_CHECKOUT = """
import importlib.util
import ltx2_fastpath
from ltx2_fastpath.testing import models
handle = ltx2_fastpath.enable(models.tiny_transformer("2.3"))
import ltx2_fastpath.patches.transformer.parts
assert importlib.util.find_spec("ltx2_fastpath.ltx2_fastpath") is None
assert importlib.util.find_spec("ltx2_fastpath.bench.models") is None
print(handle.active, ltx2_fastpath.__file__, ltx2_fastpath.patches.__file__)
"""


def test_in_the_folder_of_a_checkout_that_is_not_installed(tmp_path):
    """Python finds the sources before any installed package, and patches lie beside them."""
    for name in ("ltx2_fastpath", "patches"):
        shutil.copytree(ROOT / name, tmp_path / name)
    active, package, patches = command(sys.executable, "-c", IN_A_CHECKOUT, cwd=tmp_path, TRITON_INTERPRET="1").split()
    assert active == "True"
    assert (package, patches) == (str(tmp_path / "ltx2_fastpath/__init__.py"), str(tmp_path / "patches/__init__.py"))
