"""The target's embedding and head as a drafter uses them: noise embeddings in, draft logits out."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from ..linear_packing import is_packed, packed_like
from ..modeling_adaflash import AdaFlashDraftModel

_heads: WeakKeyDictionary[AdaFlashDraftModel, tuple[Any, DraftHead]] = WeakKeyDictionary()


class DraftHead(nn.Module):
    """Draft logits from a drafter's states: the target's head, or only the rows of the draft vocabulary.

    Args:
        target: The model whose `get_output_embeddings()` is used.
        drafter: Gives the token list, logit scale and soft cap.

    The gathered rows are a copy that lives as long as this object; they are never saved with the drafter.
    """

    def __init__(self, target: PreTrainedModel, drafter: AdaFlashDraftModel) -> None:
        super().__init__()
        head = target.get_output_embeddings()
        config = drafter.config
        self.softcap, self.scale = config.final_logit_softcapping, config.logit_scale
        self.token_ids = drafter.draft_token_ids
        self.vocab_size = head.weight.shape[0]
        if self.token_ids is None:
            self.head = head
        else:
            ids = self.token_ids.to(head.weight.device)
            rows = head.weight.detach()[ids]
            self.head = nn.Linear(rows.shape[1], rows.shape[0], bias=getattr(head, "bias", None) is not None)
            self.head.weight = nn.Parameter(rows, requires_grad=False)
            if self.head.bias is not None:
                self.head.bias = nn.Parameter(head.bias.detach()[ids], requires_grad=False)
            packed_like(self.head, head)

    @classmethod
    def shared(cls, target: PreTrainedModel, drafter: AdaFlashDraftModel) -> DraftHead:
        """The head of this pair, gathered once and again whenever the target's head or the token list has changed."""
        head, ids = target.get_output_embeddings(), drafter.draft_token_ids
        if ids is None:
            return cls(target, drafter)
        key = (id(head), _state(head.weight), is_packed(head), _state(ids))
        found = _heads.get(drafter)
        if found is None or found[0] != key:
            found = _heads[drafter] = (key, cls(target, drafter))
        return found[1]

    @property
    def device(self) -> torch.device:
        """Where the head's weights are."""
        return self.head.weight.device

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """`[..., hidden]` -> logits `[..., draft vocabulary]` in the head's dtype."""
        return self.transform(self.head(states.to(device=self.device, dtype=self.head.weight.dtype)))

    def transform(self, logits: torch.Tensor) -> torch.Tensor:
        """The drafter's logit scale and soft cap."""
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    def to_token_ids(self, indices: torch.Tensor) -> torch.Tensor:
        """Indices into the draft vocabulary -> token ids of the target."""
        return indices if self.token_ids is None else self.token_ids.to(indices.device)[indices]

    def expand(self, logits: torch.Tensor) -> torch.Tensor:
        """Draft logits over the whole vocabulary, `-inf` where nothing can be drafted."""
        if self.token_ids is None:
            return logits
        full = logits.new_full((*logits.shape[:-1], self.vocab_size), float("-inf"))
        return full.index_copy_(-1, self.token_ids.to(logits.device), logits)


def _state(tensor: torch.Tensor) -> tuple[int, int]:
    """Changes when a tensor is replaced or written to."""
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version


def embed_tokens(target: PreTrainedModel, token_ids: torch.Tensor) -> torch.Tensor:
    """The target's embeddings as a drafter sees them: its module's own scaling kept, its `embed_norm` left out.

    This is what transformers' `DFlashTokenCandidateGenerator._get_noise_embeds` does.
    """
    embedding = target.get_input_embeddings()
    norm = getattr(embedding, "embed_norm", None)
    if norm is None:
        return embedding(token_ids)
    try:
        embedding.embed_norm = nn.Identity()
        return embedding(token_ids)
    finally:
        embedding.embed_norm = norm


def noise_embeddings(
    target: PreTrainedModel, drafter: AdaFlashDraftModel, anchor_ids: torch.Tensor, slots: int
) -> torch.Tensor:
    """Blocks for `anchor_ids`: the anchor's embedding, then `slots - 1` mask embeddings.

    Args:
        target: Gives the embeddings.
        drafter: Gives the mask token id or the learned mask embedding.
        anchor_ids: `[...]` token ids.
        slots: Slots of a block.

    Returns:
        `[..., slots, hidden]` in the drafter's dtype, on its device.
    """
    device = target.get_input_embeddings().weight.device
    like = dict(device=drafter.fc.weight.device, dtype=drafter.fc.weight.dtype)
    if drafter.mask_embedding is not None:
        anchors = embed_tokens(target, anchor_ids.to(device)).to(**like)
        masks = drafter.mask_embedding.to(anchors.dtype).expand(*anchor_ids.shape, slots - 1, -1)
        return torch.cat([anchors.unsqueeze(-2), masks], dim=-2)
    ids = anchor_ids.new_full((*anchor_ids.shape, slots), drafter.config.mask_token_id)
    ids[..., 0] = anchor_ids
    return embed_tokens(target, ids.to(device)).to(**like)
