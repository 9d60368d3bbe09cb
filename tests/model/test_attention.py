"""A document in a packed block is computed as if alone, with nothing of the block's square.

Nothing of the block's length squared is made.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from pipeline_lib.config.train import Train
from pipeline_lib.core.errors import DataError
from pipeline_lib.core.files import read_json, write_json
from pipeline_lib.data.blocks import Block, BlockReader
from pipeline_lib.data.documents import Document
from pipeline_lib.data.shard import write_blocks
from pipeline_lib.model.attention import PACKED, PACKED_FLASH, packed_attention
from pipeline_lib.model.batch import Batch, empty_block, logits_at, loss_sum, make_batch
from pipeline_lib.model.build import build_trainable, load_base
from tests.train.conftest import BLOCK_TOKENS, VOCAB, make_documents, write_model


@pytest.fixture
def model(tmp_path: Path) -> PreTrainedModel:
    write_model(tmp_path / "model")
    return load_base(tmp_path / "model", torch.float32)


def plain_model(tmp_path: Path) -> PreTrainedModel:
    """The same weights with transformers' own plainest attention."""
    plain: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", attn_implementation="eager"
    )
    return plain


def packed(
    tmp_path: Path, bins: list[list[Document]], block_tokens: int = BLOCK_TOKENS
) -> list[Block]:
    write_blocks(tmp_path / "blocks", bins, block_tokens, 1)
    reader = BlockReader(tmp_path / "blocks")
    return [reader[number] for number in range(len(bins))]


def all_logits(model: nn.Module, batch: Batch) -> Tensor:
    with torch.no_grad():
        return logits_at(model, batch, torch.arange(batch.tokens.shape[1]))


def assert_documents_are_as_alone(
    model: PreTrainedModel, tmp_path: Path, bins: list[list[Document]]
) -> None:
    """Compare with transformers' plainest attention by document; an empty block follows."""
    batch = make_batch([*packed(tmp_path, bins), empty_block(BLOCK_TOKENS)])
    found, plain, compared = all_logits(model, batch), plain_model(tmp_path), 0
    assert bool(found.isfinite().all())
    for row, documents in enumerate(bins):
        start = 0
        for document in documents:
            with torch.no_grad():
                alone = plain(torch.from_numpy(document.tokens.astype(np.int64))[None]).logits[0]
            end = start + len(document.tokens)
            torch.testing.assert_close(found[row, start:end], alone, rtol=1e-5, atol=1e-6)
            compared, start = compared + 1, end
    assert compared >= 2 * len(bins)


def test_gradients_are_those_of_the_documents_alone(model: PreTrainedModel, tmp_path: Path) -> None:
    bins = make_documents(3, seed=5)
    loss_sum(model, make_batch(packed(tmp_path, bins))).backward()  # type: ignore[no-untyped-call]
    plain = plain_model(tmp_path)
    for document in (document for documents in bins for document in documents):
        tokens = torch.from_numpy(document.tokens.astype(np.int64))
        labels = torch.where(torch.from_numpy(document.supervised), tokens, -100)
        (
            plain(tokens[None], labels=labels[None]).loss * int(document.supervised[1:].sum())
        ).backward()
    for (name, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_other_documents_and_padding_change_no_bit(model: PreTrainedModel, tmp_path: Path) -> None:
    block = packed(tmp_path, make_documents(1, seed=1))[0]
    changed = Block(block.tokens.copy(), block.supervised, block.documents)
    others = block.documents != 1
    changed.tokens[others] = (changed.tokens[others] + 7) % VOCAB
    before = all_logits(model, make_batch([block]))[0]
    after = all_logits(model, make_batch([changed]))[0]
    mine = torch.from_numpy(block.documents == 1)
    assert mine.any()
    assert torch.equal(before[mine], after[mine])
    assert not torch.equal(before[~mine], after[~mine])


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers how many elements the largest tensor has that any operation makes."""

    def __init__(self) -> None:
        """Nothing seen yet."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # a view, or written in place
        is_alias = any(returned.alias_info for returned in func._schema.returns)
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor) and not is_alias:
                self.elements = max(self.elements, tensor.numel())
        return result


def test_nothing_grows_with_the_square_of_the_block(model: PreTrainedModel) -> None:
    """The largest tensor of a step is some layer's own, linear in the block's length."""
    largest = []
    for length in (512, 1024):
        documents = (np.arange(length) // 16).astype(np.int32)
        batch = make_batch(
            [Block(np.full(length, 3, np.int32), np.ones(length, np.bool_), documents)]
        )
        with LargestTensor() as seen:
            loss_sum(model, batch).backward()  # type: ignore[no-untyped-call]
        largest.append(seen.elements)
    assert largest[1] == 2 * largest[0]
    assert largest[1] < 1024 * 1024


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_key_heads_may_be_fewer(groups: int) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, 6, 8) for heads in (4, groups, groups))
    ends = torch.tensor([0, 4, 6, 12, 12], dtype=torch.int32)
    found, _ = packed_attention(
        nn.Module(), query, key, value, None, 0.3, cu_seq_lens_q=ends, max_length_q=6
    )
    key, value = (tensor.repeat_interleave(4 // groups, dim=1) for tensor in (key, value))
    for row, start, end in ((0, 0, 4), (0, 4, 6), (1, 0, 6)):
        part = (row, slice(None), slice(start, end))
        scores = query[part] @ key[part].transpose(1, 2) * 0.3
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        expected = (scores.softmax(-1) @ value[part]).transpose(0, 1)
        torch.testing.assert_close(found[row, start:end], expected)


def test_queries_and_keys_follow_values_in_precision() -> None:
    """Under autocast the norms of queries and keys give fp32."""
    query = torch.randn(1, 4, 8, 8)
    key = torch.randn(1, 2, 8, 8)
    value = torch.randn(1, 2, 8, 8).bfloat16()
    ends = torch.tensor([0, 5, 8], dtype=torch.int32)
    output, _ = packed_attention(
        nn.Module(), query, key, value, None, cu_seq_lens_q=ends, max_length_q=8
    )
    assert (output.dtype, output.shape) == (torch.bfloat16, (1, 8, 4, 8))


def test_generation_is_that_of_transformers(model: PreTrainedModel, tmp_path: Path) -> None:
    prompt = torch.tensor([[5, 9, 17, 33, 2, 40]])
    settings: dict[str, Any] = {
        "attention_mask": torch.ones_like(prompt),
        "max_new_tokens": 12,
        "do_sample": False,
    }
    expected = plain_model(tmp_path).generate(prompt, use_cache=False, **settings)  # type: ignore[operator]
    for use_cache in (True, False):
        assert torch.equal(model.generate(prompt, use_cache=use_cache, **settings), expected)  # type: ignore[operator]


def test_a_saved_model_does_not_know_of_it(model: PreTrainedModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "saved")
    config = read_json(tmp_path / "saved" / "config.json")
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert "packed" not in (tmp_path / "saved" / "config.json").read_text(encoding="utf-8")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    assert {name: tensor.shape for name, tensor in again.items()} == {
        name: tensor.shape for name, tensor in model.state_dict().items()
    }


@pytest.mark.parametrize("kind", [Qwen2Config, Qwen3Config, Qwen3MoeConfig])
def test_a_packed_document_has_the_logits_that_it_has_alone(
    tmp_path: Path, kind: Callable[..., PreTrainedConfig]
) -> None:
    """Qwen2 has biases and no query or key norms; of the experts, each token has two of four."""
    small = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
    }
    experts = (
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        if "Moe" in str(kind)
        else {}
    )
    torch.manual_seed(0)
    config = kind(**small, **experts, num_attention_heads=4, num_key_value_heads=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")  # type: ignore[no-untyped-call]
    assert_documents_are_as_alone(
        load_base(tmp_path / "model", torch.float32), tmp_path, make_documents(3, seed=4)
    )


def test_a_sliding_window_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path)
    config = read_json(tmp_path / "config.json")
    config |= {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
    config.pop("layer_types", None)
    write_json(tmp_path / "config.json", config)
    with pytest.raises(DataError, match="sliding window"):
        load_base(tmp_path, torch.float32)


@pytest.mark.parametrize(("attention", "name"), [("auto", PACKED), ("flash", PACKED_FLASH)])
def test_the_config_says_which_kernels_may_be_taken(
    tmp_path: Path, attention: str, name: str
) -> None:
    write_model(tmp_path)
    model: Any = build_trainable(tmp_path, Train.model_validate({"attention": attention}))
    assert model.config._attn_implementation == name
