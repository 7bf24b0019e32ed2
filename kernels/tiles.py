"""A row of logits, tile by tile, in Triton: how large a tile is, and its largest logit as torch.argmax has it.

A GPU's maximum of floats passes over NaN, and Triton's interpreter is not of one mind about it. Integers have one order
everywhere, and a warp reduces them in one instruction: so logits are compared as integers.
"""

from __future__ import annotations

import triton
import triton.language as tl

LEAST = tl.constexpr(-2139095041)
"""`rank` of -inf, the lowest there is."""
LOWEST = tl.constexpr(-3.4028234663852886e38)
"""The least finite float32: a maximum that starts here never has -inf taken from -inf."""


def tile(vocabulary: int) -> dict[str, int]:
    """How a kernel of programs that read a row each is launched: BLOCK logits at once, 16 a thread.

    With 64 registers a thread, a multiprocessor has room for two programs, and one reads while the other computes.
    """
    block = min(8192, triton.next_power_of_2(vocabulary))
    return {"BLOCK": block, "num_warps": max(1, block // 512), "maxnreg": 64}


@triton.jit
def rank(z):
    """int32 of float32 z: larger where torch.argmax prefers, NaN above +inf, and equal where it takes the first."""
    bits = z.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(z != z, 0x7FFFFFFF, tl.where(z == 0.0, 0, ordered))


@triton.jit
def unrank(ranked):
    """The float32 z that has this rank."""
    return tl.where(ranked < 0, ranked ^ 0x7FFFFFFF, ranked).to(tl.float32, bitcast=True)
