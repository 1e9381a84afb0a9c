"""Reading a target's hidden states at the drafter's tapped layers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


def decoder_layers(target: PreTrainedModel) -> nn.ModuleList:
    """The target's decoder layers, wherever its class keeps them.

    Raises:
        ValueError: No list of layers of the configured length is found.
    """
    count = getattr(target.config.get_text_config(), "num_hidden_layers", None)
    decoder = target.get_decoder() if hasattr(target, "get_decoder") else target
    for root in (decoder, target):
        for name in ("layers", "h", "blocks"):
            layers = getattr(root, name, None)
            if isinstance(layers, nn.ModuleList) and len(layers) == count:
                return layers
    found = [m for m in target.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if not found:
        raise ValueError(f"target={type(target).__name__}: no list of {count} decoder layers was found to read from.")
    return found[0]


class TapRecorder:
    """Context manager that keeps the outputs of the tapped layers of each target forward made inside it.

    Forward hooks are used since they work the same on every transformers version and architecture. A tap on the last
    layer reads the state *after* the final norm, as `hidden_states[-1]` of transformers does and as the published
    drafters were trained. Forwards that other threads make with the same target are not seen.

    Args:
        target: The model to read from.
        layer_ids: Layers whose outputs are kept.

    Raises:
        ValueError: A layer id is outside the target.
    """

    def __init__(self, target: PreTrainedModel, layer_ids: Sequence[int]) -> None:
        layers = decoder_layers(target)
        for layer_id in layer_ids:
            if not 0 <= layer_id < len(layers):
                raise ValueError(
                    f"target_layer_ids={list(layer_ids)} of the drafter does not fit target={type(target).__name__}: "
                    f"{layer_id} is outside [0, {len(layers) - 1}]."
                )
        self.layer_ids = list(layer_ids)
        self._name = type(target).__name__
        self._thread = threading.get_ident()
        self._modules = [
            layers[layer_id] if layer_id < len(layers) - 1 else _final_norm(target, layers) for layer_id in layer_ids
        ]
        self._states: list[torch.Tensor | None] = [None] * len(layer_ids)
        self._handles: list[Any] = []

    def __enter__(self) -> TapRecorder:
        self._handles = [module.register_forward_hook(self._hook(index)) for index, module in enumerate(self._modules)]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._states = [None] * len(self.layer_ids)

    def _hook(self, index: int) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if threading.get_ident() == self._thread:
                self._states[index] = output[0] if isinstance(output, tuple) else output

        return hook

    def take(self, length: int | None = None, device: torch.device | None = None) -> torch.Tensor:
        """The last forward's taps `[batch, length, taps * hidden]`, first `length` positions only; then forgets them.

        Raises:
            RuntimeError: The target has not run since the last call.
            ValueError: A tapped layer's output is not a hidden state (models that carry several streams).
        """
        if any(state is None for state in self._states):
            raise RuntimeError("The target's tapped layers have not run since the taps were last taken.")
        for layer_id, state in zip(self.layer_ids, self._states, strict=True):
            if state.ndim != 3:
                raise ValueError(
                    f"target={self._name} cannot be drafted for: layer {layer_id} puts out {list(state.shape)} instead of "
                    "[batch, length, hidden]."
                )
        states = [state[:, :length].to(device) for state in self._states]
        self._states = [None] * len(self.layer_ids)
        return torch.cat(states, dim=-1)


def _final_norm(target: PreTrainedModel, layers: nn.ModuleList) -> nn.Module:
    """The module whose output is the target's last hidden state: its decoder's final norm."""
    decoder = target.get_decoder() if hasattr(target, "get_decoder") else target
    for name in ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f"):
        module = getattr(decoder, name, None)
        if isinstance(module, nn.Module):
            return module
    return layers[-1]
