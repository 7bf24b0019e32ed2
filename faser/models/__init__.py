"""Model names: what `smollm2` or a path means, and the embedded SmolLM2 made ready for vLLM.

`resolve` only looks names up; `prepare` also makes sure that an embedded model is in the cache. Neither imports torch,
transformers or vllm: the embedded models are turned into Hugging Face directories with numpy alone.
"""

from faser.models.cache import default_cache
from faser.models.names import directory_of, known_models, measured, prepare, resolve, short_name
from faser.models.pair import ModelError, Pair

__all__ = [
    "ModelError",
    "Pair",
    "default_cache",
    "directory_of",
    "known_models",
    "measured",
    "prepare",
    "resolve",
    "short_name",
]
