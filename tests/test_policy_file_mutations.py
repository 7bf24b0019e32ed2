"""10,000 damaged and hostile policy files: each is refused in one line, or loads to a policy that decides.

They are tried in a process of their own, where any execution, import or write is noted, and whose memory is measured.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import pickletools
import struct
import subprocess
import sys
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

FILES, MEMORY_MB = 10_000, 256
Rng = np.random.Generator
Parts = dict[str, bytes]


def packed(parts: Parts, how: int = zipfile.ZIP_STORED) -> bytes:
    """A zip of `parts` with right checksums."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", how) as out:
        for name, data in parts.items():
            out.writestr(zipfile.ZipInfo(name), data, compress_type=how)
    return buffer.getvalue()


def unpacked(data: bytes) -> Parts:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


PICKLE = "archive/data.pkl"


def flipped(rng: Rng, data: bytes) -> bytes:
    """1 to 64 bits of it."""
    out = bytearray(data)
    for at in rng.integers(0, len(data), 1 << int(rng.integers(0, 7))):
        out[at] ^= 1 << int(rng.integers(0, 8))
    return bytes(out)


def truncated(rng: Rng, data: bytes) -> bytes:
    return data[: int(rng.integers(0, len(data)))]


def spliced(rng: Rng, data: bytes) -> bytes:
    """A piece of it removed, doubled, overwritten with one value, or put elsewhere."""
    a, b = sorted(int(n) for n in rng.integers(0, len(data), 2))
    b = min(b, a + 4096)
    piece = data[a:b]
    at = int(rng.integers(0, len(data)))
    options = [data[:a] + data[b:], data[:b] + piece + data[b:]]
    options += [data[:a] + bytes([int(rng.choice([0, 0x7F, 0xFF]))]) * len(piece) + data[b:]]
    options += [data[:at] + piece + data[at:]]
    return options[int(rng.integers(0, len(options)))]


def in_a_part(change: Callable[[Rng, bytes], bytes]) -> Callable[[Rng, bytes], bytes]:
    """`change` to the pickle, or to another part; checksums are right, so that it gets past them."""

    def changed(rng: Rng, data: bytes) -> bytes:
        parts = unpacked(data)
        name = PICKLE if rng.random() < 0.5 else str(rng.choice([n for n, part in parts.items() if part]))
        return packed({**parts, name: change(rng, parts[name])})

    return changed


def other_numbers(rng: Rng, data: bytes) -> bytes:
    """Numbers of the pickle, shapes and sizes among them, become huge, negative or another's."""
    parts = unpacked(data)
    out, end, ops = bytearray(), 0, list(pickletools.genops(parts[PICKLE]))
    chosen = {int(n) for n in rng.integers(0, len(ops), 1 + int(rng.integers(0, 40)))}
    for i, ((op, _, at), following) in enumerate(zip(ops, [*ops[1:], None], strict=True)):
        end = following[2] if following else len(parts[PICKLE])
        assert at is not None
        assert end is not None
        instruction = parts[PICKLE][at:end]
        if i in chosen and op.name in ("BININT1", "BININT2", "BININT"):
            big = int(rng.choice([-1, 0, 1, 7, 2**31 - 1, -(2**31)]))
            instruction = b"J" + struct.pack("<i", big)
            if rng.random() < 0.3:
                instruction = b"\x8a\x09" + ((1 << int(rng.integers(31, 70))) - 1).to_bytes(9, "little")  # LONG1
        elif i in chosen and op.name in ("BINGET", "LONG_BINGET"):
            instruction = b"h" + bytes([int(rng.integers(0, 256))])
        elif i in chosen and op.name == "BINUNICODE":
            text = str(rng.choice(["", "cpu", "meta", "arrays", "0", "\x1b[2J\n", "x" * 5000])).encode()
            instruction = b"X" + struct.pack("<I", len(text)) + text
        out += instruction
    return packed({**parts, PICKLE: bytes(out)})


class Calls:
    """Pickles to a call of `function`."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value, value]
    return value


GIBIBYTE = b"J\x00\x00\x00\x40"
HOSTILE: tuple[bytes, ...] = (
    *(
        pickle.dumps(Calls(function, *arguments), protocol)
        for protocol in (0, 2, 4)
        for function, *arguments in (
            (os.system, "echo executed"), (eval, "print('executed')"), (exec, "import antigravity"),
            (subprocess.call, ["true"]), (open, "executed", "w"), (__import__, "antigravity"), (bytearray, 1 << 30),
            (os._exit, 3), (getattr, "x", "format"), (bytes, 1 << 30), (range, 1 << 60),
        )
    ),
    *(b"\x80\x02" + call + b"." for call in (
        b"cbuiltins\nbytearray\n" + GIBIBYTE + b"\x85R",
        b"ctorch\nTensor\n" + GIBIBYTE + b"\x85R",
        b"ctorch\nFloatStorage\n" + GIBIBYTE + b"\x85R",
        b"ccollections\nCounter\n)R", b"ccollections\nOrderedDict\n)R}X\x03\x00\x00\x00getK\x01sb",  # BUILD
        b"ctorch.serialization\n_get_layout\nX\x01\x00\x00\x00x\x85R", b"ctorch\nload\nX\x01\x00\x00\x00x\x85R",
        b"ctorch.hub\nload\nX\x01\x00\x00\x00x\x85R", b"ios\nsystem\n", b"\x82\x01",
        b"(cos\nsystem\nX\x04\x00\x00\x00trueo",
        b"]" * 300_000, b"(" + b"}" * 300_000 + b"l", b"(" * 200_000 + b"t" * 200_000, b"]" + b"2a" * 200_000,
        b"\x8a\xff" + b"\x7f" * 255, b"\x8b\x00\x00\x10\x00" + b"\x7f" * (1 << 20), b"X\xff\xff\xff\x7fx",
        b"\x95" + b"\xff" * 8,
        b"]r\xff\xff\xff\x7f", b"jj\xff\xff\x7f", b"I" + b"9" * 100_000 + b"\n", b"}" + b"q\x00h\x00h\x00s" * 1000,
    )),
    pickle.dumps(nested(60), 2), pickle.dumps({"format": "faser-policy", "version": 10**6000}, 2),
    pickle.dumps({"format": "faser-policy", "version": nested(9)}, 2), pickle.dumps(pickle.dumps(nested(5)), 2), b"",
)  # fmt: skip


def a_hostile_pickle(rng: Rng, data: bytes) -> bytes:
    """In place of the pickle, alone, or as a part of a good one (behind its first instructions)."""
    evil = HOSTILE[int(rng.integers(0, len(HOSTILE)))]
    parts = unpacked(data)
    choice = int(rng.integers(0, 4))
    if choice == 0:
        return evil
    if choice == 1:
        return packed({**parts, PICKLE: evil})
    if choice == 2:
        return packed({**parts, "archive/DATA.PKL": evil, f"archive/data/{rng.integers(0, 30)}": evil})
    ops = [at for _, _, at in pickletools.genops(parts[PICKLE]) if at]
    at = ops[int(rng.integers(0, len(ops)))]
    body = evil.removeprefix(b"\x80\x02").removesuffix(b".")
    return packed({**parts, PICKLE: parts[PICKLE][:at] + body + parts[PICKLE][at:]})


def a_bomb(rng: Rng, data: bytes) -> bytes:
    """Zips that say other than what they hold, or hold far more than they say."""
    parts = unpacked(data)
    choice = int(rng.integers(0, 6))
    if choice == 0:
        return packed({**parts, PICKLE: b"\0" * int(rng.integers(1 << 20, 20 << 20))}, zipfile.ZIP_DEFLATED)
    if choice == 1:
        return packed({**parts, "archive/more": packed({"inner": b"\0" * (2 << 20)}, zipfile.ZIP_DEFLATED)})
    if choice == 2:
        return packed({**parts, **{f"archive/data/{n}": b"" for n in range(int(rng.integers(80, 3000)))}})
    at, end = data.index(b"PK\1\2"), data.rindex(b"PK\5\6")
    out = bytearray(data)
    if choice == 3:  # sizes, offsets and counts of the directory
        where = int(rng.integers(at, len(data) - 4))
        struct.pack_into("<I", out, where, int(rng.choice([0, 1, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF])))
        return bytes(out)
    if choice == 4:  # every part once more under its name: the one that is checked is not the one that is read
        directory = data[at:end]
        struct.pack_into("<HHI", out, end + 8, 2 * len(parts), 2 * len(parts), 2 * len(directory))
        return bytes(out[:end]) + directory + bytes(out[end:])
    first = data.index(b"PK\3\4")
    struct.pack_into("<I", out, first + 22, int(rng.integers(0, 1 << 32)))  # of a part's own header
    return bytes(out)


KINDS: tuple[Callable[[Rng, bytes], bytes], ...] = (
    flipped, truncated, spliced, in_a_part(flipped), in_a_part(spliced), in_a_part(truncated), other_numbers,
    a_hostile_pickle, a_bomb,
)  # fmt: skip

FORBIDDEN = ("import", "exec", "compile", "os.", "subprocess.", "shutil.", "socket.", "ctypes.", "pty.", "pickle.find")
"""Audit events, by their beginnings; and whatever opens a file to write."""


LATE = ("encodings.cp437", "encodings.raw_unicode_escape")
LATE += ("torch._subclasses.schema_check_mode", "torch.nested._internal.ops")
"""What zipfile, pickletools and torch import on the way to some of their errors."""


def memory_kb(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def tried(files: int, seed: int) -> dict[str, Any]:
    """What became of `files` mutated ones."""
    from faser.checkpoints import SHIPPED_POLICY
    from faser.controller import Controller, ControllerConfig
    from faser.core import LOAD_FEATURES, REQUEST_FEATURES, Capabilities, Observation
    from faser.policies.learned import LearnedPolicy
    from faser.policies.policy_file import PolicyFileError, parse

    rng, good = np.random.default_rng(seed), Path(SHIPPED_POLICY).read_bytes()
    seen = Observation(np.ones((3, len(REQUEST_FEATURES)), np.float32), np.ones(len(LOAD_FEATURES), np.float32))
    first = LearnedPolicy(parse(good, "good"))
    controller = Controller(first, Capabilities(), ControllerConfig(deadline_ms=1000, bench_after=files + 1))
    result: dict[str, Any] = {"events": [], "faults": [], "refused": Counter(), "loaded": Counter()}
    watching = False

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if not watching:
            return
        writes = event == "open" and (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if writes or event.startswith(FORBIDDEN):
            result["events"].append(f"{event} {arguments!r}"[:200])

    def attempt(data: bytes, kind: str) -> None:
        nonlocal watching
        watching = True
        try:
            policy = LearnedPolicy(parse(data, "x.pt"))
        except PolicyFileError as error:
            watching = False
            line = str(error)
            result["refused"][kind] += 1
            if "\n" in line or len(line) > 500 or not line.isprintable():
                result["faults"].append(f"{kind}: {line[:300]!r}")
        except BaseException as error:
            watching = False
            result["faults"].append(f"{kind}: {type(error).__name__}: {error}"[:300])
        else:
            controller.swap(policy, kind)
            decision = controller.decide(seen)
            watching = False
            result["loaded"][kind] += 1
            if not (decision.lengths.shape == (3,) and 0 <= decision.draft_depth <= 7):
                result["faults"].append(f"{kind}: {decision}")

    for name in LATE:
        import_module(name)
    for kind in KINDS:  # and whatever else is imported on first use
        attempt(kind(rng, good), "warm-up")
    attempt(b"", "warm-up")
    for key in ("events", "faults"):
        result[key].clear()
    sys.addaudithook(audit)
    before = memory_kb("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    made = 0
    for n in range(files):
        kind = KINDS[n % len(KINDS)]
        data = kind(rng, good)
        made = max(made, len(data))
        attempt(data, getattr(kind, "__name__", "?") + ("" if n % len(KINDS) < 3 else " part"))
    result["peak_mb"] = (memory_kb("VmHWM") - before) / 1024
    result["policy_faults"] = dict(controller.tally.fallbacks)
    return result


def test_ten_thousand_mutated_files_execute_nothing_crash_nothing_and_take_little(tmp_path: Path) -> None:
    child = [sys.executable, __file__, str(FILES)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(child, capture_output=True, text=True, cwd=tmp_path, env=env)
    assert run.returncode == 0, run.stderr[-2000:]
    result = json.loads(run.stdout)  # nothing else was printed
    assert not result["events"]
    assert not result["faults"]
    assert result["peak_mb"] < MEMORY_MB
    assert sum(result["refused"].values()) > FILES / 2
    assert sum(result["loaded"].values()) > FILES / 50  # some got past every check, and their policies decided
    assert not list(tmp_path.iterdir())


def write_nastiest(folder: Path, count: int) -> None:
    """Some of them as files, for a real server."""
    from faser.checkpoints import SHIPPED_POLICY

    rng, good = np.random.default_rng(1), Path(SHIPPED_POLICY).read_bytes()
    for n in range(count):
        (folder / f"nasty-{n}.pt").write_bytes((a_hostile_pickle, a_bomb, other_numbers)[n % 3](rng, good))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if sys.argv[1].isdecimal():
        print(json.dumps(tried(int(sys.argv[1]), seed=0)))
    else:
        write_nastiest(Path(sys.argv[1]), int(sys.argv[2]))
