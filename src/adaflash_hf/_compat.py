"""What differs between the supported transformers versions, in one place."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

from packaging.version import Version
from transformers import GenerationMixin, PreTrainedModel
from transformers import __version__ as transformers_version

SUPPORTED = "5.17 to 5.24"
# Before, transformers' assisted loop runs on past an EOS accepted inside a block (fixed in #48981).
LOOP_ENDS_AT_EOS = Version(Version(transformers_version).base_version) >= Version("5.18")
_SEAMS = ("_get_candidate_generator", "_assisted_decoding", "_validate_generation_mode")


def check_seams() -> None:
    """Fails at import, with the versions that work, where a release has moved what this package builds on.

    Raises:
        ImportError: A method or parameter is missing from the installed transformers.
    """
    missing = [name for name in _SEAMS if not hasattr(GenerationMixin, name)]
    if not missing:
        parameters = inspect.signature(GenerationMixin._assisted_decoding).parameters
        wanted = ("input_ids", "logits_processor", "stopping_criteria", "generation_config", "assistant_model")
        missing = [f"_assisted_decoding({name}=)" for name in wanted if name not in parameters]
    if missing:
        raise ImportError(
            f"adaflash_hf supports transformers {SUPPORTED}, and the installed {transformers_version} has moved "
            f"{', '.join(missing)} of GenerationMixin. Install a supported version: pip install 'transformers>=5.17,<5.25'."
        )


@cache
def _accepts_cache(forward: Any) -> bool:
    return "cache" in inspect.signature(inspect.unwrap(forward)).parameters


def cache_argument(model: PreTrainedModel) -> str:
    """The forward argument that takes a cache: `cache` from transformers 5.24, `past_key_values` before."""
    return "cache" if _accepts_cache(type(model).forward) else "past_key_values"


def pop_cache(model_kwargs: dict[str, Any]) -> Any:
    """Takes the cache out of `model_kwargs`, under either name."""
    found = None
    for name in ("cache", "past_key_values"):
        value = model_kwargs.pop(name, None)
        found = value if value is not None else found
    return found


def cache_output(cache: Any) -> dict[str, Any]:
    """The keyword under which generation outputs carry the cache."""
    from transformers.generation.utils import GenerateDecoderOnlyOutput

    fields = GenerateDecoderOnlyOutput.__dataclass_fields__
    return {"cache" if "cache" in fields else "past_key_values": cache}
