"""What the target says about finished sequences: tapped states, final states, argmax and normaliser, kept on disk."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.utils import logging

from ..generation.taps import TapRecorder

logger = logging.get_logger(__name__)


@torch.no_grad()
def target_features(
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    layer_ids: Sequence[int],
    position_ids: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """One target forward over whole sequences.

    Args:
        target: The frozen target.
        input_ids: `[batch, length]`, right padded.
        attention_mask: `[batch, length]`, or `None` without padding.
        layer_ids: Tapped layers.
        position_ids: `[batch, length]` where positions restart, as in packed documents.

    Returns:
        `taps [batch, length, taps * hidden]`; `states [batch, length, hidden]`, what the head was applied to;
        `argmax [batch, length]`, the target's choice *for the token after* each position; `log_normalizers
        [batch, length]`, its logsumexp.
    """
    seen: list[torch.Tensor] = []
    head = target.get_output_embeddings()
    handle = head.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    arguments = {} if position_ids is None else {"position_ids": position_ids}
    try:
        # As decoding runs it, whatever precision the drafter trains in.
        with TapRecorder(target, layer_ids) as taps, torch.autocast(input_ids.device.type, enabled=False):
            logits = target(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **arguments).logits
            tapped = taps.take(device=input_ids.device)
    finally:
        handle.remove()
    argmax = logits.argmax(-1)
    # By rows: a float32 copy of the whole batch's logits would be the largest tensor of a training step.
    normalizers = torch.stack([row.float().logsumexp(-1) for row in logits])
    return {
        "taps": tapped,
        "states": seen[-1].to(input_ids.device),
        "argmax": argmax.to(input_ids.device),
        "log_normalizers": normalizers.to(input_ids.device),
    }


class FeatureStore:
    """Features of a list of sequences on disk, computed once; an interrupted run goes on where it stopped.

    Args:
        folder: Where the shards are kept.
        target: The target; only read when something is missing.
        layer_ids: Tapped layers.
        sequences: Token ids of each sequence.
        dtype: How states are stored.
        shard_size: Sequences a shard.
        batch_tokens: Most padded tokens of one target forward.

    Raises:
        ValueError: The folder holds features of other sequences, another target or other taps, or a damaged shard.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        target: PreTrainedModel,
        layer_ids: Sequence[int],
        sequences: Sequence[Sequence[int]],
        dtype: torch.dtype = torch.bfloat16,
        shard_size: int = 64,
        batch_tokens: int = 8192,
    ) -> None:
        self.folder = Path(folder)
        self.dtype, self.shard_size, self.batch_tokens = dtype, shard_size, batch_tokens
        self.folder.mkdir(parents=True, exist_ok=True)
        self._check_manifest(target, layer_ids, sequences)
        self._open: dict[int, Any] = {}
        shards = range(0, len(sequences), shard_size)
        missing = [start for start in shards if not self._path(start // shard_size).exists()]
        for done, start in enumerate(missing):
            self._write(start // shard_size, target, layer_ids, sequences[start : start + shard_size])
            if done % 10 == 0 or done == len(missing) - 1:
                logger.info(f"target features: {done + 1} of {len(missing)} shards written to {self.folder}")

    def _path(self, shard: int) -> Path:
        return self.folder / f"features-{shard:05d}.safetensors"

    def _check_manifest(
        self, target: PreTrainedModel, layer_ids: Sequence[int], sequences: Sequence[Sequence[int]]
    ) -> None:
        digest = hashlib.sha256(json.dumps([list(map(int, ids)) for ids in sequences]).encode()).hexdigest()
        probe = target.get_input_embeddings().weight.detach().flatten()[:4096].float()
        # Fine-tuned targets often share their embeddings, so a little of every tensor is looked at.
        parts = torch.stack([weight.detach().flatten()[:64].double().sum().cpu() for weight in target.parameters()])
        manifest = {
            "sequences": digest,
            "layer_ids": list(layer_ids),
            "dtype": str(self.dtype),
            "shard_size": self.shard_size,
            "target": f"{type(target).__name__} {target.num_parameters()} {probe.double().sum().item():.6f}",
            "weights": f"{(parts * torch.arange(1, len(parts) + 1)).sum().item():.6f}",
        }
        path = self.folder / "manifest.json"
        if path.exists():
            found = json.loads(path.read_text())
            different = [name for name, value in manifest.items() if found.get(name, value) != value]
            if different:
                raise ValueError(
                    f"feature_cache={str(self.folder)!r} was made for something else ({', '.join(different)} differ): "
                    "give another folder, or delete this one."
                )
            return
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(manifest))
        os.replace(temporary, path)

    def _write(
        self, shard: int, target: PreTrainedModel, layer_ids: Sequence[int], sequences: Sequence[Sequence[int]]
    ) -> None:
        tensors: dict[str, torch.Tensor] = {}
        order = sorted(range(len(sequences)), key=lambda index: len(sequences[index]))
        while order:
            batch = [order.pop()]
            longest = len(sequences[batch[0]])
            while order and (len(batch) + 1) * longest <= self.batch_tokens:
                batch.append(order.pop())
            ids = torch.zeros(len(batch), longest, dtype=torch.long)
            mask = torch.zeros_like(ids)
            for row, index in enumerate(batch):
                ids[row, : len(sequences[index])] = torch.as_tensor(sequences[index])
                mask[row, : len(sequences[index])] = 1
            features = target_features(target, ids.to(target.device), mask.to(target.device), layer_ids)
            for row, index in enumerate(batch):
                length = len(sequences[index])
                for name, value in features.items():
                    value = value[row, :length].cpu()
                    if name in ("taps", "states"):
                        value = value.to(self.dtype)
                    elif name == "argmax":
                        value = value.int()
                    tensors[f"{index}.{name}"] = value.contiguous()
        for name, value in tensors.items():
            if value.is_floating_point() and not value.isfinite().all():
                raise ValueError(
                    f"The target gave NaN or infinity for sequence {shard * self.shard_size + int(name.split('.')[0])} "
                    f"({name.split('.')[1]})."
                )
        temporary = self._path(shard).with_suffix(f".{os.getpid()}.tmp")
        save_file(tensors, temporary)
        os.replace(temporary, self._path(shard))

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Features of sequence `index`, without a batch axis."""
        shard, place = divmod(index, self.shard_size)
        if shard not in self._open:
            try:
                self._open[shard] = safe_open(self._path(shard), "pt")
            except Exception as error:
                raise ValueError(
                    f"{self._path(shard)} is damaged ({error}): delete it, and it is made again."
                ) from error
        handle = self._open[shard]
        found = {name: handle.get_tensor(f"{place}.{name}") for name in ("taps", "states", "argmax", "log_normalizers")}
        return {**found, "argmax": found["argmax"].long()}
