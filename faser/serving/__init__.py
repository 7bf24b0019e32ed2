"""The vLLM side, through vLLM's scheduler and worker classes. The only package of FASER that imports vllm."""
