"""Trains a small byte-level BPE tokenizer in Qwen3's form, and gives it a ChatML template."""

import shutil
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from pipeline_lib.base.fsio import write_json
from pipeline_lib.data.chat import TEMPLATE_NAME, TOKENIZER_CONFIG_NAME
from pipeline_lib.data.encode import TOKENIZER_NAME

PAD_TOKEN = "<|endoftext|>"  # noqa: S105 - a token of the vocabulary
END_OF_TURN = "<|im_end|>"
SPECIAL_TOKENS = [PAD_TOKEN, "<|im_start|>", END_OF_TURN]

# Qwen's rule for what a token never crosses: words, single digits, punctuation, line ends.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def write_tokenizer(texts: Iterable[str], vocab_tokens: int, out: Path) -> None:
    """Train on `texts` and write the tokenizer's files into `out`. The same texts give the same files."""
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated", invert=False)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=vocab_tokens,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
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
