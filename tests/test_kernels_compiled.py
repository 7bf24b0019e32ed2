"""The kernels compile for an H200, on a machine without one, and without spilling registers."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from faser.kernels.confidence.triton import _confidence
from faser.kernels.tiles import tile
from faser.kernels.verify.triton import _verify

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="TRITON_INTERPRET is set")

LOGITS = {"bfloat16": "*bf16", "float32": "*fp32"}
ROWS = {"stride": "i32", "V": "i32"}
CONFIDENCE = {"tokens": "*i64", **dict.fromkeys(("probability", "entropy", "margin"), "*fp32")}
VERIFY = {
    **dict.fromkeys(("drafts", "ends", "drawn", "arrivals", "tokens", "accepted", "bonus"), "*i32"),
    "temperature": "*fp32",
    "uniform": "*fp64",
    "longest": "i32",
}


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any], vocabulary: int, tmp_path: Path) -> str:
    """What cuobjdump says that the kernel needs. types: of arguments that are not `constants`."""
    options = tile(vocabulary)
    constants = {**constants, "BLOCK": options.pop("BLOCK")}
    if vocabulary == 1:  # as Triton does for the integer 1
        constants["V"] = 1
    names = list(kernel.arg_names)
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name] != "constexpr" and name != "longest"
    }
    binary = triton.compile(ASTSource(kernel, signature, constants, aligned), GPUTarget("cuda", 90, 32), options)
    file = tmp_path / "kernel.cubin"
    file.write_bytes(binary.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True).stdout


def check(needs: str) -> None:
    registers, stack = map(int, re.findall(r"(?:REG|STACK):(\d+)", needs))
    assert registers <= 64
    assert stack <= 16


@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize(("dtype", "vocabulary"), [("bfloat16", 128256), ("float32", 1000), ("bfloat16", 1)])
def test_confidence_compiles(dtype: str, vocabulary: int, more: bool, tmp_path: Path) -> None:
    types = {"logits": LOGITS[dtype], **ROWS, **CONFIDENCE}
    check(compiled(_confidence, types, {"MORE": more}, vocabulary, tmp_path))


@pytest.mark.parametrize("one_hot", [False, True])
@pytest.mark.parametrize(("dtype", "vocabulary"), [("bfloat16", 128256), ("float32", 1000), ("bfloat16", 1)])
def test_verify_compiles(dtype: str, vocabulary: int, one_hot: bool, tmp_path: Path) -> None:
    probabilities = LOGITS[dtype] if one_hot else "*fp32"
    types = {"logits": LOGITS[dtype], "draft_probs": probabilities, **ROWS, **VERIFY}
    check(compiled(_verify, types, {"COLUMNS": 8, "ONE_HOT": one_hot}, vocabulary, tmp_path))
