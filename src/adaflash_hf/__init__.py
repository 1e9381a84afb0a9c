"""Faster `generate()` without a different output: AdaFlash drafters for Hugging Face transformers."""

from __future__ import annotations

from transformers import AutoConfig, AutoModel

from .configuration_adaflash import AdaFlashConfig
from .modeling_adaflash import AdaFlashDraftModel, AdaFlashDraftOutput, AdaFlashPreTrainedModel

__version__ = "0.1.0.dev0"

AutoConfig.register("adaflash", AdaFlashConfig, exist_ok=True)
AutoModel.register(AdaFlashConfig, AdaFlashDraftModel, exist_ok=True)

__all__ = ["AdaFlashConfig", "AdaFlashDraftModel", "AdaFlashDraftOutput", "AdaFlashPreTrainedModel"]
