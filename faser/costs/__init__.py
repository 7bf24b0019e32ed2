"""What a step costs: a few measured curves per (GPU, target, draft), as a small JSON file that anyone can read.

    device ms = verify(rows) + request(batch) + logits_ms * rows with logits
                + (context_ms + attend_ms * drafted tokens per request) * context tokens
                + [depth > 0] * sync(rows) + depth * draft(batch)
    host ms   = host_ms + depth * launch_ms
    step ms   = the larger of the two

rows are all the target's rows of the step: 1 + length for a decoding request, and every prompt token being prefilled;
these need no logits. `request` is what as many rows of more requests cost more, in attention and on the host. Attention
reads a request's context once (`context_ms`), or, where it is computing that takes time, for each of its rows
(`attend_ms`). `sync` is the draft's own pass over those rows, which its KV cache needs before it drafts; `draft` is one
more token for every request. The host prepares a step and launches its draft steps one by one while the GPU verifies:
few draft steps hide behind that, many do not. Curves are piecewise linear between measured points and go on with their
last slope.
"""

from faser.costs.step_cost import Curve, StepCost, known_profiles, load_profile

__all__ = ["Curve", "StepCost", "known_profiles", "load_profile"]
