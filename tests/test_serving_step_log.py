"""The decision log: bounded, whole line by line, and no harm to the engine whatever becomes of its disk."""

import argparse
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from faser.ab.records import rotated
from faser.serving import log_flags
from faser.serving.settings import Settings, UsageError
from faser.serving.step_log import WAITING, RotatedFile, StepLog, open_log


def numbers(path: Path) -> list[int]:
    """Of a log whose lines are {"n": ...}."""
    return [json.loads(line)["n"] for line in path.read_text().splitlines()]


def written(path: Path, first: int, last: int, **limits: Any) -> StepLog:
    log = StepLog(path, **limits)
    for n in range(first, last):
        log.write(n=n)
    log.close()
    return log


def test_files_are_rotated_by_size_and_the_oldest_goes(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = written(path, 1000, 2000, max_mb=0.001, keep=3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log.jsonl", "log.jsonl.1", "log.jsonl.2", "log.jsonl.3"]
    files = [tmp_path / f"log.jsonl.{n}" for n in (3, 2, 1)] + [path]
    assert all(file.stat().st_size <= 1000 for file in files)
    kept = [n for file in files for n in numbers(file)]
    assert kept == [*range(kept[0], 2000)]  # nothing is missing between the oldest that is kept and the newest
    assert len(kept) > 250
    assert log.lost == 0


def test_the_files_of_a_log_are_its_own_oldest_first(tmp_path: Path) -> None:
    for name in ("log", "log.1", "log.2", "log.10", "log.dp1", "log.dp1.1", "log.old", "7"):
        (tmp_path / name).touch()
    assert [file.name for file in rotated(tmp_path / "log")] == ["log.10", "log.2", "log.1", "log"]
    assert [file.name for file in rotated(tmp_path / "log.dp1")] == ["log.dp1.1", "log.dp1"]
    (tmp_path / "log").unlink()  # between two moves of a rotation
    assert [file.name for file in rotated(tmp_path / "log")] == ["log.10", "log.2", "log.1"]
    with pytest.raises(FileNotFoundError):
        rotated(tmp_path / "gone")


def test_without_old_files_it_begins_anew_and_a_long_line_is_not_cut(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    written(path, 100, 200, max_mb=0.0001, keep=0)
    assert numbers(path)[-1] == 199
    assert len(numbers(path)) < 11
    log = StepLog(path, max_mb=0.0001, keep=0)
    log.write(n=1, long="x" * 1000)
    log.close()
    assert [p.name for p in tmp_path.iterdir()] == ["log.jsonl"]
    assert numbers(path) == [1]


def test_every_further_file_begins_with_the_split(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    split = {"kind": "split", "t": 1.5, "salt": "s"}
    log = StepLog(path, max_mb=0.001, keep=2)
    log.write(n=1000)
    log.write(**split)
    for n in range(1001, 1500):
        log.write(n=n)
    log.close()
    files = [[json.loads(line) for line in file.read_text().splitlines()] for file in rotated(path)]
    assert [(lines[0], lines.count(split)) for lines in files] == [(split, 1)] * 3
    assert all(file.stat().st_size <= 1000 for file in rotated(path))
    kept = [line["n"] for lines in files for line in lines[1:]]
    assert kept == [*range(kept[0], 1500)]


def test_a_split_that_begins_a_file_stands_there_once(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"n":1}\n' * 12)
    log = StepLog(path, max_mb=0.0001, keep=1)
    log.write(kind="split")
    log.write(n=2)
    log.close()
    assert path.read_text() == '{"kind":"split"}\n{"n":2}\n'


def test_a_gap_that_a_crash_left_between_rotated_files_does_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    written(path, 100, 150, max_mb=0.0001, keep=5)
    (tmp_path / "log.jsonl.2").unlink()
    newest = numbers(path)
    written(path, 150, 155, max_mb=0.0001, keep=5)
    assert (numbers(tmp_path / "log.jsonl.1"), numbers(path)) == (newest, [*range(150, 155)])


@pytest.mark.parametrize("torn", [b'{"n":2,"t":1', b'{"n":2,"text":"' + b"x" * 200_000, b'{"n":'])
def test_half_a_line_of_a_killed_engine_is_taken_off(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "log.jsonl"
    for before in (b"", b'{"n":1}\n'):
        path.write_bytes(before + torn)
        written(path, 3, 5)
        assert path.read_bytes() == before + b'{"n":3}\n{"n":4}\n'


def test_what_is_not_ours_is_not_taken_off(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"a note")
    written(path, 3, 4)
    assert path.read_bytes() == b'a note\n{"n":3}\n'


def test_a_full_disk_costs_lines_and_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "faser"):
        log = written(Path("/dev/full"), 0, 50)
    assert log.lost == 50
    (said,) = caplog.messages
    assert "No space left" in said
    assert "serving goes on" in said


FILLED = """
import errno, resource, sys
from pathlib import Path
from faser.serving.step_log import RotatedFile

resource.setrlimit(resource.RLIMIT_FSIZE, (50, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
file = RotatedFile(Path(sys.argv[1]), None, 0)
for n in range(20):
    try:
        file.append(b'{"n":%d}\\n' % n)
    except OSError:
        print(n)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.getrlimit(resource.RLIMIT_FSIZE)[1],) * 2)
file.append(b'{"n":99}\\n')
"""


def test_a_disk_that_is_full_in_mid_line_leaves_no_half_of_it(tmp_path: Path) -> None:
    """The kernel takes 50 bytes: six lines and a part of the seventh."""
    path = tmp_path / "log.jsonl"
    run = subprocess.run([sys.executable, "-c", FILLED, str(path)], capture_output=True, text=True, check=True)
    assert [int(n) for n in run.stdout.split()] == [*range(6, 20)]
    assert numbers(path) == [0, 1, 2, 3, 4, 5, 99]


def test_a_folder_that_vanishes_costs_lines_until_it_is_back(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    file = RotatedFile(folder / "log.jsonl", 1000, 2)
    file.append(b'{"n":1}\n')
    (folder / "log.jsonl").unlink()
    folder.rmdir()
    with pytest.raises(FileNotFoundError):
        file.append(b'{"n":2}\n')
    folder.mkdir()
    file.append(b'{"n":3}\n')
    file.close()
    assert numbers(folder / "log.jsonl") == [3]


def test_a_file_that_another_program_moved_is_let_go(tmp_path: Path) -> None:
    file = RotatedFile(tmp_path / "log.jsonl", None, 0)
    file.append(b'{"n":1}\n')
    (tmp_path / "log.jsonl").rename(tmp_path / "elsewhere")
    file.append(b'{"n":2}\n')
    file.close()
    assert (numbers(tmp_path / "elsewhere"), numbers(tmp_path / "log.jsonl")) == ([1], [2])


def test_a_disk_that_hangs_is_not_waited_for_and_memory_is_bounded(tmp_path: Path) -> None:
    """A pipe that nobody reads takes 64 KiB, then blocks its writer for good."""
    os.mkfifo(tmp_path / "log.jsonl")
    reader = os.open(tmp_path / "log.jsonl", os.O_RDONLY | os.O_NONBLOCK)
    log = StepLog(tmp_path / "log.jsonl")
    written_lines = 3000
    for n in range(written_lines):
        log.write(n=n, text="x" * 1000)
    assert 0 < log.lost <= written_lines - WAITING
    assert log._lines.qsize() <= WAITING
    while log._thread.is_alive():  # let the thread go
        try:
            os.read(reader, 1 << 16)
        except BlockingIOError:
            log._lines.put(None)
    os.close(reader)


def test_what_is_no_json_costs_its_line_only(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "log.jsonl")
    log.write(n=1)
    log.write(n={2})
    log.write(n=3)
    log.close()
    assert (numbers(tmp_path / "log.jsonl"), log.lost) == ([1, 3], 1)


def test_each_engine_has_a_file_and_texts_are_private(tmp_path: Path) -> None:
    for engine in range(3):
        log = open_log(Settings(policy="none", profile="p", log=str(tmp_path / "a"), log_prompts=engine == 2), engine)
        assert log is not None
        log.write(n=engine)
        log.close()
    assert [numbers(tmp_path / name) for name in ("a", "a.dp1", "a.dp2")] == [[0], [1], [2]]
    assert (tmp_path / "a.dp2").stat().st_mode & 0o777 == 0o600
    assert open_log(Settings(policy="none", profile="p"), 0) is None


def test_a_file_that_cannot_be_made_private_gets_no_texts() -> None:
    """As another user's file that all may write to: the kernel lets nobody change the mode of this one."""
    path, descriptors = Path("/proc/self/comm"), Path("/proc/self/fd")
    before = path.read_text(), [*descriptors.iterdir()]
    file = RotatedFile(path, None, 0, 0o600)
    for n in range(2):
        with pytest.raises(PermissionError):
            file.append(b'{"n":%d}\n' % n)
    assert (path.read_text(), [*descriptors.iterdir()]) == before


@pytest.mark.parametrize("kind", ["device", "pipe", "folder", "link to a device"])
def test_only_a_regular_file_can_be_a_log(tmp_path: Path, kind: str) -> None:
    path = {"device": Path("/dev/null"), "folder": tmp_path}.get(kind, tmp_path / "log.jsonl")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link to a device":
        path.symlink_to("/dev/null")
    parser = argparse.ArgumentParser()
    log_flags.add(parser)
    with pytest.raises(UsageError, match=f"--faser-log is '{path}'; allowed: a regular file, or a new one"):
        log_flags.settings(parser.parse_args(["--faser-log", str(path)]))
