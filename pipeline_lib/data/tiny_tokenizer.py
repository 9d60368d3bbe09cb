"""Trains a small byte-level BPE tokenizer, and adds a chat template, both in Qwen3's format."""

import shutil
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from pipeline_lib.core.files import write_json
from pipeline_lib.data.bpe import SPLIT_PATTERN
from pipeline_lib.data.chat_template import TEMPLATE_NAME, TOKENIZER_CONFIG_NAME
from pipeline_lib.data.encode import TOKENIZER_NAME

PAD_TOKEN = "<|endoftext|>"  # noqa: S105 - a token of the vocabulary
END_OF_TURN = "<|im_end|>"
SPECIAL_TOKENS = [PAD_TOKEN, "<|im_start|>", END_OF_TURN]

# Tags that the template writes around thinking, calls and their results. As in Qwen3 each is one
# token but not a control token, so a text may contain them.
MARKS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
]


def write_tokenizer(texts: Iterable[str], vocab_tokens: int, out: Path) -> None:
    """Train a tokenizer on `texts` and write its files to `out`. Equal texts give equal files."""
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated", invert=False)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=vocab_tokens - len(MARKS),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(mark, normalized=False, special=False) for mark in MARKS])
    tokenizer.save(str(out / TOKENIZER_NAME))
    write_json(
        out / TOKENIZER_CONFIG_NAME,
        {
            "tokenizer_class": "Qwen2Tokenizer",
            "eos_token": END_OF_TURN,
            "pad_token": PAD_TOKEN,
            "bos_token": None,
            "unk_token": None,
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 4096,
        },
    )
    shutil.copyfile(Path(__file__).with_name(TEMPLATE_NAME), out / TEMPLATE_NAME)
