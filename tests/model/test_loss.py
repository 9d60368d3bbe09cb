"""The loss without logits is the cross-entropy of all logits, with gradients, in bounded memory."""

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from pipeline_lib.config.train import Lora
from pipeline_lib.core.errors import DataError
from pipeline_lib.data.blocks import BlockReader
from pipeline_lib.data.shard import write_blocks
from pipeline_lib.model import loss as loss_module
from pipeline_lib.model.batch import Batch, block_losses, empty_block, loss_sum, make_batch
from pipeline_lib.model.build import load_base
from pipeline_lib.model.lora import add_adapters
from pipeline_lib.model.loss import cross_entropy, return_losses
from tests.model.test_attention import LargestTensor
from tests.train.conftest import BLOCK_TOKENS, make_documents, write_model

TOKENS, WIDTH, VOCABULARY = 37, 16, 101


def example(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH, dtype=dtype, requires_grad=True)
    return hidden, weight, torch.randint(0, VOCABULARY, (TOKENS,))


def gradients(loss: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss * 0.125, tensors)


@pytest.mark.parametrize("at_once", [1, 5 * VOCABULARY, 10**9])
def test_it_equals_plain_cross_entropy(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(loss_module, "LOGITS_AT_ONCE", at_once)
    hidden, weight, targets = example()
    total, losses = cross_entropy(hidden, weight, targets)
    reference = F.cross_entropy(hidden @ weight.t(), targets, reduction="none")
    torch.testing.assert_close(losses, reference.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(total, reference.sum(), rtol=1e-6, atol=0.0)
    assert not losses.requires_grad
    expected = gradients(reference.sum(), hidden, weight)
    torch.testing.assert_close(gradients(total, hidden, weight), expected, rtol=1e-5, atol=1e-6)


def test_large_logits_do_not_overflow() -> None:
    hidden, weight, targets = example()
    total, _ = cross_entropy(hidden * 1e3, weight * 1e3, targets)
    assert total.isfinite()
    torch.testing.assert_close(
        total, F.cross_entropy(hidden @ weight.t() * 1e6, targets, reduction="sum")
    )


@pytest.mark.parametrize("under_autocast", [True, False])
def test_half_precision_is_that_of_the_product_alone(
    monkeypatch: pytest.MonkeyPatch, under_autocast: bool
) -> None:
    """Gradients come back in the dtype of what they belong to; pieces do not make them worse."""
    monkeypatch.setattr(loss_module, "LOGITS_AT_ONCE", 4 * VOCABULARY)
    hidden, weight, targets = example(torch.float32 if under_autocast else torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=under_autocast):
        total, losses = cross_entropy(hidden, weight, targets)
        reference = F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="sum")
    assert total.dtype == losses.dtype == torch.float32
    torch.testing.assert_close(total, reference, rtol=1e-6, atol=0.0)
    exact = F.cross_entropy(hidden.double() @ weight.double().t(), targets, reduction="sum")
    found, expected, truth = (gradients(loss, hidden, weight) for loss in (total, reference, exact))
    for tensor, ours, theirs, true in zip((hidden, weight), found, expected, truth, strict=True):
        assert ours.dtype == tensor.dtype
        error, their_error = (
            (grad.double() - true.double()).norm() / true.double().norm() for grad in (ours, theirs)
        )
        assert error < max(1.5 * float(their_error), 4e-3)


def test_the_logits_are_never_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """No operation, forward or backward, makes more than a piece of logits or the head's matrix.

    A matrix as large as the head is allowed.
    """
    monkeypatch.setattr(loss_module, "LOGITS_AT_ONCE", 4 * VOCABULARY)
    _, weight, _ = example()
    hidden = torch.randn(500, WIDTH, requires_grad=True)
    targets = torch.randint(0, VOCABULARY, (500,))
    with LargestTensor() as seen:
        cross_entropy(hidden, weight, targets)[0].backward()  # type: ignore[no-untyped-call]
    assert seen.elements == max(4 * VOCABULARY, hidden.numel(), weight.numel())


def test_gradients_that_nobody_wants_are_not_computed() -> None:
    hidden, weight, targets = example()
    with torch.no_grad(), LargestTensor() as seen:
        total, _ = cross_entropy(hidden[:4], weight, targets[:4])
    assert not total.requires_grad
    weight.requires_grad_(False)
    with seen:
        cross_entropy(hidden[:4], weight, targets[:4])[0].backward()  # type: ignore[no-untyped-call]
    assert weight.grad is None
    assert seen.elements < weight.numel()


def test_a_second_backward_pass_is_refused() -> None:
    hidden, weight, targets = example()
    total, _ = cross_entropy(hidden, weight, targets)
    total.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match="run the forward pass again"):
        total.backward()  # type: ignore[no-untyped-call]


# In the model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def batch(tmp_path: Path) -> Batch:
    write_blocks(tmp_path / "blocks", make_documents(3, seed=9), BLOCK_TOKENS, 1)
    reader = BlockReader(tmp_path / "blocks")
    return make_batch([reader[0], empty_block(BLOCK_TOKENS), reader[1], reader[2]])


def reference_losses(model: nn.Module, batch: Batch) -> Tensor:
    """[B], from all logits of a model with transformers' own attention and an explicit mask."""
    length = batch.tokens.shape[1]
    same = batch.documents[:, None, :, None] == batch.documents[:, None, None, :]
    mask = same & torch.ones(length, length, dtype=torch.bool).tril()
    logits = model(
        input_ids=batch.tokens, position_ids=batch.positions, attention_mask=mask, use_cache=False
    ).logits
    losses = F.cross_entropy(
        logits.flatten(0, 1), batch.targets.flatten(), ignore_index=-100, reduction="none"
    )
    return losses.view_as(batch.targets).sum(dim=1)


def plain_model(folder: Path) -> PreTrainedModel:
    plain: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="sdpa"
    )
    return plain


def test_the_model_has_the_loss_and_gradients_of_all_logits(
    folder: Path, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its head is tied to its embedding, whose gradient is of both."""
    monkeypatch.setattr(loss_module, "LOGITS_AT_ONCE", 7 * 64)
    model, plain = load_base(folder, torch.float32), plain_model(folder)
    expected = reference_losses(plain, batch)
    found = loss_sum(model, batch)
    torch.testing.assert_close(found, expected.sum(), rtol=1e-6, atol=0.0)
    torch.testing.assert_close(block_losses(model, batch), expected.detach(), rtol=1e-6, atol=1e-6)
    found.backward()  # type: ignore[no-untyped-call]
    expected.sum().backward()  # type: ignore[no-untyped-call]
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_names_weights_and_ties_stay(folder: Path) -> None:
    model, plain = load_base(folder, torch.float32), plain_model(folder)
    assert [name for name, _ in model.named_parameters()] == [
        name for name, _ in plain.named_parameters()
    ]
    assert list(model.state_dict()) == list(plain.state_dict())
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight  # type: ignore[no-untyped-call]


def test_a_copy_is_a_model_of_its_own(folder: Path, batch: Batch) -> None:
    model = load_base(folder, torch.float32)
    before = loss_sum(model, batch).item()
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert loss_sum(copied, batch).item() == before


def test_adapters_have_the_loss_of_all_logits(folder: Path, batch: Batch) -> None:
    lora = Lora.model_validate({"rank": 4, "alpha": 8, "dropout": 0.0})
    ours, theirs = (
        add_adapters(base, lora, seed=0)
        for base in (load_base(folder, torch.float32), plain_model(folder))
    )
    found, expected = loss_sum(ours, batch), reference_losses(theirs, batch).sum()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0)
    found.backward()  # type: ignore[no-untyped-call]
    expected.backward()  # type: ignore[no-untyped-call]
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (mine.grad is None) == (not mine.requires_grad), name
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_a_head_of_another_kind_is_refused(folder: Path) -> None:
    plain = plain_model(folder)
    plain.set_output_embeddings(nn.Linear(32, 64, bias=True))  # type: ignore[no-untyped-call]
    with pytest.raises(DataError, match="not a product with one matrix"):
        return_losses(plain)
