"""Causal attention within the documents of packed blocks, without a T x T mask."""

import functools
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from pipeline_lib.core.errors import TrainingError
from pipeline_lib.model.context import Part, heads_to_tokens, tokens_to_heads
from pipeline_lib.model.gpu import AMPERE
from pipeline_lib.model.recompute import once

# cuDNN's attention kernel for Hopper, up to twice as fast as torch's flash kernel. torch offers it
# only for batches of equal rows; cuDNN's own front end also takes packed documents of different
# lengths. A graph is built once per shape (about 50 ms) and cached. The kernel is a custom
# operator, so that compiled layers contain it as one opaque step.

_WIDEST_HEAD = 128  # the largest that the backward pass supports
_HOPPER = 9  # other GPUs have other kernels, which are untested here
_OFFSETS = ("q_offsets", "k_offsets", "stats_offsets")  # at which documents begin, in elements
_HAS_FRONT_END = torch.version.cuda is not None and importlib.util.find_spec("cudnn") is not None


def has_kernel(value: Tensor) -> bool:
    """Return True if torch's flash kernel takes tensors like `value` [..., D].

    It takes half precision, from Ampere on.
    """
    return (
        value.is_cuda
        and value.dtype in (torch.bfloat16, torch.float16)
        and value.shape[-1] % 8 == 0
        and torch.cuda.get_device_properties(value.device).major >= AMPERE
    )


def is_available(value: Tensor) -> bool:
    """Return True if cuDNN's kernel takes tensors like `value` [..., D].

    It takes half precision, on a Hopper GPU.
    """
    return (
        has_kernel(value)
        and value.shape[-1] <= _WIDEST_HEAD
        and _HAS_FRONT_END
        and torch.cuda.get_device_properties(value.device).major == _HOPPER
    )


@dataclass(frozen=True)
class Shape:
    """The key for which a graph is built.

    `longest` is at least the length of the longest document.
    """

    documents: int
    longest: int
    tokens: int
    heads: int
    kv_heads: int
    width: int
    scaling: float
    dtype: torch.dtype
    device: int
    is_deterministic: bool


@torch.library.custom_op("qwen3_pipeline::cudnn_attention", mutates_args=())
def cudnn_attention(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int, scaling: float
) -> tuple[Tensor, Tensor]:
    """Compute causal attention within each document: query [B, H, T, D], key, value [B, G, T, D].

    `ends` are cu_seq_lens. No input is copied if the heads of a token are adjacent in memory, as
    the projections leave them. Returns the output [B, T, H, D] and the log-sum-exp of the softmax
    [B * T, H] in fp32.
    """
    output, sums = once(lambda: _cudnn_forward(query, key, value, ends, longest, scaling))
    return output, sums


def _cudnn_forward(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int, scaling: float
) -> tuple[Tensor, Tensor]:
    shape = _shape_of(query, key, ends, longest, scaling)
    output = query.new_empty((shape.tokens, shape.heads, shape.width))
    sums = torch.empty((shape.tokens, shape.heads), dtype=torch.float32, device=query.device)
    _run(_forward_graph(shape), ends, {**_inputs(query, key, value), "o": output, "stats": sums})
    return output.view(query.shape[0], -1, shape.heads, shape.width), sums


@cudnn_attention.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int, scaling: float
) -> tuple[Tensor, Tensor]:
    batch, heads, length, width = query.shape
    sums = query.new_empty((batch * length, heads), dtype=torch.float32)
    return query.new_empty((batch, length, heads, width)), sums


@torch.library.custom_op("qwen3_pipeline::cudnn_attention_backward", mutates_args=())
def cudnn_attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    sums: Tensor,
    ends: Tensor,
    longest: int,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, a token's heads adjacent in memory."""
    shape = _shape_of(query, key, ends, longest, scaling)
    inputs = _inputs(query, key, value)
    outputs = {"o": output.flatten(0, 1), "stats": sums, "do": gradient.contiguous().flatten(0, 1)}
    gradients = {f"d{name}": torch.empty_like(tensor) for name, tensor in inputs.items()}
    _run(_backward_graph(shape), ends, {**inputs, **outputs, **gradients})
    batch = query.shape[0]
    return (
        _by_head(gradients["dq"], batch),
        _by_head(gradients["dk"], batch),
        _by_head(gradients["dv"], batch),
    )


def _by_head(tensor: Tensor, batch: int) -> Tensor:
    """Return `tensor` [B * T, H, D] as [B, H, T, D]."""
    _, heads, width = tensor.shape
    return tensor.view(batch, -1, heads, width).transpose(1, 2)


@cudnn_attention_backward.register_fake
def _(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_by_head(query), _empty_by_head(key), _empty_by_head(value)


def _empty_by_head(tensor: Tensor) -> Tensor:
    """Return a new [B, H, T, D] as `tensor`, in whose memory a token's heads are adjacent."""
    batch, heads, length, width = tensor.shape
    return tensor.new_empty((batch, length, heads, width)).transpose(1, 2)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, ends, ctx.longest, ctx.scaling = inputs
    ctx.save_for_backward(query, key, value, ends, *output)


def _backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, ends, output, sums = ctx.saved_tensors
    gradients = cudnn_attention_backward(
        gradient, query, key, value, output, sums, ends, ctx.longest, ctx.scaling
    )
    return (*gradients, None, None, None)


cudnn_attention.register_autograd(_backward, setup_context=_save)


def _inputs(query: Tensor, key: Tensor, value: Tensor) -> dict[str, Tensor]:
    """Return each [B, H, T, D] as contiguous [B * T, H, D]; cuDNN is wrong for other layouts."""
    inputs = {}
    for name, tensor in (("q", query), ("k", key), ("v", value)):
        inputs[name] = tensor.transpose(1, 2).contiguous().flatten(0, 1)
    return inputs


def _shape_of(query: Tensor, key: Tensor, ends: Tensor, longest: int, scaling: float) -> Shape:
    batch, heads, length, width = query.shape
    if batch * length * heads * width >= 2**31:
        raise TrainingError(
            f"micro-batches of {batch * length:,} tokens are too large for cuDNN's offsets; set "
            "train.attention: flash or a smaller train.micro_batch_blocks"
        )
    return Shape(
        documents=len(ends) - 1,
        longest=longest,
        tokens=batch * length,
        heads=heads,
        kv_heads=key.shape[1],
        width=width,
        scaling=scaling,
        dtype=query.dtype,
        device=query.device.index or 0,
        is_deterministic=torch.are_deterministic_algorithms_enabled(),
    )


@functools.cache
def _handle(device: int) -> Any:
    import cudnn

    with torch.cuda.device(device):
        return cudnn.create_handle()


class _Graph:
    """A cuDNN graph over packed documents, its tensors by name, and its workspace once built."""

    def __init__(self, shape: Shape) -> None:
        import cudnn

        self.cudnn = cudnn
        self.shape = shape
        is_bf16 = shape.dtype == torch.bfloat16
        self.graph = cudnn.pygraph(
            io_data_type=cudnn.data_type.BFLOAT16 if is_bf16 else cudnn.data_type.HALF,
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
            handle=_handle(shape.device),
        )
        elements = [[shape.heads * shape.width], [shape.kv_heads * shape.width], [shape.heads]]
        # Of a token's queries, keys and sums: [3, 1].
        self.elements = torch.tensor(elements, dtype=torch.int32, device=f"cuda:{shape.device}")
        sizes = {"lengths": shape.documents}
        sizes |= dict.fromkeys(_OFFSETS, shape.documents + 1)
        self.tensors: dict[str, Any] = {}
        for name, size in sizes.items():
            self.tensors[name] = self.graph.tensor(
                name=name, dim=[size, 1, 1, 1], stride=[1, 1, 1, 1], data_type=cudnn.data_type.INT32
            )
        self.masks = {  # causal attention within documents
            "attn_scale": shape.scaling,
            "use_padding_mask": True,
            "seq_len_q": self.tensors["lengths"],
            "seq_len_kv": self.tensors["lengths"],
            "diagonal_band_right_bound": 0,
            "diagonal_alignment": cudnn.diagonal_alignment.TOP_LEFT,
        }

    def _layout(self, name: str) -> tuple[list[int], list[int], Any]:
        """Return a tensor's sizes, strides [documents, heads, longest, width] and offsets."""
        shape = self.shape
        is_key = name[-1] in "kv"
        heads = shape.kv_heads if is_key else shape.heads
        width = 1 if name == "stats" else shape.width
        place = "k_offsets" if is_key else "q_offsets"
        offsets = self.tensors["stats_offsets" if name == "stats" else place]
        size = [shape.documents, heads, shape.longest, width]
        return size, [shape.longest * heads * width, width, heads * width, 1], offsets

    def add_input(self, name: str) -> Any:
        """Add and return an input tensor of the graph."""
        size, stride, offsets = self._layout(name)
        kind = {"data_type": self.cudnn.data_type.FLOAT} if name == "stats" else {}
        self.tensors[name] = self.graph.tensor(name=name, dim=size, stride=stride, **kind)
        self.tensors[name].set_ragged_offset(offsets)
        return self.tensors[name]

    def mark_output(self, name: str, tensor: Any) -> None:
        """Mark `tensor` as an output of the graph."""
        size, stride, offsets = self._layout(name)
        tensor.set_output(True).set_dim(size).set_stride(stride)
        if name == "stats":
            tensor.set_data_type(self.cudnn.data_type.FLOAT)
        tensor.set_ragged_offset(offsets)
        self.tensors[name] = tensor

    @contextmanager
    def building(self) -> Iterator[None]:
        """Build the graph when the block, which adds the operation, ends; cuDNN picks the kernel.

        Raises TrainingError if cuDNN does not support the shape; its front end uses several error
        types for that.
        """
        try:
            yield
            self.graph.validate()
            self.graph.build_operation_graph()
            self.graph.create_execution_plans(
                [self.cudnn.heur_mode.A, self.cudnn.heur_mode.FALLBACK]
            )
            self.graph.check_support()
            self.graph.build_plans()
            self.workspace_bytes: int = self.graph.get_workspace_size()
        except (RuntimeError, ValueError, self.cudnn.cudnnGraphNotSupportedError) as error:
            text = f"cuDNN has no kernel for {self.shape} ({error})"
            raise TrainingError(f"{text}; set train.attention: flash") from error


@functools.cache
def _forward_graph(shape: Shape) -> _Graph:
    new = _Graph(shape)
    with new.building():
        query, key, value = (new.add_input(name) for name in ("q", "k", "v"))
        output, sums = new.graph.sdpa(
            name="forward", q=query, k=key, v=value, generate_stats=True, **new.masks
        )
        new.mark_output("o", output)
        new.mark_output("stats", sums)
    return new


@functools.cache
def _backward_graph(shape: Shape) -> _Graph:
    new = _Graph(shape)
    names = {"q": "q", "k": "k", "v": "v", "o": "o", "dO": "do", "stats": "stats"}
    with new.building():
        gradients = new.graph.sdpa_backward(
            name="backward",
            **{argument: new.add_input(name) for argument, name in names.items()},
            # else the workspace is sized for `longest` tokens per document
            max_total_seq_len_q=shape.tokens,
            max_total_seq_len_kv=shape.tokens,
            use_deterministic_algorithm=shape.is_deterministic,
            **new.masks,
        )
        for name, tensor in zip(("dq", "dk", "dv"), gradients, strict=True):
            new.mark_output(name, tensor)
    return new


def _run(graph: _Graph, ends: Tensor, tensors: dict[str, Tensor]) -> None:
    import cudnn

    shape = graph.shape
    handle = _handle(shape.device)
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(shape.device).cuda_stream)
    offsets = zip(_OFFSETS, ends * graph.elements, strict=True)
    known = {**tensors, **dict(offsets), "lengths": ends.diff()}
    workspace = torch.empty(graph.workspace_bytes, dtype=torch.uint8, device=ends.device)
    graph.graph.execute(
        {tensor: known[name] for name, tensor in graph.tensors.items()}, workspace, handle=handle
    )


# torch's flash kernel for documents of different lengths. The operator of `varlen_attn` cannot keep
# its result for the repetition of a layer (model/recompute.py), so this one calls the same kernels.

_CAUSAL: dict[str, Any] = {"window_size_left": -1, "window_size_right": 0}


@torch.library.custom_op("qwen3_pipeline::flash_attention", mutates_args=())
def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int, scaling: float
) -> tuple[Tensor, Tensor]:
    """Compute causal attention within each document: query [N, H, D], key and value [N, G, D].

    `ends` are cu_seq_lens. Returns the output [N, H, D] and the log-sum-exp of the softmax [H, N]
    in fp32.
    """
    output, sums = once(lambda: _flash_forward(query, key, value, ends, longest, scaling))
    return output, sums


def _flash_forward(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int, scaling: float
) -> tuple[Tensor, Tensor]:
    # without dropout, causal
    arguments = (query, key, value, ends, ends, longest, longest, 0.0, True)
    output, sums, *_ = torch.ops.aten._flash_attention_forward(
        *arguments, return_debug_mask=False, scale=scaling, **_CAUSAL
    )
    return output, sums


@flash_attention.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int, scaling: float
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty(
        (query.shape[1], query.shape[0]), dtype=torch.float32
    )


@torch.library.custom_op("qwen3_pipeline::flash_attention_backward", mutates_args=())
def flash_attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    sums: Tensor,
    ends: Tensor,
    longest: int,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value."""
    random = torch.zeros(
        (2,), dtype=torch.uint64, device=query.device
    )  # of dropout, which there is none
    arguments = (
        gradient,
        query,
        key,
        value,
        output,
        sums,
        ends,
        ends,
        longest,
        longest,
        0.0,
        True,
        random,
    )
    unused = torch.empty(0, device=query.device)
    of_query, of_key, of_value = torch.ops.aten._flash_attention_backward(
        *arguments, unused, scale=scaling, **_CAUSAL
    )
    return of_query, of_key, of_value


@flash_attention_backward.register_fake
def _(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _flash_backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, ends, output, sums = ctx.saved_tensors
    gradients = flash_attention_backward(
        gradient, query, key, value, output, sums, ends, ctx.longest, ctx.scaling
    )
    return (*gradients, None, None, None)


flash_attention.register_autograd(_flash_backward, setup_context=_save)


# Attention as transformers calls it. On CUDA one kernel serves the whole batch: cuDNN's if
# available, else torch's flash kernel. Elsewhere, and in fp32, each document is computed by itself.
# A document's output does not depend on the documents around it. Sliding windows and padded rows
# for generation are not supported.

PACKED = "packed"
PACKED_FLASH = "packed_by_torch"  # without cuDNN


def register() -> None:
    """Register the attention with transformers as `attn_implementation=PACKED` and PACKED_FLASH."""
    AttentionInterface.register(PACKED, packed_attention)
    AttentionInterface.register(
        PACKED_FLASH, functools.partial(packed_attention, takes_cudnn=False)
    )


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | Tensor | None = None,
    takes_cudnn: bool = True,
    part: Part | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention within documents, with the signature that transformers expects.

    `query` is [B, H, T, D], `key` and `value` are [B, G, T, D]; returns the output [B, T, H, D] and
    None. `cu_seq_lens_q`, int32, holds the flat offsets at which documents begin, and ends with one
    or more B * T. `max_length_q` is at least the longest document's length, as a number or as
    `sized` gives it. Without them, as in generation, each row is one sequence. With `part`, the
    tensors are this rank's part of the tokens, and both of those arguments describe whole blocks.
    """
    if cu_seq_lens_q is None or max_length_q is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout
        )
    longest = max_length_q.shape[0] if isinstance(max_length_q, Tensor) else max_length_q
    # Under autocast the norms' fp32 weights promote queries and keys to fp32; values keep the
    # projection's dtype.
    query = query.to(value.dtype)
    key = key.to(value.dtype)
    if part is not None:
        query, key, value = tokens_to_heads(query, key, value, part)
    output = _within_documents(
        query, key, value, cu_seq_lens_q, longest, scaling, dropout, takes_cudnn
    )
    return output if part is None else heads_to_tokens(output, part), None


def _within_documents(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor,
    longest: int,
    scaling: float | None,
    dropout: float,
    takes_cudnn: bool,
) -> Tensor:
    """Return the output [B, T, H, D], by the fastest kernel that takes the tensors."""
    batch, _, length, width = query.shape
    scale = width**-0.5 if scaling is None else scaling
    if takes_cudnn and dropout == 0.0 and is_available(value):
        output: Tensor = cudnn_attention(query, key, value, ends, longest, scale)[0]
        return output
    query, key, value = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    if dropout == 0.0 and has_kernel(value):
        found: Tensor = flash_attention(query, key, value, ends, longest, scale)[0]
    else:
        found = _one_by_one(query, key, value, ends, scaling, dropout)
    return found.view(batch, length, *found.shape[1:])


@functools.cache
def sized(length: int, device: torch.device) -> Tensor:
    """Return a tensor without elements whose first size is `length`.

    Compiled code takes varying sizes, but is recompiled for each new value of a number.
    """
    # the compiler treats a size of 1 as a constant
    return torch.empty(max(2, length), 0, device=device)


def _one_by_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_lens: Tensor,
    scaling: float | None,
    dropout: float,
) -> Tensor:
    """Return [N, H, D] from query [N, H, D], key and value [N, G, D], document by document.

    On a GPU each call waits for the lengths.
    """
    # the remaining kernels there need equally many key heads, or would materialize the scores
    if query.is_cuda:
        repeats = query.shape[1] // key.shape[1]
        key = key.repeat_interleave(repeats, dim=1)
        value = value.repeat_interleave(repeats, dim=1)
    lengths = [length for length in cu_seq_lens.diff().tolist() if length]
    documents = zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True)  # type: ignore[no-untyped-call]
    outputs = []
    for query_of, key_of, value_of in documents:
        output = F.scaled_dot_product_attention(
            query_of.transpose(0, 1)[None],
            key_of.transpose(0, 1)[None],
            value_of.transpose(0, 1)[None],
            dropout_p=dropout,
            is_causal=True,
            scale=scaling,
            enable_gqa=key.shape[1] != query.shape[1],
        )
        outputs.append(output)
    return torch.cat(outputs, dim=2)[0].transpose(0, 1)
