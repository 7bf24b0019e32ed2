"""Who may import whom; and what stays out of a process."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("faser", "envs", "policies", "kernels", "train")
SOURCES = [p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py")]

ALLOWED = {("train", "serving"): {"train/draft.py"}, ("envs", "serving"): {"envs/live_engines.py"}}
"""A draft is distilled from what the target writes, and vLLM writes it; the live environment has an engine."""


def imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def importers(package: str) -> set[str]:
    return {
        path.relative_to(ROOT).as_posix()
        for path in SOURCES
        if any(name == package or name.startswith(package + ".") for name in imports(path))
    }


def test_only_train_imports_stable_baselines3() -> None:
    assert importers("stable_baselines3")
    assert all(path.startswith("train/") for path in importers("stable_baselines3"))


def test_only_serving_imports_vllm() -> None:
    assert importers("vllm")
    assert all(path.startswith("faser/serving/") for path in importers("vllm"))


@pytest.mark.parametrize(
    ("folder", "may_not"),
    [
        ("kernels", ["policies", "envs", "train", "serving"]),
        ("policies", ["envs", "train", "serving"]),
        ("envs", ["train", "serving"]),
        ("train", ["serving"]),
        ("faser/serving", ["train", "envs"]),
    ],
)
def test_imports_go_one_way(folder: str, may_not: list[str]) -> None:
    for package in may_not:
        found = importers(f"faser.{package}") - ALLOWED.get((folder, package), set())
        assert not [p for p in found if p.startswith(folder + "/")]


def modules_after(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint(*sorted({{m.partition('.')[0] for m in sys.modules}}))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def test_import_faser_pulls_in_neither_torch_nor_vllm() -> None:
    loaded = modules_after("import faser, faser.cli, faser.controller, faser.policies, faser.models")
    assert "numpy" in loaded
    assert not loaded & {"torch", "vllm", "transformers", "gymnasium", "stable_baselines3"}


def test_serving_imports_neither_stable_baselines3_nor_train() -> None:
    script = "import faser.serving.scheduler, faser.serving.worker, faser.serving.serve"
    script += "\nassert not [m for m in sys.modules if m.startswith(('faser.train', 'faser.envs'))]"
    assert not modules_after(script) & {"stable_baselines3", "gymnasium"}


def test_the_live_environment_needs_no_vllm_in_its_own_process() -> None:
    loaded = modules_after("import faser.envs.live, faser.envs.live_engines, faser.serving.stepwise")
    assert "gymnasium" in loaded
    assert not loaded & {"torch", "vllm", "transformers"}
