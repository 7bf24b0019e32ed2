"""Repairs of vLLM are needed, and work."""

import torch
from vllm.platforms import current_platform
from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

from faser.serving import compat


def test_a_batch_is_expanded_to_its_drafted_tokens() -> None:
    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()
    compat.repair_cpu_kernels()
    ends = torch.tensor([1, 3, 3, 5], dtype=torch.int32)  # 1, 2, 0 and 2 drafted tokens
    temperature = expand_batch_to_tokens(torch.tensor([0.5, 0.0, 0.7, 0.9]), ends, 5, replace_from=0, replace_to=1)
    assert temperature.tolist() == torch.tensor([0.5, 1.0, 1.0, 0.9, 0.9]).tolist()
    top_k = expand_batch_to_tokens(torch.tensor([5, 6, 7, 8], dtype=torch.int32), ends, 5)
    assert top_k.tolist() == [5, 6, 6, 8, 8]
