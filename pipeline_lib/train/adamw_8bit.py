"""AdamW with 8-bit moments, by torchao: 2 bytes per trained parameter instead of 8. An approximation.

A moment has 8-bit codes and a scale for each block of 256. Checkpoints hold the dequantized values,
in fp32: read back on the same ranks they become the same values again, bit for bit; on others,
blocks have other boundaries, and values are rounded anew. A moment of fewer than 4,096 elements on
a rank, or not of whole blocks, is in fp32.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from pipeline_lib.config.train import Train
from pipeline_lib.core.errors import ConfigError
from pipeline_lib.core.text import how_to_install
from pipeline_lib.train.state import own_part


def make_8bit(groups: list[dict[str, Any]], train: Train) -> torch.optim.Optimizer:
    """Return torchao's AdamW over `groups`, with zero moments.

    Raises ConfigError if torchao is not installed.
    """
    try:
        from torchao.optim import AdamW8bit  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError as error:
        text = "train.optimizer: adamw_8bit needs the library torchao, which is not installed"
        raise ConfigError("train", [f"{text}: {how_to_install('optim8bit')}"]) from error
    optimizer: Any = AdamW8bit(
        groups, lr=train.lr, betas=(train.beta1, train.beta2), eps=train.adam_eps
    )
    parameters = [parameter for group in groups for parameter in group["params"]]
    if all(parameter.device.type == "cpu" for parameter in parameters):
        compiled = optimizer.step

        def step(*arguments: Any) -> Any:
            # Compiling the update for every shape on a CPU would take a C++ compiler and minutes.
            with torch.compiler.set_stance("force_eager"):
                return compiled(*arguments)

        optimizer.step = step
    for parameter in parameters:  # as torchao does at the first update
        optimizer.state[parameter] = {
            "step": torch.zeros(()),
            "exp_avg": optimizer._new_buffer(parameter, True),
            "exp_avg_sq": optimizer._new_buffer(parameter, False),
        }
    return optimizer  # type: ignore[no-any-return]


def is_8bit(tensor: Tensor) -> bool:
    """Return whether `tensor`, or the local part of a DTensor, is stored as 8-bit codes."""
    return hasattr(own_part(tensor), "dequantize") and hasattr(own_part(tensor), "codes")


def values_of(moment: Tensor) -> Tensor:
    """Return 8-bit `moment` dequantized, in fp32 and new memory; a DTensor if `moment` is one."""
    codes: Any = own_part(moment)
    values: Tensor = codes.dequantize().float()
    if not isinstance(moment, DTensor):
        return values
    placed: Tensor = DTensor.from_local(
        values,
        moment.device_mesh,
        moment.placements,
        run_check=False,
        shape=moment.shape,
        stride=moment.stride(),
    )
    return placed


def take_values(moment: Tensor, values: Tensor) -> None:
    """Set 8-bit `moment` to `values`: exactly, if `values_of` returned them for its blocks."""
    from torchao.optim import quant_utils  # type: ignore[import-not-found,import-untyped,unused-ignore]

    state: Any = own_part(moment)
    blocks = own_part(values).reshape(-1, state.block_size)
    largest = blocks.abs().amax(-1).clip(1e-12)
    # A block's scale is its largest value, or in a signed moment that divided by the most negative
    # code, not -1.
    candidates = [largest]
    least_code = float(-state.qmap[0])
    if least_code > 0:
        by_code = largest / least_code
        up = torch.full_like(largest, torch.inf)
        down = torch.zeros_like(largest)
        candidates += [by_code, torch.nextafter(by_code, up), torch.nextafter(by_code, down)]
    codes = torch.empty_like(blocks, dtype=state.codes.dtype)
    scale = largest.clone()
    is_open = torch.ones_like(largest, dtype=torch.bool)
    for candidate in candidates:
        found = quant_utils.quantize_8bit_with_qmap(blocks / candidate[:, None], state.qmap).to(
            codes.dtype
        )
        is_exact = (state.qmap[found.int()] * candidate[:, None] == blocks).all(-1)
        chosen = is_open & is_exact if candidate is not largest else is_open
        codes[chosen], scale[chosen] = found[chosen], candidate[chosen]
        is_open &= ~is_exact
    state.codes.copy_(codes.view_as(state.codes))
    state.scale.copy_(scale)
