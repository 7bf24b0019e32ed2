"""The vLLM side: the only package of FASER that imports vllm, through its extension points (scheduler and worker classes)."""
