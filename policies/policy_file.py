"""The policy file: one small `.pt` that holds a learned policy, its action table and where it came from.

It is `torch.save` of a plain dict, read with `weights_only=True`. A server may be handed a file that it did not
make, so the decision here is to trust nothing: sizes are checked before anything is read, the pickle's instructions
before any is followed (what torch thinks safe to call can still take all memory), every name, shape and dtype before
anything is used; and whatever is wrong ends in one `PolicyFileError` line. torch is imported only to read and write.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickletools
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from faser.core import LOAD_FEATURES, MAX_DEPTH, MAX_FRONTIER, REQUEST_FEATURES, Floats

FORMAT, VERSION, KIND = "faser-policy", 1, "learned"
MAX_BYTES = 16 * 2**20
"""Largest file, and largest sum of its uncompressed parts; a policy of 32 hidden units takes about 50 kB."""
MAX_HIDDEN = 1024
MAX_NODES = 20_000
"""Most values in the descriptive part, so that a small file cannot unfold into an endless one."""
MAX_PARTS = 100
"""Most parts of the zip; ours has 29."""
CALLS = frozenset(
    ["torch._utils _rebuild_tensor_v2", "collections OrderedDict"]
    + [f"torch {kind}Storage" for kind in ("Float", "Double", "Half", "BFloat16")]
)
"""What a pickle may name: plain tensors, those of a wrong type too, so that the message can say which."""
OPCODES = frozenset({
    "PROTO", "STOP", "MARK", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET", "NONE", "NEWTRUE", "NEWFALSE", "BININT",
    "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "TUPLE",
    "TUPLE1", "TUPLE2", "TUPLE3", "APPEND", "APPENDS", "SETITEM", "SETITEMS", "GLOBAL", "REDUCE", "BINPERSID",
})  # fmt: skip
"""Instructions that plain data and tensors need."""
MAX_OPCODES = 5 * MAX_NODES


class PolicyFileError(ValueError):
    """A policy file that is refused; the message is one line."""


def array_shapes(hidden: int) -> dict[str, tuple[int, ...]]:
    """Name -> shape of each layer array for `hidden` units H; `policies.learned` says how they are used."""
    f, load, k, w, h = len(REQUEST_FEATURES), len(LOAD_FEATURES), MAX_DEPTH + 1, MAX_FRONTIER + 1, hidden
    return {
        "request_weight": (f, h), "request_load": (load, h), "request_bias": (h,),
        "mix_weight": (h, h), "mix_context": (h, h), "mix_bias": (h,),
        "length_weight": (h, k), "length_skip": (f, k), "length_load": (load, k), "length_bias": (k,),
        "batch_weight": (h, h), "batch_mean": (f, h), "batch_load": (load, h), "batch_bias": (h,),
        "depth_weight": (h, k), "depth_bias": (k,), "depth_load": (load, k),
        "frontier_weight": (h, w), "frontier_bias": (w,),
    }  # fmt: skip


NORMALISER_SHAPES: dict[str, tuple[int, ...]] = {
    "request_mean": (len(REQUEST_FEATURES),),
    "request_scale": (len(REQUEST_FEATURES),),
    "load_mean": (len(LOAD_FEATURES),),
    "load_scale": (len(LOAD_FEATURES),),
}


def identity_normaliser() -> dict[str, Floats]:
    """Mean 0 and scale 1: features are already in [0, 1]."""
    return {
        name: (np.ones if name.endswith("scale") else np.zeros)(shape, np.float32)
        for name, shape in NORMALISER_SHAPES.items()
    }


def features_hash() -> str:
    """sha256 of this version's observation feature names, in order."""
    return hashlib.sha256("\n".join([*REQUEST_FEATURES, "|", *LOAD_FEATURES]).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFile:
    """What a policy file holds. `arrays` as in `array_shapes`, `normaliser` as in NORMALISER_SHAPES, all float32.

    training: command, models, seed, timesteps and so on; versions: package -> version; commit: of git, or "";
    evaluation: rows of {"model", "load", policy name: time in system over that of `none`}.
    """

    arrays: dict[str, Floats]
    normaliser: dict[str, Floats] = field(default_factory=identity_normaliser)
    max_depth: int = MAX_DEPTH
    max_frontier: int = 0
    training: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    commit: str = ""
    evaluation: list[dict[str, Any]] = field(default_factory=list)


def save(policy: PolicyFile, path: Path | str) -> None:
    """Write `policy` to `path`, all or nothing. OSError from the disk; PolicyFileError if it would not load."""
    import torch

    def tensors(arrays: Mapping[str, Floats]) -> dict[str, torch.Tensor]:
        return {k: torch.from_numpy(np.ascontiguousarray(v, np.float32)) for k, v in arrays.items()}

    content = {
        "format": FORMAT,
        "version": VERSION,
        "kind": KIND,
        "actions": {"max_depth": policy.max_depth, "max_frontier": policy.max_frontier},
        "observation": {
            "requests": list(REQUEST_FEATURES),
            "load": list(LOAD_FEATURES),
            "sha256": features_hash(),
        },
        "normaliser": tensors(policy.normaliser),
        "arrays": tensors(policy.arrays),
        "training": policy.training,
        "versions": policy.versions,
        "commit": policy.commit,
        "evaluation": policy.evaluation,
    }
    buffer = io.BytesIO()
    torch.save(content, buffer)
    parse(buffer.getvalue(), str(path))
    write_atomically(Path(path), buffer.getvalue())


def write_atomically(path: Path, data: bytes) -> None:
    """Put `data` at `path` so that a reader, or a crash, sees the old file or the new one and never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def load(path: Path | str) -> PolicyFile:
    """The policy in the file at `path`, checked. PolicyFileError otherwise; nothing in the file is ever executed."""
    path = Path(path)
    if not path.is_file():
        raise PolicyFileError(f"policy {path}: {'not a file' if path.exists() else 'no such file'}")
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise PolicyFileError(f"policy {path}: {error.strerror}") from None
    return parse(data, str(path))


def parse(data: bytes, name: str) -> PolicyFile:
    """The policy in the bytes of a file, `name` in messages; see `load`."""
    try:
        return _policy(_unpickle(_checked(data)))
    except PolicyFileError as error:
        raise PolicyFileError(f"policy {name}: {error}") from None
    except Exception as error:
        # Damaged or hostile bytes can raise nearly anything; all of it means the same to a user.
        reason = "".join(filter(str.isprintable, " ".join(str(error).split(".")[0].split())))[:160]
        raise PolicyFileError(f"policy {name}: not a policy file ({type(error).__name__}: {reason})") from None


def _checked(data: bytes) -> bytes:
    """The file put together anew of its checked parts: torch finds parts in its own way, and must find these."""
    if not data:
        raise PolicyFileError("the file is empty")
    if len(data) > MAX_BYTES:
        raise PolicyFileError(f"the file is larger than {MAX_BYTES} bytes, the most that is allowed")
    if data.count(b"PK\1\2") > MAX_PARTS:  # before a list is made of them
        raise PolicyFileError(f"has more than {MAX_PARTS} parts")
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
        entries = archive.infolist()
    except (zipfile.BadZipFile, ValueError, OverflowError, NotImplementedError):
        raise PolicyFileError("not a policy file (no complete zip: truncated, or another format)") from None
    if len({entry.filename.lower() for entry in entries}) < len(entries):  # torch finds parts in any case
        raise PolicyFileError("two of its parts have one name")
    unpacked = sum(entry.file_size for entry in entries)
    if unpacked > MAX_BYTES or any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise PolicyFileError(
            f"unpacks to {unpacked} bytes; allowed: {MAX_BYTES} at most, and only stored parts (no compression)"
        )
    anew = io.BytesIO()
    with zipfile.ZipFile(anew, "w", zipfile.ZIP_STORED) as out:
        for entry in entries:
            try:
                part = archive.read(entry)
            except (zipfile.BadZipFile, ValueError, OverflowError, NotImplementedError, RuntimeError, EOFError):
                raise PolicyFileError(f"damaged (checksum of {_short(entry.filename)} is wrong)") from None
            if entry.filename.lower().endswith(".pkl"):
                _check_pickle(part)
            out.writestr(zipfile.ZipInfo(entry.filename), part)
    return anew.getvalue()


def _check_pickle(pickle: bytes) -> None:
    """Refuse instructions that no file of ours has, and more of them than it could need."""
    for count, (opcode, argument, _) in enumerate(pickletools.genops(pickle)):
        if count > MAX_OPCODES:
            raise PolicyFileError(f"its pickle has more than {MAX_OPCODES} instructions")
        if opcode.name not in OPCODES:
            raise PolicyFileError(f"not a policy file ({opcode.name} in its pickle)")
        if opcode.name == "GLOBAL" and argument not in CALLS:
            raise PolicyFileError(f"not a policy file (its pickle names {_short(argument)})")


def _unpickle(data: bytes) -> dict[str, Any]:
    import torch

    content = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise PolicyFileError(f"not a policy file (no format {FORMAT!r} in it)")
    return content


def _policy(content: dict[str, Any]) -> PolicyFile:
    for key, ours in (("version", VERSION), ("kind", KIND)):
        if type(content.get(key)) is not type(ours) or content.get(key) != ours:
            raise PolicyFileError(f"{key} is {_short(content.get(key))}; this FASER reads {ours!r}")
    _check_features(_of(content, "observation", dict))
    actions = _of(content, "actions", dict)
    for key, most in (("max_depth", MAX_DEPTH), ("max_frontier", MAX_FRONTIER)):
        if type(actions.get(key)) is not int or not 0 <= actions[key] <= most:
            raise PolicyFileError(f"actions: {key} is {_short(actions.get(key))}; allowed: 0 to {most}")
    arrays = _of(content, "arrays", dict)
    bias: list[int] = list(getattr(arrays.get("request_bias"), "shape", ()))
    hidden = bias[0] if len(bias) == 1 and 0 < bias[0] <= MAX_HIDDEN else 32
    normaliser = _arrays(_of(content, "normaliser", dict), NORMALISER_SHAPES, "normaliser")
    if any((normaliser[key] <= 0).any() for key in ("request_scale", "load_scale")):
        raise PolicyFileError("normaliser: a scale is 0 or negative; allowed: over 0")
    described = {
        "training": _of(content, "training", dict),
        "versions": _of(content, "versions", dict),
        "commit": _of(content, "commit", str),
        "evaluation": _of(content, "evaluation", list),
    }
    _check_plain(described)
    return PolicyFile(
        arrays=_arrays(arrays, array_shapes(hidden), "arrays"), normaliser=normaliser, **actions, **described
    )


def _of(content: dict[str, Any], key: str, kind: type) -> Any:
    value = content.get(key)
    if not isinstance(value, kind):
        raise PolicyFileError(
            f"{key} is {'absent' if value is None else type(value).__name__}; {kind.__name__} expected"
        )
    return value


def _check_features(seen: dict[str, Any]) -> None:
    """Refuse another set or order of features: the weights would be read against the wrong columns."""
    for key, ours in (("requests", REQUEST_FEATURES), ("load", LOAD_FEATURES)):
        theirs = _of(seen, key, list)
        if len(theirs) != len(ours):
            raise PolicyFileError(f"observation: {len(theirs)} {key} features in the file, {len(ours)} in this FASER")
        for i, (a, b) in enumerate(zip(theirs, ours, strict=True)):
            if a != b:
                raise PolicyFileError(f"observation: {key}[{i}] is {_short(a)} in the file, {b!r} in this FASER")
    if seen.get("sha256") != features_hash():
        raise PolicyFileError(f"observation: sha256 is {_short(seen.get('sha256'))}, {features_hash()!r} in this FASER")


def _arrays(given: dict[str, Any], shapes: dict[str, tuple[int, ...]], where: str) -> dict[str, Floats]:
    """`given` tensors as float32 arrays, after a check of names, types, shapes (before any copy) and values."""
    import torch

    for names, side in ((given.keys() - shapes.keys(), "the file"), (shapes.keys() - given.keys(), "this FASER")):
        if names:
            raise PolicyFileError(f"{where}: {', '.join(sorted(map(_short, names))[:4])} only in {side}")
    out: dict[str, Floats] = {}
    for name, shape in shapes.items():
        tensor = given[name]
        if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.device.type != "cpu":
            raise PolicyFileError(f"{where}: {name} is {type(tensor).__name__}; a dense tensor expected")
        if tuple(tensor.shape) != shape:
            raise PolicyFileError(f"{where}: {name} has shape {tuple(tensor.shape)}; {shape} expected")
        if tensor.dtype != torch.float32:
            raise PolicyFileError(f"{where}: {name} is {tensor.dtype}; torch.float32 expected")
        out[name] = np.array(tensor.detach().numpy(), np.float32)
        if not np.isfinite(out[name]).all():
            raise PolicyFileError(f"{where}: {name} holds NaN or infinity; finite numbers expected")
    return out


def _check_plain(value: Any) -> None:
    """Refuse anything but nested dicts and lists of str, numbers, bool and None, and more than MAX_NODES of them."""
    todo, seen = [value], 0
    while todo:
        value, seen = todo.pop(), seen + 1
        if seen > MAX_NODES:
            raise PolicyFileError(f"more than {MAX_NODES} values in its description")
        if isinstance(value, dict):
            todo += [*value.keys(), *value.values()]
        elif isinstance(value, list):
            todo += value
        elif value is not None and type(value) not in (str, int, float, bool):
            raise PolicyFileError(
                f"a {type(value).__name__} in its description; str, numbers, lists and dicts expected"
            )


def _short(value: Any) -> str:
    """A value for a message: bounded, on one line, and never the repr of something nested."""
    if isinstance(value, int) and abs(value) >= 1 << 64:  # Python refuses to print very long ones
        return "a huge int"
    if value is None or isinstance(value, str | int | float):
        return ascii(value)[:80]
    return f"a {type(value).__name__}"
