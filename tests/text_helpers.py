"""A tokenizer made on the spot, for tests that go from text to text."""

from __future__ import annotations

import string

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for message in messages %}w{{ 3 + loop.index0 % 2 }} {{ message['content'] }} w5 {% endfor %}"
    "{% if add_generation_prompt %}w6{% endif %}"
)


def tiny_tokenizer(vocabulary: int = 64, chat_template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Words `w3` … `w63` are ids 3 … 63 (less 7, the unknown word); 0 pads, 1 begins, 2 ends."""
    names = {0: "<pad>", 1: "<s>", 2: "</s>", 7: "<unk>"}
    vocab = {names.get(index, f"w{index}"): index for index in range(vocabulary)}
    words = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        padding_side="left",
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def character_tokenizer() -> PreTrainedTokenizerFast:
    """64 characters as ids 0 … 63, which join without spaces, as stop strings need."""
    characters = string.ascii_letters + string.digits + "+-"
    tokenizer = Tokenizer(models.BPE(vocab={c: index for index, c in enumerate(characters)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="a")
