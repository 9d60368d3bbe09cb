"""The attention and the loss on a real GPU, against the same in higher precision. Skipped where there is none."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from pipeline_lib.data.document import Document
from pipeline_lib.data.shard.blocks import Block
from pipeline_lib.train import loss as loss_module
from pipeline_lib.train.attention import has_kernel, packed_attention
from pipeline_lib.train.batch import Batch, logits_at, loss_sum, make_batch
from pipeline_lib.train.layers import decoder_layers
from pipeline_lib.train.loss import cross_entropy
from pipeline_lib.train.model import load_base

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
VOCABULARY = 151_669  # Qwen3's tokens
# A product of two bf16 numbers is rounded by up to 2**-9 of itself, a few in a row by a few times as much.
BF16_ERROR = 1e-2


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The difference's norm by the norm of what was expected."""
    found, expected = (tensor.detach().double().cpu() for tensor in (found, expected))
    return float((found - expected).norm() / expected.norm())


# Attention


def ends() -> Tensor:
    """Where documents begin in two rows of 512 tokens, lengths from 1 to 256."""
    return torch.tensor([0, 1, 8, 136, 265, 512, 765, 768, 1024], dtype=torch.int32, device="cuda")


def heads(query_heads: int, key_heads: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of 2 rows of 512 tokens as transformers passes them, in bf16 on the GPU."""
    torch.manual_seed(0)
    shapes = ((2, 512, count, width) for count in (query_heads, key_heads, key_heads))
    query, key, value = (torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for shape in shapes)
    return query, key, value


def attend(tensors: tuple[Tensor, Tensor, Tensor], cu_seq_lens: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The output and its gradients for one fixed random direction."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    query, key, value = leaves
    output, _ = packed_attention(nn.Module(), query, key, value, None, cu_seq_lens_q=cu_seq_lens, max_length_q=512)
    torch.manual_seed(1)
    direction = torch.randn(output.shape).to(output)
    return output, list(torch.autograd.grad(output, leaves, direction))


@pytest.mark.parametrize(("query_heads", "key_heads", "width"), [(16, 8, 128), (32, 8, 128), (4, 4, 64), (14, 2, 64)])
def test_the_kernel_agrees_with_each_document_alone_in_fp64(query_heads: int, key_heads: int, width: int) -> None:
    """On the CPU it is another code path: one product for each document."""
    tensors = heads(query_heads, key_heads, width)
    assert has_kernel(tensors[2])
    found, gradients = attend(tensors, ends())
    query, key, value = (tensor.double().cpu() for tensor in tensors)
    expected, exact = attend((query, key, value), ends().cpu())
    assert found.shape == expected.shape
    assert relative_error(found, expected) < BF16_ERROR
    for ours, theirs in zip(gradients, exact, strict=True):
        assert relative_error(ours, theirs) < BF16_ERROR


def test_ends_may_be_repeated() -> None:
    """Filling up changes no bit of the output; the gradient's parts may be added in another order."""
    tensors = heads(16, 8, 128)
    filled = torch.cat([ends(), ends().new_full((7,), 1024)])
    plain, more = attend(tensors, ends()), attend(tensors, filled)
    assert torch.equal(plain[0], more[0])
    for one, other in zip(plain[1], more[1], strict=True):
        assert relative_error(one, other) < BF16_ERROR


def test_other_documents_change_no_bit() -> None:
    query, key, value = heads(16, 8, 128)
    before, _ = attend((query, key, value), ends())
    changed = [tensor.clone() for tensor in (query, key, value)]
    for tensor in changed:
        tensor[0, :, :8] += 1.0
        tensor[0, :, 265:] += 1.0
    after, _ = attend((changed[0], changed[1], changed[2]), ends())
    assert torch.equal(before[0, 8:265], after[0, 8:265])
    assert not torch.equal(before[0, 265:], after[0, 265:])


def test_fp32_takes_the_exact_way() -> None:
    tensors = heads(16, 8, 128)
    query, key, value = (tensor.float() for tensor in tensors)
    assert not has_kernel(value)
    found, gradients = attend((query, key, value), ends())
    expected, exact = attend((query.cpu(), key.cpu(), value.cpu()), ends().cpu())
    assert relative_error(found, expected) < 1e-5
    for ours, theirs in zip(gradients, exact, strict=True):
        assert relative_error(ours, theirs) < 1e-5


# The model


def load_on_gpu(folder: Path, dtype: torch.dtype) -> nn.Module:
    """The model as the stages load it."""
    model: nn.Module = load_base(folder, dtype)
    return model.cuda()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small Qwen3 whose heads are as wide as the real one's."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


def documents_and_batch() -> tuple[list[Document], Batch]:
    """One block of 512 tokens: five documents and padding."""
    random = np.random.default_rng(0)
    lengths = [100, 1, 37, 200, 150]
    documents = [Document(random.integers(0, 512, n).astype(np.int32), np.arange(n) >= n // 2) for n in lengths]
    fill = 512 - sum(lengths)
    tokens = np.concatenate([*(document.tokens for document in documents), np.zeros(fill, np.int32)])
    supervised = np.concatenate([*(document.supervised for document in documents), np.zeros(fill, np.bool_)])
    numbers = np.repeat(np.array([0, 1, 2, 3, 4, -1], np.int32), [*lengths, fill])
    return documents, make_batch([Block(tokens, supervised, numbers)])


@pytest.mark.parametrize("way", ["bf16 weights", "autocast", "fp32"])
def test_a_packed_document_has_the_logits_that_it_has_alone(folder: Path, way: str) -> None:
    documents, batch = documents_and_batch()
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float64)
    model = load_on_gpu(folder, torch.bfloat16 if way == "bf16 weights" else torch.float32)
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=way == "autocast"):
        found = logits_at(model, batch.to(torch.device("cuda")), torch.arange(512, device="cuda"))[0]
    start = 0
    for document in documents:
        end = start + len(document.tokens)
        with torch.no_grad():
            alone = plain(torch.from_numpy(document.tokens.astype(np.int64))[None]).logits[0]
        assert relative_error(found[start:end], alone) < (1e-5 if way == "fp32" else 3 * BF16_ERROR)
        start = end


def test_gradients_of_the_model_agree_with_the_cpu(folder: Path) -> None:
    _, batch = documents_and_batch()
    exact, model = load_base(folder, torch.float32), load_on_gpu(folder, torch.float32)
    loss_sum(exact, batch).backward()  # type: ignore[no-untyped-call]
    with torch.autocast("cuda", torch.bfloat16):
        loss_sum(model, batch.to(torch.device("cuda"))).backward()  # type: ignore[no-untyped-call]
    for (name, ours), theirs in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert relative_error(ours.grad, theirs.grad) < 5 * BF16_ERROR, name


def test_layers_compile_whole(folder: Path) -> None:
    """No break of the graph at the attention, and the same loss for batches of other numbers of documents."""
    _, batch = documents_and_batch()
    plain, compiled = (load_on_gpu(folder, torch.bfloat16) for _ in range(2))
    for layer in decoder_layers(compiled):
        layer.compile(fullgraph=True)
    short = make_batch([Block(np.zeros(512, np.int32), np.ones(512, np.bool_), np.arange(512, dtype=np.int32) // 16)])
    for one in (batch.to(torch.device("cuda")), short.to(torch.device("cuda"))):
        expected, found = loss_sum(plain, one), loss_sum(compiled, one)
        found.backward()  # type: ignore[no-untyped-call]
        assert found.item() == pytest.approx(expected.item(), rel=BF16_ERROR)


# The loss


def head_example(tokens: int, width: int, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, a head and targets in bf16 on the GPU, of the sizes that training has."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = (0.02 * torch.randn(vocabulary, width, device="cuda")).to(torch.bfloat16).requires_grad_()
    return hidden, weight, torch.randint(0, vocabulary, (tokens,), device="cuda")


def test_loss_and_gradients_agree_with_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces add nothing to the error of bf16's own rounding."""
    monkeypatch.setattr(loss_module, "LOGITS_AT_ONCE", 64 * 5000)
    hidden, weight, targets = head_example(1000, 256, 5000)
    total, _ = cross_entropy(hidden, weight, targets)
    ours = torch.autograd.grad(total, [hidden, weight])
    exact = F.cross_entropy(hidden.double() @ weight.double().t(), targets, reduction="sum")
    truth = torch.autograd.grad(exact, [hidden, weight])
    assert total.item() == pytest.approx(exact.item(), rel=1e-3)
    for found, expected in zip(ours, truth, strict=True):
        assert relative_error(found, expected) < BF16_ERROR


def test_memory_does_not_grow_with_the_logits() -> None:
    """32,768 positions of Qwen3's vocabulary: logits in fp32 alone would be 18.5 GiB."""
    tokens, width = 32_768, 1024
    hidden, weight, targets = head_example(tokens, width, VOCABULARY)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    cross_entropy(hidden, weight, targets)[0].backward()  # type: ignore[no-untyped-call]
    peak = torch.cuda.max_memory_allocated() - before
    # A piece in bf16 and twice in fp32; the head's gradient added up in fp32, one product, and the result.
    bound = loss_module.LOGITS_AT_ONCE * (2 + 4 + 4) + weight.numel() * (4 + 2 + 2) + hidden.numel() * 4 + 2**26
    print(f"cross-entropy of {tokens} x {VOCABULARY}: peak {peak / 2**30:.2f} GiB, bound {bound / 2**30:.2f} GiB")
    assert peak <= bound
    assert peak < tokens * VOCABULARY * 4 / 5
