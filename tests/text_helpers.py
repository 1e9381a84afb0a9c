"""A tokenizer made on the spot, for tests that go from text to text."""

from __future__ import annotations

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for message in messages %}w{{ 3 + loop.index0 % 2 }} {{ message['content'] }} w5 {% endfor %}"
    "{% if add_generation_prompt %}w6{% endif %}"
)


def tiny_tokenizer(vocabulary: int = 64, chat_template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Words `w0` … `w63` are ids 0 … 63; 0 pads, 1 begins, 2 ends."""
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(vocabulary)}, unk_token="w7"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="w0", bos_token="w1", eos_token="w2", unk_token="w7", padding_side="left"
    )
    tokenizer.chat_template = chat_template
    return tokenizer
