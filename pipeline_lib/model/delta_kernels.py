"""The gated delta rule over packed documents by fla-core's Triton kernels, forward and backward.

A call never waits for the GPU: the chunks of all documents are listed there, in as many rows as
there can be chunks. Importing this module needs fla-core and Triton.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from fla.modules.norm import l2norm
from fla.modules.norm.l2norm import l2norm_bwd, l2norm_fwd
from fla.ops.common import chunk_delta_h, chunk_o
from fla.ops.common.chunk_delta_h import (
    chunk_gated_delta_rule_bwd_dhu,
    chunk_gated_delta_rule_fwd_h,
)
from fla.ops.common.chunk_o import (
    chunk_bwd_dqkwg,
    chunk_bwd_dv_local,
    chunk_bwd_kernel_dqkwg,
    chunk_fwd_o,
)
from fla.ops.gated_delta_rule import chunk_fwd, wy_fast
from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_intra
from fla.ops.gated_delta_rule.wy_fast import prepare_wy_repr_bwd, recompute_w_u_fwd
from fla.ops.utils import chunk_local_cumsum, cumsum
from fla.ops.utils.constant import RCP_LN2
from fla.utils import IS_NVIDIA_HOPPER
from torch import Tensor

from pipeline_lib.arch.geometry import DELTA_CHUNK

# Tiles, warps and stages of each kernel on Hopper: of fla-core's there the fastest over documents
# of 512, 4,096 and 16,384 tokens at widths of 128, on an H200 (`python -m benchmarks.delta
# --choose`).
ON_HOPPER: dict[str, tuple[dict[str, int], int, int]] = {
    "l2norm_fwd_kernel": ({"BT": 16}, 4, 3),
    "l2norm_bwd_kernel": ({"BT": 8}, 4, 3),
    "chunk_local_cumsum_scalar_kernel": ({}, 2, 3),
    "chunk_gated_delta_rule_fwd_kkt_solve_kernel": ({"BK": 64}, 1, 3),
    "recompute_w_u_fwd_kernel": ({}, 4, 3),
    "prepare_wy_repr_bwd_kernel": ({}, 4, 3),
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": ({"BV": 64}, 4, 4),
    "chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64": ({"BV": 32}, 4, 2),
    "chunk_fwd_kernel_o": ({"BK": 64, "BV": 64}, 4, 3),
    "chunk_bwd_kernel_dqkwg": ({}, 4, 4),
    "chunk_bwd_kernel_dv_local": ({}, 2, 4),
}


def tuners() -> dict[str, Any]:
    """Return fla-core's kernels of which there are several configurations, by name."""
    found = {}
    for module in (l2norm, cumsum, chunk_fwd, wy_fast, chunk_delta_h, chunk_o):
        for name, kernel in vars(module).items():
            # it is inside of heuristics
            while kernel is not None and not hasattr(kernel, "configs"):
                kernel = getattr(kernel, "fn", None)
            if kernel is not None:
                found[name] = kernel
    return found


OFFERED = {name: list(tuner.configs) for name, tuner in tuners().items()}  # before `pin`


def pin() -> None:
    """Leave each kernel one configuration on Hopper.

    Otherwise Triton compiles and times all of them when a training starts, for minutes, and may
    take others when it is resumed.
    """
    if not IS_NVIDIA_HOPPER:
        return
    for name, tuner in tuners().items():
        if name in ON_HOPPER:
            tiles, warps, stages = ON_HOPPER[name]
            tuner.configs = [triton.Config(tiles, num_warps=warps, num_stages=stages)]


class _Chunks(NamedTuple):
    """The chunks of all documents, in order."""

    ends: Tensor  # [documents + 1]: cu_seq_lens
    begins: Tensor  # [documents + 1]: the first chunk of each document
    # [rows, 2]: a chunk's document and its number there; spare rows lie behind the last document
    numbers: Tensor

    def named(self) -> dict[str, Any]:
        """Return the arguments of kernels that take a chunk each."""
        return {"cu_seqlens": self.ends, "chunk_indices": self.numbers}

    def in_order(self) -> dict[str, Any]:
        """Return the arguments of kernels that take a document each."""
        return {**self.named(), "chunk_offsets": self.begins}


def _chunks_of(ends: Tensor, tokens: int) -> _Chunks:
    documents = len(ends) - 1
    begins = F.pad(((ends.diff() + (DELTA_CHUNK - 1)) // DELTA_CHUNK).cumsum(0), (1, 0)).to(
        ends.dtype
    )
    rows = torch.arange(tokens // DELTA_CHUNK + documents, dtype=ends.dtype, device=ends.device)
    document = (torch.searchsorted(begins, rows, right=True) - 1).clamp(max=documents - 1)
    return _Chunks(
        ends, begins, torch.stack([document.to(ends.dtype), rows - begins[document]], dim=1)
    )


def forward(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, ends: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute `delta_rule`: its output, and the inverses that its backward pass needs.

    These are [N, H, E] and [N, H, DELTA_CHUNK].
    """
    with torch.cuda.device(value.device):
        chunks = _chunks_of(ends, len(value))
        query, key, value, log_decay, beta = _batched(query, key, value, log_decay, beta)
        query = l2norm_fwd(query)[0]
        key = l2norm_fwd(key)[0]
        decay = chunk_local_cumsum(
            log_decay, chunk_size=DELTA_CHUNK, scale=RCP_LN2, **chunks.named()
        )
        keys, values, inverses = chunk_gated_delta_rule_fwd_intra(
            k=key, v=value, g=decay, beta=beta, chunk_size=DELTA_CHUNK, **chunks.named()
        )
        states, changes, _ = chunk_gated_delta_rule_fwd_h(
            k=key, w=keys, u=values, g=decay, chunk_size=DELTA_CHUNK, **chunks.in_order()
        )
        scale = query.shape[-1] ** -0.5
        output = chunk_fwd_o(
            q=query,
            k=key,
            v=changes,
            h=states,
            g=decay,
            scale=scale,
            chunk_size=DELTA_CHUNK,
            **chunks.named(),
        )
    return output[0], inverses[0]


def backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    inverses: Tensor,
    ends: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute `delta_rule_backward`.

    The states before each chunk are computed again rather than kept.
    """
    with torch.cuda.device(value.device):
        chunks = _chunks_of(ends, len(value))
        of_output, query, key, value, log_decay, beta, inverses = _batched(
            gradient, query, key, value, log_decay, beta, inverses
        )
        (query, of_norms), (key, of_key_norms) = l2norm_fwd(query), l2norm_fwd(key)
        decay = chunk_local_cumsum(
            log_decay, chunk_size=DELTA_CHUNK, scale=RCP_LN2, **chunks.named()
        )
        keys, values = recompute_w_u_fwd(
            k=key, v=value, beta=beta, A=inverses, g=decay, **chunks.named()
        )
        states, changes, _ = chunk_gated_delta_rule_fwd_h(
            k=key, w=keys, u=values, g=decay, chunk_size=DELTA_CHUNK, **chunks.in_order()
        )
        shared: dict[str, Any] = {
            "g": decay,
            "scale": query.shape[-1] ** -0.5,
            "chunk_size": DELTA_CHUNK,
            "do": of_output,
        }
        of_changes = chunk_bwd_dv_local(q=query, k=key, **shared, **chunks.named())
        of_states, _, of_changes = chunk_gated_delta_rule_bwd_dhu(
            q=query, k=key, w=keys, dv=of_changes, **shared, **chunks.in_order()
        )
        inside = _in_right_tiles if IS_NVIDIA_HOPPER else chunk_bwd_dqkwg
        of_query, of_key, of_keys, of_decay = inside(
            q=query,
            k=key,
            v=changes,
            w=keys,
            h=states,
            dv=of_changes,
            dh=of_states,
            **shared,
            **chunks.named(),
        )
        more_key, of_value, of_beta, more_decay = prepare_wy_repr_bwd(
            k=key,
            v=value,
            beta=beta,
            g=decay,
            A=inverses,
            dw=of_keys,
            du=of_changes,
            **chunks.named(),
        )
        of_query = l2norm_bwd(query, of_norms, of_query)
        of_key = l2norm_bwd(key, of_key_norms, of_key.add_(more_key))
        of_decay = chunk_local_cumsum(
            of_decay.add_(more_decay), chunk_size=DELTA_CHUNK, reverse=True, **chunks.named()
        )
    return of_query[0], of_key[0], of_value[0], of_decay[0], of_beta[0]


def _batched(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return each [N, ...] as contiguous [1, N, ...], the shape of packed documents in fla-core."""
    return tuple(tensor.contiguous()[None] for tensor in tensors)


def _in_right_tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    g: Tensor,
    h: Tensor,
    dv: Tensor,
    do: Tensor,
    dh: Tensor,
    scale: float,
    chunk_size: int,
    cu_seqlens: Tensor,
    chunk_indices: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Do what `chunk_bwd_dqkwg` does on Hopper, with its kernel in tiles of 32 x 32 or 128 x 128.

    Triton 3.4 to 3.7.0 compiles it wrongly for Hopper if its tiles are 64 wide
    (flash-linear-attention, issue 640); in tiles of 32 by 128 it reads where it must not (seen with
    3.6). fla-core refuses it there whatever the tiles are.
    """
    _, tokens, key_heads, width = k.shape
    heads, values = v.shape[2:]
    tile = 32 if min(width, values) <= 64 else 128
    tiles = triton.cdiv(width, tile)
    of_query, of_key = (q.new_empty(1, tokens, heads, width) for _ in range(2))
    of_keys = torch.empty_like(w)
    of_decay = g.new_empty(tiles, *g.shape)
    chunk_bwd_kernel_dqkwg[(tiles * len(chunk_indices), heads)](
        **{"q": q, "k": k, "v": v, "g": g, "g_gamma": None, "h": h, "do": do, "dh": dh, "dv": dv},
        **{"dq": of_query, "dk": of_key, "dw": of_keys, "dg": of_decay},
        **{"cu_seqlens": cu_seqlens, "chunk_indices": chunk_indices, "scale": scale},
        **{"B": 1, "T": tokens, "H": key_heads, "HV": heads, "K": width, "V": values},
        **{"BT": chunk_size, "BK": tile, "BV": tile, "STATE_V_FIRST": False},
    )
    of_query, of_key = (  # the sum over the heads that share a key
        tensor.view(1, tokens, key_heads, -1, width).sum(3) for tensor in (of_query, of_key)
    )
    return of_query, of_key, of_keys, of_decay.sum(0)
