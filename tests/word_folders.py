"""Tokenizers that read ``w0``, ``w1``, ... as tokens 0, 1, ..., and small models with one."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = 60


def word_tokenizer(words: int) -> PreTrainedTokenizerFast:
    """One that knows so many words and takes any other for the first."""
    known = {f"w{number}": number for number in range(words)}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0")


def save_untrained(path: Path, context: int) -> None:
    """A model that knows ``WORDS`` words and was never trained."""
    torch.set_num_threads(1)
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    word_tokenizer(WORDS).save_pretrained(path)
