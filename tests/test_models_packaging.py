"""A wheel carries the draft and the mapped folders, and the repository's set-up files say what they should."""

import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the sources: setuptools writes into the folder that it builds from."""
    copy = tmp_path_factory.mktemp("wheel")
    hidden = shutil.ignore_patterns(".*", "__pycache__", "runs", "build", "dist", "*.egg-info")
    shutil.copytree(ROOT, copy / "source", ignore=hidden)
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "-w", copy, copy / "source"], check=True)
    return next(copy.glob("*.whl"))


def test_a_wheel_install_finds_the_draft_and_the_mapped_folders(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = (
        "import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in str(f).lower()];"
        f"sys.path.insert(0, {str(tmp_path)!r});"
        "import faser, faser.envs, faser.models;"
        "from faser.models.smollm2 import shipped_draft;"
        "print(faser.__file__, faser.envs.__file__, faser.models.resolve('smollm2').draft, shipped_draft(), sep='\\n')"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    faser, envs, draft, shipped = ran.stdout.split()
    assert all(Path(path).is_relative_to(tmp_path) for path in (faser, envs, shipped))
    assert (Path(shipped) / "model.int8.safetensors").is_file()
    assert "smollm2-draft-15m" in draft


def test_a_wheel_carries_every_python_file(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    mapped = {"faser": "faser", **{f: f"faser/{f}" for f in ("envs", "policies", "kernels", "train", "checkpoints")}}
    for folder, place in mapped.items():
        for path in (ROOT / folder).rglob("*.py"):
            assert f"{place}/{path.relative_to(ROOT / folder).as_posix()}" in packed


def test_a_wheel_carries_the_live_page_and_the_dashboard(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("faser/live/")}
    assert packed == {f"faser/live/{path.name}" for path in (ROOT / "faser" / "live").iterdir() if path.is_file()}


def test_the_lock_is_exact_and_names_no_host() -> None:
    text = (ROOT / "requirements.lock").read_text()
    pins = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins)
    assert not re.search(r"https?:|file:|--index|--find-links|\+cpu==|\+cpu$", text, re.MULTILINE)
    names = {re.sub(r"[-_.]+", "-", pin.split("==")[0]).lower() for pin in pins}
    assert not names & {"torchvision", "torchaudio", "torchcodec", "llama-cpp-python"}


def test_what_is_installed_is_what_the_lock_says() -> None:
    for line in (ROOT / "requirements.lock").read_text().splitlines():
        if "==" in line and not line.startswith("#"):
            name, version = line.split("==")
            assert metadata.version(name).split("+")[0] == version, name
