"""A frozen linear with 4-bit weights (NF4, double quantization, QLoRA), as bitsandbytes has it."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from pipeline_lib.arch.geometry import NF4_BLOCK as BLOCK
from pipeline_lib.arch.geometry import OF_HEADS
from pipeline_lib.core.errors import ConfigError, DataError
from pipeline_lib.core.text import how_to_install

# The format (Dettmers et al. 2023, arXiv 2305.14314, section 3): each block of 64 values of a row
# has 4-bit codes and the largest magnitude in it, `absmax`. These are quantized too: less their
# mean over the whole weight, in blocks of 256 with one fp32 scale each, to 8 bits. That is 0.5 +
# 1/64 + 4/16384 bytes a value.
#
# All of it is kept in plain parameters of bytes: FSDP2 shards them like others, and its mixed
# precision, which casts floating-point parameters, leaves them alone.

NESTED_BLOCK = 256  # absmax values that share a scale
_ROWS_AT_ONCE = 2**22  # values that are quantized at once, which takes several fp32 copies of them
_ZERO = 7  # the code of 0.0


class Nf4Linear(nn.Module):
    """A linear without trainable parameters.

    `codes` is [outputs, inputs / 2], `absmax` [outputs, inputs / 64]. `statistics` holds fp32
    values as bytes: the mean of all absmax values, then the scale of each NESTED_BLOCK of them.
    """

    def __init__(self, linear: nn.Linear) -> None:
        """Take the place of `linear`, without values, on its device; its bias is kept."""
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        # without autocast, and what the weight is rounded to before
        self.compute_dtype = linear.weight.dtype
        blocks = self.out_features * self.in_features // BLOCK

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(
                torch.empty(shape, dtype=torch.uint8, device=linear.weight.device),
                requires_grad=False,
            )

        self.codes = empty(self.out_features, self.in_features // 2)
        self.absmax = empty(self.out_features, self.in_features // BLOCK)
        self.statistics = empty(4 + 4 * -(-blocks // NESTED_BLOCK))
        self.bias = linear.bias

    @property
    def parts(self) -> tuple[nn.Parameter, nn.Parameter, nn.Parameter]:
        """`codes`, `absmax` and `statistics`."""
        return self.codes, self.absmax, self.statistics

    def extra_repr(self) -> str:
        """Return the sizes, for the model's description."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}"
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Return hidden x weight' + bias: [..., outputs], in the compute dtype."""
        dtype = dtype_of(self, hidden)
        rows = hidden.to(dtype).flatten(0, -2)
        bias = None if self.bias is None else self.bias.to(dtype)
        output = frozen_linear(rows, *self.parts, bias)
        return cast(Tensor, output.view(*hidden.shape[:-1], self.out_features))


def dtype_of(linear: Nf4Linear, hidden: Tensor) -> torch.dtype:
    """Return the dtype in which `linear` computes now: that of autocast, if it is enabled."""
    kind = hidden.device.type
    return (
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else linear.compute_dtype
    )


# The product, dequantizing in the forward and again in the backward pass, so that no dequantized
# weight is kept.


@torch.library.custom_op("qwen3_pipeline::frozen_nf4", mutates_args=())
def frozen_linear(
    hidden: Tensor, codes: Tensor, absmax: Tensor, statistics: Tensor, bias: Tensor | None
) -> Tensor:
    """Return hidden x weight' + bias, [N, outputs], for `hidden` [N, inputs], quantized."""
    return nn.functional.linear(hidden, dequantized(codes, absmax, statistics, hidden.dtype), bias)


@frozen_linear.register_fake
def _(
    hidden: Tensor, codes: Tensor, absmax: Tensor, statistics: Tensor, bias: Tensor | None
) -> Tensor:
    return hidden.new_empty(len(hidden), len(codes))


@torch.library.custom_op("qwen3_pipeline::frozen_nf4_backward", mutates_args=())
def frozen_linear_backward(
    gradient: Tensor, codes: Tensor, absmax: Tensor, statistics: Tensor
) -> Tensor:
    """Return the gradient of `hidden`."""
    return gradient @ dequantized(codes, absmax, statistics, gradient.dtype)


@frozen_linear_backward.register_fake
def _(gradient: Tensor, codes: Tensor, absmax: Tensor, statistics: Tensor) -> Tensor:
    return gradient.new_empty(len(gradient), 2 * codes.shape[1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:4])


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return frozen_linear_backward(gradient.contiguous(), *ctx.saved_tensors), None, None, None, None


frozen_linear.register_autograd(_backward, setup_context=_save)


def dequantized(codes: Tensor, absmax: Tensor, statistics: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight [outputs, inputs] of the parameters of an `Nf4Linear`, in `dtype`."""
    operators = _library()
    numbers = statistics.view(torch.float32)
    scales = operators.dequantize_blockwise(
        absmax.flatten(), numbers[1:], _dynamic_map(str(absmax.device)), NESTED_BLOCK, torch.float32
    )
    scales += numbers[0]
    shape = (codes.shape[0], 2 * codes.shape[1])
    return cast(
        Tensor, operators.dequantize_4bit(codes.view(-1, 1), scales, BLOCK, "nf4", shape, dtype)
    )


def require_bitsandbytes() -> None:
    """Raise ConfigError if bitsandbytes is not installed."""
    _library()


@lru_cache(maxsize=1)
def _library() -> Any:
    """Return bitsandbytes' operators."""
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        text = f"nf4 needs bitsandbytes: {how_to_install('nf4')}"
        raise ConfigError("train.lora.base", [text]) from error
    return torch.ops.bitsandbytes


@lru_cache
def _dynamic_map(device: str) -> Tensor:
    """Return bitsandbytes' 256 signed 8-bit values, fp32, on `device`."""
    from bitsandbytes.functional import create_dynamic_map

    return cast(Tensor, create_dynamic_map().to(device))  # type: ignore[no-untyped-call]


# Quantization. A block lies within a row, so each rank quantizes its own rows. The mean and the
# scales are those of the whole weight: the result is bitwise the same for any number of ranks, and
# what bitsandbytes gives for the whole.


def quantize_rows(rows: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Return the codes [n, inputs / 2] and the fp32 absmax [n, inputs / 64] of `rows`.

    `rows` is [n, inputs]. Raises DataError if a value is not finite; `name` is the weight's.
    """
    inputs = rows.shape[1]
    codes = torch.empty(len(rows), inputs // 2, dtype=torch.uint8, device=rows.device)
    absmax = torch.empty(len(rows), inputs // BLOCK, dtype=torch.float32, device=rows.device)
    at_once = max(1, _ROWS_AT_ONCE // inputs)
    for start in range(0, len(rows), at_once):
        part = rows[start : start + at_once].contiguous()
        if not torch.isfinite(part).all():
            raise DataError(f"{name} has values that are not finite; get the model again")
        found, largest = _library().quantize_4bit(part, BLOCK, "nf4", torch.uint8)
        is_zero = largest == 0  # on GPUs its codes would be those of NaN
        blocks = found.view(len(largest), BLOCK // 2)
        blocks.masked_fill_(is_zero.unsqueeze(1), _ZERO << 4 | _ZERO)
        codes[start : start + at_once] = blocks.view(len(part), -1)
        absmax[start : start + at_once] = largest.view(len(part), -1)
    return codes, absmax


def quantize_absmax(absmax: Tensor) -> tuple[Tensor, Tensor]:
    """Return the 8-bit codes of the weight's `absmax`, in its shape, and the statistics' bytes."""
    flat = absmax.flatten()
    with _one_thread():  # the last bit of a mean depends on their number
        mean = flat.mean()
    codes, scales = _library().quantize_blockwise(
        flat - mean, _dynamic_map(str(flat.device)), NESTED_BLOCK
    )
    return codes.view(absmax.shape), torch.cat([mean.view(1), scales]).view(torch.uint8)


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def rounded(weight: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Return the whole `weight`, rounded to `dtype`, quantized and dequantized in `dtype`.

    Raises DataError.
    """
    codes, absmax = quantize_rows(weight.to(dtype), name)
    return dequantized(codes, *quantize_absmax(absmax), dtype)


def quantize_linears(layers: list[nn.Module]) -> None:
    """Replace all linears in the decoder `layers` by quantized ones, which still need values.

    Raises DataError naming a linear that the format does not fit, or if the layers have experts.
    """
    require_bitsandbytes()
    for layer in layers:
        for name, module in list(layer.named_modules()):
            if name.endswith("experts"):
                raise DataError(
                    "train.lora.base: nf4 does not work for models with experts; set it to "
                    "unquantized"
                )
            if not isinstance(module, nn.Linear) or name.endswith(OF_HEADS):
                continue
            if module.in_features % BLOCK:
                text = (
                    f"nf4 needs inputs in multiples of {BLOCK}, but {name} has {module.in_features}"
                )
                raise DataError(f"train.lora.base: {text}; set it to unquantized")
            layer.set_submodule(name, Nf4Linear(module))
