"""Does a drafter fit a target? Asked at first use, so that a misfit is named instead of surfacing as a shape error."""

from __future__ import annotations

from transformers import PreTrainedModel

from ..modeling_adaflash import AdaFlashDraftModel
from .taps import decoder_layers


def check_target_kind(target: PreTrainedModel) -> None:
    """Refuses targets whose past cannot be taken back to the last accepted token.

    Raises:
        ValueError: Naming the target and why.
    """
    config, kind = target.config, None
    if getattr(config, "is_encoder_decoder", False):
        kind = "is an encoder-decoder"
    elif getattr(config.get_text_config(), "is_decoder", True) is False:
        kind = "attends to later tokens (is_decoder=False)"
    if kind is not None:
        raise ValueError(
            f"assistant_model cannot be used with target={type(target).__name__}, which {kind}: rejected drafts cannot be "
            "taken back. Leave out assistant_model."
        )


def check_drafter_fits(target: PreTrainedModel, drafter: AdaFlashDraftModel) -> None:
    """Compares the drafter's configuration with the target.

    Raises:
        ValueError: Naming the field, its value and what the target allows.
    """
    name, config = type(target).__name__, drafter.config
    embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
    if embedding is None or head is None:
        raise ValueError(
            f"target={name} has no token embedding or no LM head (get_input_embeddings() / get_output_embeddings()), "
            "which a drafter shares: pass a causal language model."
        )
    if config.hidden_size != embedding.weight.shape[-1]:
        raise ValueError(
            f"hidden_size={config.hidden_size} of the drafter does not fit target={name}, whose hidden size is "
            f"{embedding.weight.shape[-1]}: the drafter was made for another model."
        )
    layers = len(decoder_layers(target))
    for layer_id in config.target_layer_ids:
        if not 0 <= layer_id < layers:
            raise ValueError(
                f"target_layer_ids={config.target_layer_ids} of the drafter does not fit target={name}: {layer_id} is "
                f"outside [0, {layers - 1}]."
            )
    if config.num_target_layers is not None and config.num_target_layers != layers:
        raise ValueError(
            f"num_target_layers={config.num_target_layers} of the drafter does not fit target={name}, which has "
            f"{layers} layers: the drafter was made for another model."
        )
    rows, head_rows = embedding.weight.shape[0], head.weight.shape[0]
    if config.mask_token_id is not None and config.mask_token_id >= rows:
        raise ValueError(
            f"mask_token_id={config.mask_token_id} of the drafter is outside target={name}'s embedding table "
            f"[0, {rows - 1}]."
        )
    text_vocabulary = target.config.get_text_config().vocab_size
    if config.vocab_size not in (rows, head_rows, text_vocabulary):
        raise ValueError(
            f"vocab_size={config.vocab_size} of the drafter does not fit target={name}, whose embedding has {rows} rows "
            f"and whose head has {head_rows}: the drafter was made for another vocabulary."
        )
    if drafter.draft_token_ids is not None and int(drafter.draft_token_ids.max()) >= head_rows:
        raise ValueError(
            f"draft_token_ids of the drafter reach {int(drafter.draft_token_ids.max())}, outside target={name}'s head "
            f"[0, {head_rows - 1}]."
        )
