"""Writing a model folder as one GGUF file, tensor by tensor, by the package `gguf`.

In memory are one tensor as it is in the file and some of its rows in fp32, so a model of any size
is written. The same folder gives the same bytes.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from numpy.typing import NDArray
from torch import Tensor

from pipeline_lib.arch.config_json import read_object
from pipeline_lib.arch.families import geometry_in
from pipeline_lib.arch.gguf import ARCHITECTURES, unnamed_in_config
from pipeline_lib.arch.rope import scaling_in
from pipeline_lib.core.errors import DataError
from pipeline_lib.data.bpe import splits_as_qwen
from pipeline_lib.data.chat_template import (
    read_template,
    read_tokenizer_config,
    special_tokens,
)
from pipeline_lib.data.encode import TOKENIZER_NAME, load_tokenizer
from pipeline_lib.model.weights import Stored, find_tensors

# What llama.cpp's quantizer is given: the values as they are stored.
AS_BF16 = "gguf-bf16"
AS_F32 = "gguf-f32"
# of an export's matrices, by its name in the config
TYPES = {
    "gguf-f16": GGMLQuantizationType.F16,
    "gguf-q8_0": GGMLQuantizationType.Q8_0,
    AS_BF16: GGMLQuantizationType.BF16,
    AS_F32: GGMLQuantizationType.F32,
}
_FILE_TYPES = {
    "gguf-f16": gguf.LlamaFileType.MOSTLY_F16,
    "gguf-q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    AS_BF16: gguf.LlamaFileType.MOSTLY_BF16,
    AS_F32: gguf.LlamaFileType.ALL_F32,
}
_ROUTER = "ffn_gate_inp"  # stays in fp32, as llama.cpp has it
_HEAD = "lm_head.weight"
_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
_FUSED_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)")
_DEFAULT_THETA = 10_000.0  # of transformers
_DEFAULT_EPS = 1e-6
_ENCODED_AT_ONCE = 1 << 24  # values, in fp32


def file_name(kind: str) -> str:
    """Return the name of the file of the export `kind`: `model-f16.gguf`."""
    return f"model-{kind.removeprefix('gguf-')}.gguf"


@dataclass(frozen=True)
class StoredRows:
    """A matrix, or a vector as its only row: the `box` of a stored tensor."""

    stored: Stored
    box: tuple[slice, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows, and the values of one."""
        sizes = [each.stop - each.start for each in self.box]
        return prod(sizes[:-1]), sizes[-1]

    def read(self, first: int, count: int) -> Tensor:
        """Return `count` rows from `first` on, in fp32 [rows, columns]. Raises DataError."""
        columns = self.shape[1]
        box = self.box
        if len(box) > 1:
            start = box[-2].start + first
            box = (*box[:-2], slice(start, start + count), box[-1])
        values = torch.empty(count, columns)
        self.stored.copy_to(values, box)
        return values


@dataclass(frozen=True)
class FileTensor:
    """A tensor of the file, of `shape` and `type`: its `parts` below one another."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    parts: Sequence[StoredRows]

    @property
    def bytes_of_row(self) -> int:
        """The size of a row in the file."""
        block, block_bytes = gguf.GGML_QUANT_SIZES[self.type]
        return self.shape[-1] // block * block_bytes

    @property
    def size_bytes(self) -> int:
        """The size of the tensor in the file."""
        return prod(self.shape[:-1]) * self.bytes_of_row

    def encoded(self) -> NDArray[np.uint8]:
        """Return the tensor as bytes of the file. Raises DataError for what its type cannot hold."""
        found = np.empty((prod(self.shape[:-1]), self.bytes_of_row), dtype=np.uint8)
        at_once = max(1, _ENCODED_AT_ONCE // self.shape[-1])
        done = 0
        for part in self.parts:
            rows, _ = part.shape
            for first in range(0, rows, at_once):
                values = part.read(first, min(at_once, rows - first)).numpy()
                found[done : done + len(values)] = self._encode(values)
                done += len(values)
        return found

    def _encode(self, values: NDArray[np.float32]) -> NDArray[np.uint8]:
        if self.type == GGMLQuantizationType.F16:
            largest = np.finfo(np.float16).max
            if not (np.abs(values) <= largest).all():
                raise DataError(
                    f"{self.name} has values beyond {largest:g}, the largest of F16; export "
                    "gguf-q8_0, which has a scale for every 32 values, in place of gguf-f16"
                )
        encoded = gguf.quants.quantize(values, self.type)
        return encoded.view(np.uint8).reshape(len(values), -1)


@dataclass(frozen=True)
class ModelFile:
    """What a GGUF file of the model in `folder` will hold, as the export `kind`."""

    folder: Path
    kind: str
    config: Mapping[str, Any]
    entries: Sequence[FileTensor]

    @property
    def size_bytes(self) -> int:
        """The size of all tensors."""
        return sum(entry.size_bytes for entry in self.entries)

    def write(self, path: Path, name: str) -> None:
        """Write the file; `name` is what it calls the model.

        Raises DataError for a value that the type cannot hold, and for a tokenizer that GGUF does
        not describe.
        """
        writer = GGUFWriter(path, ARCHITECTURES[self.config["model_type"]])
        writer.add_type(gguf.GGUFType.MODEL)
        writer.add_name(name)
        writer.add_file_type(_FILE_TYPES[self.kind])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        _add_sizes(writer, self.config)
        _add_rope(writer, self.config)
        _add_tokenizer(writer, self.folder, self.config["vocab_size"])
        for entry in self.entries:
            dtype = np.dtype(np.float32)  # the type in the file is the last argument's
            writer.add_tensor_info(entry.name, entry.shape, dtype, entry.size_bytes, entry.type)
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for entry in self.entries:
                writer.write_tensor_data(entry.encoded())
        finally:
            writer.close()


def plan_file(folder: Path, kind: str) -> ModelFile:
    """Return what the GGUF file `kind` of the model in `folder` will hold.

    Raises DataError naming what GGUF has no names for.
    """
    config = read_object(folder / "config.json")
    unnamed = list(unnamed_in_config(config))
    if unnamed:
        raise DataError(f"{folder}: GGUF has no names for {'; '.join(unnamed)}")
    architecture = ARCHITECTURES[config["model_type"]]
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    parts: dict[str, list[StoredRows]] = defaultdict(list)
    stored = find_tensors(folder)
    if config.get("tie_word_embeddings", False):
        stored.pop(_HEAD, None)  # readers take the embedding
    for name in sorted(stored, key=_by_number):
        for plain, rows in _named_rows(stored[name]):
            in_file = names.get_name(plain, try_suffixes=(".weight", ".bias"))
            if in_file is None:
                raise DataError(f"{folder}: GGUF has no name for the tensor {plain}")
            parts[in_file].append(rows)
    entries = [_entry(name, rows, kind) for name, rows in parts.items()]
    return ModelFile(folder, kind, config, entries)


def _by_number(name: str) -> list[tuple[int, str]]:
    """Return a sort key of a tensor's name by which layer 10 follows layer 9."""
    key = []
    for part in name.split("."):
        key.append((int(part), "") if part.isdecimal() else (-1, part))
    return key


def _named_rows(stored: Stored) -> Iterator[tuple[str, StoredRows]]:
    """Yield the rows of `stored` with the name that the table of GGUF's names knows them by.

    Those are all, or of experts in one tensor the rows of each expert's projections.
    """
    one = _EXPERT.fullmatch(stored.name)
    if one is not None:
        yield f"{one[1]}.{one[3]}.weight", StoredRows(stored, stored.whole)
        return
    fused = _FUSED_EXPERTS.fullmatch(stored.name)
    if fused is None:
        yield stored.name, StoredRows(stored, stored.whole)
        return
    projections = ["gate_proj", "up_proj"] if fused[2] == "gate_up_proj" else ["down_proj"]
    experts, rows, columns = stored.shape
    of_each = rows // len(projections)
    for expert in range(experts):
        for number, projection in enumerate(projections):
            of_projection = slice(number * of_each, (number + 1) * of_each)
            box = (slice(expert, expert + 1), of_projection, slice(0, columns))
            yield f"{fused[1]}.{projection}.weight", StoredRows(stored, box)


def _entry(name: str, parts: Sequence[StoredRows], kind: str) -> FileTensor:
    """Return the tensor `name` of `parts`: an expert each, or a single one."""
    rows, columns = parts[0].shape
    shape: tuple[int, ...] = (rows, columns)
    if "_exps" in name:
        shape = (len(parts), rows, columns)
    if len(parts[0].stored.shape) == 1:
        shape = (columns,)
    return FileTensor(name, shape, _type_of(name, shape, kind), parts)


def _type_of(name: str, shape: tuple[int, ...], kind: str) -> GGMLQuantizationType:
    """Return the type of a tensor, as llama.cpp's own converter chooses it."""
    if len(shape) == 1 or _ROUTER in name:
        return GGMLQuantizationType.F32
    block, _ = gguf.GGML_QUANT_SIZES[TYPES[kind]]
    return GGMLQuantizationType.F16 if shape[-1] % block else TYPES[kind]


def _add_sizes(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
    geometry = geometry_in(config)
    writer.add_vocab_size(geometry.vocab)
    writer.add_context_length(geometry.max_positions)
    writer.add_block_count(geometry.layers)
    writer.add_embedding_length(geometry.hidden)
    writer.add_feed_forward_length(geometry.intermediate)
    writer.add_head_count(geometry.heads)
    writer.add_head_count_kv(geometry.kv_heads)
    writer.add_key_length(geometry.head_dim)
    writer.add_value_length(geometry.head_dim)
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps", _DEFAULT_EPS))
    if geometry.experts:
        writer.add_expert_count(geometry.experts)
        writer.add_expert_used_count(geometry.experts_per_token)
        writer.add_expert_feed_forward_length(geometry.expert_intermediate)


def _add_rope(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
    parameters = config.get("rope_parameters") or {}
    theta = config.get("rope_theta", parameters.get("rope_theta", _DEFAULT_THETA))
    writer.add_rope_freq_base(theta)
    scaling = scaling_in(config)
    if scaling:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling["factor"])
        original = scaling.get("original_max_position_embeddings")
        writer.add_rope_scaling_orig_ctx_len(original or config["max_position_embeddings"])


def _add_tokenizer(writer: GGUFWriter, folder: Path, vocab: int) -> None:
    description = read_object(folder / TOKENIZER_NAME)
    if not splits_as_qwen(description):
        raise DataError(
            f"{folder / TOKENIZER_NAME}: splits texts in another way than Qwen's tokenizers, and "
            "GGUF has no name for it; remove the export"
        )
    tokens, types = _tokens(folder, vocab)
    merges = description["model"]["merges"]
    writer.add_tokenizer_model("gpt2")  # byte-level BPE
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    # older files have a text for each merge
    writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in merges])
    stops = stop_tokens(folder)
    if stops:
        writer.add_eos_token_id(stops[0])
        writer.add_eot_token_id(stops[0])
    pad = special_tokens(read_tokenizer_config(folder)).get("pad_token")
    if pad in tokens:
        writer.add_pad_token_id(tokens.index(pad))
    # no text begins with it, and readers take the token 11 if there is none
    begin = read_object(folder / "config.json").get("bos_token_id")
    if begin is None and stops:
        begin = stops[-1]
    if begin is not None:
        writer.add_bos_token_id(begin)
    writer.add_add_bos_token(False)
    template = read_template(folder)
    if template:
        writer.add_chat_template(template)


def _tokens(folder: Path, vocab: int) -> tuple[list[str], list[int]]:
    """Return the text and GGUF's type of each of `vocab` tokens; ids without one get a name."""
    tokenizer = load_tokenizer(folder)
    tokens = [f"[PAD{number}]" for number in range(vocab)]
    types = [int(gguf.TokenType.UNUSED)] * vocab
    for text, number in tokenizer.get_vocab(with_added_tokens=True).items():
        tokens[number] = text
        types[number] = int(gguf.TokenType.NORMAL)
    for number, added in tokenizer.get_added_tokens_decoder().items():
        kind = gguf.TokenType.CONTROL if added.special else gguf.TokenType.USER_DEFINED
        types[number] = int(kind)
    return tokens, types


def stop_tokens(folder: Path) -> list[int]:
    """Return the ids of the tokens at which the model in `folder` stops, the first one first."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        stops = read_object(path).get("eos_token_id") if path.exists() else None
        if stops is not None:
            return list(stops) if isinstance(stops, list) else [int(stops)]
    return []
