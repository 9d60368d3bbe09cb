"""The attention and the loss on a real GPU, against the same in higher precision.

Skipped where there is none.
"""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from pipeline_lib.arch.layers import LOGITS_AT_ONCE
from pipeline_lib.config.train import Train
from pipeline_lib.data.blocks import Block
from pipeline_lib.data.documents import Document
from pipeline_lib.model import loss as loss_module
from pipeline_lib.model.attention import has_kernel, packed_attention
from pipeline_lib.model.batch import Batch, logits_at, loss_sum, loss_sums, make_batch
from pipeline_lib.model.build import build_trainable, load_base, prepare_layers
from pipeline_lib.model.lora import adapted, adapted_backward
from pipeline_lib.model.loss import cross_entropy
from pipeline_lib.model.weights import load_weights
from tests.model.test_moe import small_moe

if torch.cuda.is_available():  # Triton comes with torch for CUDA
    from pipeline_lib.model.kernels import softmax_in_place

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
VOCABULARY = 151_669  # Qwen3's tokens
# A product of two bf16 numbers is rounded by up to 2**-9 of itself, a few in a row by a few times
# as much.
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
    """Query, key and value of 2 rows of 512 tokens as transformers gives them, in bf16 on GPU."""
    torch.manual_seed(0)
    shapes = ((2, 512, count, width) for count in (query_heads, key_heads, key_heads))
    query, key, value = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for shape in shapes
    )
    return query, key, value


def attend(
    tensors: tuple[Tensor, Tensor, Tensor], cu_seq_lens: Tensor, takes_cudnn: bool = True
) -> tuple[Tensor, list[Tensor]]:
    """The output and its gradients for one fixed random direction."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    query, key, value = leaves
    output, _ = packed_attention(
        nn.Module(),
        query,
        key,
        value,
        None,
        cu_seq_lens_q=cu_seq_lens,
        max_length_q=512,
        takes_cudnn=takes_cudnn,
    )
    torch.manual_seed(1)
    direction = torch.randn(output.shape).to(output)
    return output, list(torch.autograd.grad(output, leaves, direction))


BY_CUDNN = pytest.param(
    True,
    marks=pytest.mark.skipif(
        importlib.util.find_spec("cudnn") is None, reason="needs the extra `cudnn`"
    ),
    id="cudnn",
)
BOTH_KERNELS = pytest.mark.parametrize("takes_cudnn", [BY_CUDNN, pytest.param(False, id="flash")])


@BOTH_KERNELS
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(
    ("query_heads", "key_heads", "width"), [(16, 8, 128), (32, 8, 128), (4, 4, 64), (14, 2, 64)]
)
def test_the_kernel_agrees_with_each_document_alone_in_fp64(
    query_heads: int, key_heads: int, width: int, rows: int, takes_cudnn: bool
) -> None:
    """On the CPU it is another code path: one product for each document.

    One row is passed on without a copy.
    """
    tensors = heads(query_heads, key_heads, width)
    if rows == 1:
        query, key, value = (
            tensor.transpose(0, 1).flatten(1, 2)[None].contiguous() for tensor in tensors
        )
        tensors = query, key, value
    assert has_kernel(tensors[2])
    found, gradients = attend(tensors, ends(), takes_cudnn)
    query, key, value = (tensor.double().cpu() for tensor in tensors)
    expected, exact = attend((query, key, value), ends().cpu())
    assert found.shape == expected.shape
    assert relative_error(found, expected) < BF16_ERROR
    for ours, theirs in zip(gradients, exact, strict=True):
        assert relative_error(ours, theirs) < BF16_ERROR


@BOTH_KERNELS
def test_ends_may_be_repeated(takes_cudnn: bool) -> None:
    """Filling up changes no bit of the output; the gradient may be added in another order."""
    tensors = heads(16, 8, 128)
    filled = torch.cat([ends(), ends().new_full((7,), 1024)])
    plain, more = attend(tensors, ends(), takes_cudnn), attend(tensors, filled, takes_cudnn)
    assert torch.equal(plain[0], more[0])
    for one, other in zip(plain[1], more[1], strict=True):
        assert relative_error(one, other) < BF16_ERROR


@BOTH_KERNELS
def test_other_documents_change_no_bit(takes_cudnn: bool) -> None:
    query, key, value = heads(16, 8, 128)
    before, _ = attend((query, key, value), ends(), takes_cudnn)
    changed = [tensor.clone() for tensor in (query, key, value)]
    for tensor in changed:
        tensor[0, :, :8] += 1.0
        tensor[0, :, 265:] += 1.0
    after, _ = attend((changed[0], changed[1], changed[2]), ends(), takes_cudnn)
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
    documents = [
        Document(random.integers(0, 512, n).astype(np.int32), np.arange(n) >= n // 2)
        for n in lengths
    ]
    fill = 512 - sum(lengths)
    tokens = np.concatenate(
        [*(document.tokens for document in documents), np.zeros(fill, np.int32)]
    )
    supervised = np.concatenate(
        [*(document.supervised for document in documents), np.zeros(fill, np.bool_)]
    )
    numbers = np.repeat(np.array([0, 1, 2, 3, 4, -1], np.int32), [*lengths, fill])
    return documents, make_batch([Block(tokens, supervised, numbers)])


@pytest.mark.parametrize("way", ["bf16 weights", "autocast", "fp32"])
def test_a_packed_document_has_the_logits_that_it_has_alone(folder: Path, way: str) -> None:
    documents, batch = documents_and_batch()
    plain = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float64
    )
    model = load_on_gpu(folder, torch.bfloat16 if way == "bf16 weights" else torch.float32)
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=way == "autocast"):
        found = logits_at(model, batch.to(torch.device("cuda")), torch.arange(512, device="cuda"))[
            0
        ]
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


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two layers, each token using all experts: a choice may hang on a last bit."""
    sizes = {
        "mlp_only_layers": [],
        "num_hidden_layers": 2,
        "num_experts": 4,
        "num_experts_per_tok": 4,
    }
    folder = tmp_path_factory.mktemp("experts")
    torch.manual_seed(1)
    small_moe(**sizes, vocab_size=1000).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("kind", ["folder", "experts"])
def test_compiled_layers_share_one_graph_and_learn_the_same(
    request: pytest.FixtureRequest, kind: str, method: str, recompute: str
) -> None:
    """No graph break, and none made anew for batches of other numbers and lengths of documents."""
    folder: Path = request.getfixturevalue(kind)
    _, batch = documents_and_batch()
    short = make_batch(
        [
            Block(
                np.zeros(512, np.int32),
                np.ones(512, np.bool_),
                np.arange(512, dtype=np.int32) // 16,
            )
        ]
    )
    gradients = []
    for compiled in (False, True):
        train = Train.model_validate(
            {
                "method": method,
                "recompute": recompute,
                "compile": compiled,
                "lora": {"rank": 16, "alpha": 32},
            }
        )
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = build_trainable(folder, train)
        prepare_layers(model, train)
        load_weights(model, folder, torch.device("cuda"), 0)
        graphs = []
        for one in (batch, short):
            with torch.autocast("cuda", torch.bfloat16):
                of_tokens, of_routers = loss_sums(model, one.to(torch.device("cuda")))
            (of_tokens + of_routers).backward()  # type: ignore[no-untyped-call]
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        gradients.append(
            {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        )
    # The first layer of a frozen embedding needs no gradient of its input; a checkpoint's inside
    # counts by itself.
    assert 0 < graphs[0] <= (2 if method == "lora" else 1) * (2 if recompute == "selective" else 1)
    # before, shapes inside checkpoints were constants
    if recompute != "selective" or torch.__version__ >= "2.13":
        assert graphs[1] == graphs[0]
    assert not torch._dynamo.utils.counters["graph_break"]
    for name, plain in gradients[0].items():
        assert (
            relative_error(gradients[1][name], plain) < 5 * BF16_ERROR or float(plain.norm()) == 0
        ), name


@pytest.mark.parametrize("rank", [16, 64, 24])
def test_adapted_products_agree_with_fp64(rank: int) -> None:
    """By the kernel for ranks that it takes, and by the library's product for others."""
    torch.manual_seed(0)
    sizes = ((300, 256), (520, 256), (rank, 256), (520, rank), (300, 520))
    hidden, weight, a, b, gradient = (
        torch.randn(size, device="cuda", dtype=torch.bfloat16) for size in sizes
    )
    output, narrow = adapted(hidden, weight, None, a, b)
    found = adapted_backward(gradient, hidden, narrow, weight, a, b)
    h, w, a64, b64, g = (tensor.double() for tensor in (hidden, weight, a, b, gradient))
    assert relative_error(output, h @ w.t() + (h @ a64.t()) @ b64.t()) < BF16_ERROR
    exact = (g @ w + (g @ b64) @ a64, (g @ b64).t() @ h, g.t() @ (h @ a64.t()))
    for ours, theirs in zip(found, exact, strict=True):
        assert relative_error(ours, theirs) < BF16_ERROR


# The loss


def head_example(tokens: int, width: int, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, a head and targets in bf16 on the GPU, of the sizes that training has."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = (
        (0.02 * torch.randn(vocabulary, width, device="cuda")).to(torch.bfloat16).requires_grad_()
    )
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocabulary", [VOCABULARY, 1000])
def test_the_softmax_in_place_agrees_with_fp64(vocabulary: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = (4 * torch.randn(50, vocabulary, device="cuda")).to(dtype)
    logits[3, 7] = 90.0  # p is 1 up to rounding
    targets = torch.randint(0, vocabulary, (50,), device="cuda")
    targets[3] = 7
    exact = torch.log_softmax(logits.double(), dim=1)
    losses = softmax_in_place(logits, targets)
    torch.testing.assert_close(
        losses.double(), -exact.gather(1, targets[:, None]).squeeze(1), rtol=1e-5, atol=1e-5
    )
    assert relative_error(logits, exact.exp()) < (BF16_ERROR if dtype == torch.bfloat16 else 1e-5)


def test_memory_does_not_grow_with_the_logits() -> None:
    """32,768 positions of Qwen3's vocabulary: logits in fp32 alone would be 18.5 GiB."""
    tokens, width = 32_768, 1024
    hidden, weight, targets = head_example(tokens, width, VOCABULARY)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    cross_entropy(hidden, weight, targets)[0].backward()  # type: ignore[no-untyped-call]
    peak = torch.cuda.max_memory_allocated() - before
    # A piece in bf16; the head's gradient added up in fp32, and the result.
    bound = LOGITS_AT_ONCE * 2 + weight.numel() * (4 + 2) + hidden.numel() * 4 + 2**26
    print(
        f"cross-entropy of {tokens} x {VOCABULARY}: peak {peak / 2**30:.2f} GiB, bound "
        f"{bound / 2**30:.2f} GiB"
    )
    assert peak <= bound
    assert peak < tokens * VOCABULARY * 4 / 5
