"""Taking back rejected drafts where a target keeps a recurrent state, which no cache can crop."""

from __future__ import annotations

import copy
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import DynamicCache, PreTrainedModel

from .._compat import cache_argument

# A state is a few matrices, updated in place; keys and values are new tensors after every update.
_IN_PLACE = ("conv_states", "recurrent_states")
_continues: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


def keeps_a_state(target: PreTrainedModel) -> bool:
    """Whether the target has layers whose past is a state and not a list of tokens."""
    return bool(getattr(target, "_is_stateful", False))


def holds_tokens(cache: Any) -> bool:
    """Whether anything was read into the cache (one of states alone has no length)."""
    states = [getattr(layer, "has_previous_state", False) for layer in getattr(cache, "layers", [])]
    if any(any(found.values()) if isinstance(found, dict) else found for found in states):
        return True
    return not (states and all(map(_is_state, cache.layers))) and int(cache.get_seq_length()) > 0


def _is_state(layer: Any) -> bool:
    return hasattr(layer, "recurrent_states") and not hasattr(layer, "keys")


class RollbackCache(DynamicCache):
    """A cache whose `crop` goes back to before the last forward and runs the kept tokens of it again.

    Taking back costs one more forward of the target over the tokens that were accepted, so it is worth having only where
    drafts are mostly right. States are copied before every forward after the first.

    Works as a context manager around decoding, which watches what the target's forwards are given.

    Args:
        target: The model that fills the cache.
    """

    def __init__(self, target: PreTrainedModel) -> None:
        super().__init__(config=target.config)
        self.target = target
        self._before: list[dict[str, Any]] | None = None
        self._inputs: dict[str, Any] = {}
        self._hook: Any = None
        self._begun = False
        self._replaying = False

    def __enter__(self) -> RollbackCache:
        self._hook = self.target.register_forward_pre_hook(self._watch, with_kwargs=True)
        return self

    def __exit__(self, *error: Any) -> None:
        self._hook.remove()

    @property
    def is_croppable(self) -> bool:
        """Always, since what cannot be cropped is computed again."""
        return True

    def activate_past_recording(self) -> None:
        """Nothing to do: everything is kept from before a forward, not only what windows would drop."""

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last `-tokens_to_remove` tokens, which are all of the last forward (transformers' convention:
        negative)."""
        removed = -int(tokens_to_remove)
        if removed == 0:
            return
        inputs, ids = self._inputs, self._inputs.get("input_ids")
        if self._before is None or ids is None or not 0 < removed < ids.shape[1]:
            raise ValueError(
                f"tokens_to_remove={tokens_to_remove} is not valid: only the last forward can be taken back, and at least "
                "one of its tokens stays."
            )
        for layer, state in zip(self.layers, self._before, strict=True):
            vars(layer).clear()
            vars(layer).update(state)
        self._before = None
        kept = ids.shape[1] - removed
        again = dict(inputs, input_ids=ids[:, :kept])
        for name in ("position_ids", "cache_position", "token_type_ids"):
            if isinstance(inputs.get(name), torch.Tensor):
                again[name] = inputs[name][..., :kept]
        if isinstance(inputs.get("attention_mask"), torch.Tensor):
            again["attention_mask"] = inputs["attention_mask"][..., :-removed]
        if "logits_to_keep" in again:
            again["logits_to_keep"] = 1
        self._replaying = True
        try:
            self.target(**again)
        finally:
            self._replaying = False

    def _watch(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs.get(cache_argument(self.target)) is not self or self._replaying:
            return
        self._inputs = kwargs
        self._before = [_copied(layer) for layer in self.layers] if self._begun else None
        self._begun = True


def _copied(layer: Any) -> dict[str, Any]:
    """A layer's attributes as they are now."""
    return {
        name: copy.deepcopy(value)
        if name in _IN_PLACE
        else copy.copy(value)
        if isinstance(value, (dict, list))
        else value
        for name, value in vars(layer).items()
    }


@torch.no_grad()
def continues_with_several_tokens(target: PreTrainedModel) -> bool:
    """Whether the target reads several tokens at once after a prompt as it reads them one by one.

    Some recurrent models start from an empty state whenever they are given more than one token, and verifying would then
    be wrong. Asked once for a target, by running it on a few tokens.
    """
    if target not in _continues:
        name = cache_argument(target)
        generator = torch.Generator().manual_seed(0)
        vocabulary = target.get_input_embeddings().weight.shape[0]
        ids = torch.randint(vocabulary, (1, 9), generator=generator).to(target.device)

        def read(*pieces: torch.Tensor) -> torch.Tensor:
            cache, logits = DynamicCache(config=target.config), []
            for piece in pieces:
                logits.append(target(input_ids=piece, use_cache=True, **{name: cache}).logits[:, -piece.shape[1] :])
            return torch.cat(logits[1:], dim=1).float()

        at_once, singly = read(ids[:, :5], ids[:, 5:]), read(ids[:, :5], *ids[:, 5:].split(1, dim=1))
        allowed = 1e-3 if target.dtype == torch.float32 else 0.1
        _continues[target] = bool((at_once - singly).norm() <= allowed * singly.norm())
    return _continues[target]
