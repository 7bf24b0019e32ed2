"""What a step's output has with it under asynchronous scheduling: the confidences of what was drafted at its end."""

from __future__ import annotations

import torch
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput


class WithConfidence(AsyncModelRunnerOutput):
    """`output` with the attribute `faser_confidence`, [B, depth] float32, once both are on the host."""

    def __init__(self, output: AsyncModelRunnerOutput, confidence: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """confidence: on the device. stream: the one that copies outputs, beside what the device computes."""
        self._output = output
        self._on_device = confidence  # its memory may not be used again before it is copied
        self._ready = torch.cuda.Event(blocking=True)
        computing = torch.cuda.current_stream()
        with torch.cuda.stream(stream):
            stream.wait_stream(computing)
            self._confidence = confidence.to("cpu", non_blocking=True)
            self._ready.record()

    def get_output(self) -> ModelRunnerOutput:
        """Waits for both."""
        self._ready.synchronize()  # the later of the two
        output = self._output.get_output()
        del self._on_device
        output.faser_confidence = self._confidence.numpy()  # type: ignore[attr-defined]  # rides along
        return output
