"""Weights of linear layers packed once for CPU inference.

MKL's float32 products are slow for 2 to 16 rows on many processors, which is exactly what verifying a draft is. oneDNN
with a weight reordered ahead of time is not, and it gives each row the same bits whatever the number of rows. The same
kernel is what `torch.compile` with inductor's freezing calls; that route recompiles for the ever-changing shapes of a
decoding loop, hence the operator itself here, behind a check that it exists.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

logger = logging.get_logger(__name__)
_PACK_ROWS = 16  # the batch the layout is chosen for; any number of rows works


def packing_available() -> bool:
    """Whether this build of torch can pack linear weights for the CPU."""
    if not torch.backends.mkldnn.is_available():
        return False
    try:
        weight = torch.randn(8, 8)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS)
        found = torch.ops.mkldnn._linear_pointwise(torch.eye(8), packed, None, "none", [], "")
        return torch.allclose(found, weight.t(), atol=1e-5)
    except (AttributeError, RuntimeError, TypeError):
        return False


def is_packed(module: nn.Module) -> bool:
    """Whether a linear layer is packed right now."""
    return "_adaflash_original_forward" in module.__dict__


def pack_linear(layer: nn.Linear) -> None:
    """Replaces the forward of one layer by the packed product; [`unpack_linear`] puts it back."""
    packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), _PACK_ROWS)
    dtype, bias = layer.weight.dtype, layer.bias.detach() if layer.bias is not None else None

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(inputs.to(dtype), packed, bias, "none", [], "")

    layer.__dict__["_adaflash_original_forward"] = layer.__dict__.get("forward")
    layer.forward = forward


def unpack_linear(layer: nn.Linear) -> None:
    """Undoes [`pack_linear`]."""
    original = layer.__dict__.pop("_adaflash_original_forward")
    if original is None:
        del layer.forward
    else:
        layer.forward = original


class packed_linears:
    """Packs the linear layers of models for CPU inference until [`restore`] or the end of a `with` block.

    Costs a second copy of the packed weights. Opt in: `generate()` never does this by itself. Weights must not change
    while they are packed (no training).

    Args:
        models: Models whose `nn.Linear` layers on the CPU are packed; a model that shares layers with another, or is
            packed already, is fine.

    Example:
        ```python
        with packed_linears(target, drafter):
            target.generate(**inputs, assistant_model=drafter)
        ```
    """

    def __init__(self, *models: nn.Module) -> None:
        self.layers: list[nn.Linear] = []
        if not packing_available():
            logger.warning(
                "packed_linears: this build of torch has no packed linear product for the CPU (oneDNN), so nothing is "
                "packed. Decoding stays correct and is slower."
            )
            return
        refused = set()
        for model in models:
            for module in model.modules():
                if type(module) is nn.Linear and module.weight.device.type == "cpu" and not is_packed(module):
                    try:
                        pack_linear(module)
                    except RuntimeError:
                        refused.add(str(module.weight.dtype))
                    else:
                        self.layers.append(module)
        if refused:
            logger.warning(
                f"packed_linears: this CPU has no packed linear product for {sorted(refused)}, so layers of that dtype are "
                "left as they are."
            )

    def restore(self) -> None:
        """Puts every layer back as it was."""
        while self.layers:
            unpack_linear(self.layers.pop())

    def __enter__(self) -> packed_linears:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()


def packed_like(layer: nn.Linear, source: Any) -> nn.Linear:
    """Packs `layer` if `source` is packed."""
    if is_packed(source) and not is_packed(layer):
        pack_linear(layer)
    return layer
