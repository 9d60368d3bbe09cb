"""AdamW whose moments have 8 bits, by torchao: 2 bytes per trained parameter instead of 8. An approximation.

A moment has 8-bit codes and a scale for each block of 256. Checkpoints hold the values that these mean, in fp32: read
back on the same ranks they become the same values again, bit for bit; on others, blocks have other limits, and values
are rounded anew. A moment of fewer than 4,096 elements on a rank, or not of whole blocks, is in fp32.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipeline_lib.base.errors import ConfigError
from pipeline_lib.config.schema import Train
from pipeline_lib.train.state import MOMENTS, own_part


def make_8bit(groups: list[dict[str, Any]], train: Train) -> torch.optim.Optimizer:
    """Torchao's AdamW over `groups`, with its moments made, at zero. Raises ConfigError without the extra."""
    try:
        from torchao.optim import AdamW8bit  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError as error:
        text = "train.optimizer: adamw_8bit needs the library torchao, which is not installed"
        raise ConfigError("train", [f"{text}: pip install 'qwen3-pipeline[optim8bit]'"]) from error
    optimizer: Any = AdamW8bit(groups, lr=train.lr, betas=(train.beta1, train.beta2))
    if all(parameter.device.type == "cpu" for group in groups for parameter in group["params"]):
        _never_compile(optimizer)
    for group in groups:
        for parameter in group["params"]:
            make_moments(optimizer, parameter)
    return optimizer  # type: ignore[no-any-return]


def _never_compile(optimizer: Any) -> None:
    """Torchao compiles its update for every shape, which on a CPU takes a C++ compiler and minutes."""
    plain = optimizer.step

    def step(*arguments: Any) -> Any:
        with torch.compiler.set_stance("force_eager"):
            return plain(*arguments)

    optimizer.step = step


def make_moments(optimizer: Any, parameter: nn.Parameter) -> None:
    """The state of a parameter, as torchao makes it at the first update."""
    buffers = {moment: optimizer._new_buffer(parameter, moment == "exp_avg") for moment in MOMENTS}
    optimizer.state[parameter] = {"step": torch.zeros(()), **buffers}


def is_8bit(tensor: Tensor) -> bool:
    """Whether `tensor`, or what a DTensor has here, is made of codes."""
    return hasattr(own_part(tensor), "dequantize") and hasattr(own_part(tensor), "codes")


def values_of(moment: Tensor) -> Tensor:
    """The values of 8-bit `moment`, in fp32 and of its own memory; a DTensor of a DTensor."""
    codes: Any = own_part(moment)
    values: Tensor = codes.dequantize().float()
    if not isinstance(moment, DTensor):
        return values
    placed: Tensor = DTensor.from_local(
        values, moment.device_mesh, moment.placements, run_check=False, shape=moment.shape, stride=moment.stride()
    )
    return placed


def take_values(moment: Tensor, values: Tensor) -> None:
    """Let 8-bit `moment` mean `values`: exactly, if they are what `values_of` gave for the same blocks."""
    from torchao.optim import quant_utils  # type: ignore[import-not-found,import-untyped,unused-ignore]

    state: Any = own_part(moment)
    blocks = own_part(values).reshape(-1, state.block_size)
    largest = blocks.abs().amax(-1).clip(1e-12)
    codes, scale = torch.empty_like(blocks, dtype=state.codes.dtype), largest.clone()
    is_open = torch.ones_like(largest, dtype=torch.bool)
    for candidate in _scales(largest, float(-state.qmap[0])):
        found = quant_utils.quantize_8bit_with_qmap(blocks / candidate[:, None], state.qmap).to(codes.dtype)
        is_exact = (state.qmap[found.int()] * candidate[:, None] == blocks).all(-1)
        chosen = is_open & is_exact if candidate is not largest else is_open
        codes[chosen], scale[chosen] = found[chosen], candidate[chosen]
        is_open &= ~is_exact
    state.codes.copy_(codes.view_as(state.codes))
    state.scale.copy_(scale)


def _scales(largest: Tensor, least_code: float) -> list[Tensor]:
    """What a block's scale may have been: its largest value, or that by the most negative code, which is not -1."""
    if least_code <= 0:  # a moment without sign
        return [largest]
    by_code = largest / least_code
    up, down = torch.full_like(largest, torch.inf), torch.zeros_like(largest)
    return [largest, by_code, torch.nextafter(by_code, up), torch.nextafter(by_code, down)]
