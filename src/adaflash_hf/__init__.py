"""Faster `generate()` without a different output: AdaFlash drafters for Hugging Face transformers."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, AutoModel

from .configuration_adaflash import AdaFlashConfig
from .draft_settings import DraftSettings
from .generation.dispatch import adaflash_generate, disable, enable
from .generation.stats import DraftStats
from .linear_packing import packed_linears
from .modeling_adaflash import AdaFlashDraftModel, AdaFlashDraftOutput, AdaFlashPreTrainedModel

__version__ = "0.1.0.dev0"

AutoConfig.register("adaflash", AdaFlashConfig, exist_ok=True)
AutoModel.register(AdaFlashConfig, AdaFlashDraftModel, exist_ok=True)
enable()

_LAZY = {"OPDConfig": "training", "OPDTrainer": "training", "measure_verify_cost": "evaluation.cost"}


def __getattr__(name: str) -> Any:
    # Training pulls in Trainer and accelerate, which decoding does not need.
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "AdaFlashConfig",
    "AdaFlashDraftModel",
    "AdaFlashDraftOutput",
    "AdaFlashPreTrainedModel",
    "DraftSettings",
    "DraftStats",
    "OPDConfig",
    "OPDTrainer",
    "adaflash_generate",
    "disable",
    "enable",
    "measure_verify_cost",
    "packed_linears",
]
