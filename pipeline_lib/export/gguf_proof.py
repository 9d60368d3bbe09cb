"""The proof that a GGUF file is the merged model: read back, by none of the code that wrote it.

1. The model is built from the sizes in the file, which have to be those of the merged folder. Each
   of its parameters from the file is that of the folder, rounded to the type in the file.
2. Its logits on the probe of the training are those of the merged folder, both in fp32.
3. The tokenizer in the file, as transformers reads it, gives the same ids of the probe's texts and
   of each token's text, and the chat template is the folder's.

The names here are llama.cpp's, written a second time, and not those of the writer's table.
"""

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, ReaderTensor
from torch import Tensor, nn

from pipeline_lib.arch.config_json import read_object
from pipeline_lib.arch.families import read_geometry
from pipeline_lib.arch.gguf import ARCHITECTURES
from pipeline_lib.arch.rope import positions_in
from pipeline_lib.core.errors import DataError, TrainingError
from pipeline_lib.core.files import write_json
from pipeline_lib.core.language import N_
from pipeline_lib.core.spans import Spans
from pipeline_lib.core.stage import Say
from pipeline_lib.data.blocks import Block
from pipeline_lib.data.chat_template import read_template
from pipeline_lib.data.encode import load_tokenizer
from pipeline_lib.export.proof import VALUE_TOLERANCE, by_position, judge, probe_on
from pipeline_lib.model.attention import PACKED_FLASH
from pipeline_lib.model.build import empty_base
from pipeline_lib.model.streaming import Fill, Streamed, StreamedModel, fill_from
from pipeline_lib.model.weights import base_parameters, match_tensors
from pipeline_lib.records.export import ExportParity

# of the logits' size at a position, by what the type rounds; the values are compared by themselves
LOGIT_TOLERANCES = {"gguf-f16": 5e-3, "gguf-q8_0": 5e-2, "gguf-q4_k_m": 0.5}
# Of types whose scales llama.cpp's quantizer searches for: the norm of a row's error, relative to
# the row. The mean over a tensor has no such error, so the tensor's size may differ by less.
_ROW_ERRORS = {
    GGMLQuantizationType.Q4_K: 0.15,
    GGMLQuantizationType.Q5_K: 0.08,
    GGMLQuantizationType.Q6_K: 0.05,
}
_SIZE_ERROR = 0.02
_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_OF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
# parameters with all experts of a layer [E, rows, columns], and the tensors whose rows they have
_OF_EXPERTS = {
    "mlp.experts.gate_up_proj": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    "mlp.experts.down_proj": ("ffn_down_exps.weight",),
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_READ_AT_ONCE = 1 << 22  # values
_TEXTS = (
    "It's 12,345.67 o'clock:\n\n\tdef f(x): return x**2  # ünïcödé  \n",
    "你好,世界! Привет. ¿Qué tal? 🙂🙂 <not a tag> </think> [x] {y}",
)


@dataclass(frozen=True)
class ReadFile:
    """A GGUF file as it is read back."""

    path: Path
    used: set[str] = field(default_factory=set)

    @cached_property
    def reader(self) -> GGUFReader:
        """The package's reader, which maps the file into memory."""
        return GGUFReader(self.path)

    @cached_property
    def tensors(self) -> dict[str, ReaderTensor]:
        """The tensors by name."""
        return {tensor.name: tensor for tensor in self.reader.tensors}

    def value(self, key: str, default: Any = None) -> Any:
        """Return the value of a key of the file; one that begins with a dot is the architecture's.

        Raises DataError for a missing one without `default`.
        """
        if key.startswith("."):
            key = f"{self.value('general.architecture')}{key}"
        found = self.reader.get_field(key)
        if found is None and default is None:
            raise DataError(f"{self.path}: lacks {key}")
        return default if found is None else found.contents()

    def tensor(self, name: str) -> ReaderTensor:
        """Return a tensor, and note that it was used. Raises DataError if there is none."""
        if name not in self.tensors:
            raise DataError(f"{self.path}: lacks the tensor {name}")
        self.used.add(name)
        return self.tensors[name]

    def config(self) -> dict[str, Any]:
        """Return the config.json of the model that the file describes."""
        types = {name: model_type for model_type, name in ARCHITECTURES.items()}
        rope = {"rope_type": "default", "rope_theta": self.value(".rope.freq_base")}
        if self.value(".rope.scaling.type", "none") == "yarn":
            rope |= {
                "rope_type": "yarn",
                "factor": self.value(".rope.scaling.factor"),
                "original_max_position_embeddings": self.value(
                    ".rope.scaling.original_context_length"
                ),
            }
        config = {
            "model_type": types[self.value("general.architecture")],
            "vocab_size": self.value(".vocab_size"),
            "max_position_embeddings": self.value(".context_length"),
            "num_hidden_layers": self.value(".block_count"),
            "hidden_size": self.value(".embedding_length"),
            "intermediate_size": self.value(".feed_forward_length"),
            "num_attention_heads": self.value(".attention.head_count"),
            "num_key_value_heads": self.value(".attention.head_count_kv"),
            "head_dim": self.value(".attention.key_length"),
            "rms_norm_eps": self.value(".attention.layer_norm_rms_epsilon"),
            "rope_parameters": rope,
            "tie_word_embeddings": "output.weight" not in self.tensors,
        }
        experts = self.value(".expert_count", 0)
        if experts:
            config |= {
                "num_experts": experts,
                "num_experts_per_tok": self.value(".expert_used_count"),
                "moe_intermediate_size": self.value(".expert_feed_forward_length"),
                "norm_topk_prob": True,  # llama.cpp always does
            }
        return config

    def built(self) -> nn.Module:
        """Return the model that the file describes, in fp32 without values."""
        with TemporaryDirectory(prefix="gguf-") as folder:
            write_json(Path(folder) / "config.json", self.config())
            return empty_base(Path(folder), torch.float32, PACKED_FLASH)

    def sources(self, name: str) -> list[ReaderTensor]:
        """Return the tensors that have the parameter `name`: two for experts in one parameter."""
        if name in _TOP:
            return [self.tensor(_TOP[name])]
        layer = _LAYER.fullmatch(name)
        number, of_layer = (layer[1], layer[2]) if layer else ("", name)
        if of_layer in _OF_EXPERTS:
            return [self.tensor(f"blk.{number}.{one}") for one in _OF_EXPERTS[of_layer]]
        stem, _, last = of_layer.rpartition(".")
        if stem not in _OF_LAYER:
            raise DataError(f"{self.path}: has no tensor for the parameter {name}")
        return [self.tensor(f"blk.{number}.{_OF_LAYER[stem]}.{last}")]

    def fills(self, model: nn.Module) -> dict[int, Fill]:
        """Return what fills each parameter of `model`, by the parameter's id.

        Raises DataError unless the file holds exactly its tensors.
        """
        fills: dict[int, Fill] = {}
        for parameter, names in base_parameters(model):
            sources = self.sources(names[0])
            fills[id(parameter)] = partial(_fill, sources)
        others = sorted(self.tensors.keys() - self.used)
        if others:
            raise DataError(f"{self.path}: holds besides {', '.join(others[:5])}")
        return fills


def _fill(sources: list[ReaderTensor], values: Tensor) -> None:
    """Fill `values` [..., rows, columns] with the rows of `sources`, one below another."""
    if values.dim() == 1:
        values.copy_(_values(sources[0].data, sources[0].tensor_type))
        return
    rows = values.shape[-2] // len(sources)
    matrices = values.view(-1, *values.shape[-2:])
    for number, source in enumerate(sources):
        data = source.data.reshape(len(matrices), rows, -1)
        for matrix, stored in zip(matrices, data, strict=True):
            target = matrix[number * rows : (number + 1) * rows]
            at_once = max(1, _READ_AT_ONCE // values.shape[-1])
            for first in range(0, rows, at_once):
                part = _values(stored[first : first + at_once], source.tensor_type)
                target[first : first + at_once].copy_(part)


def _values(data: Any, kind: GGMLQuantizationType) -> Tensor:
    return torch.from_numpy(gguf.quants.dequantize(data, kind).copy())


def prove(
    path: Path,
    kind: str,
    merged: Path,
    trained: Path,
    device: torch.device,
    say: Say,
    spans: Spans,
) -> ExportParity:
    """Return the figures that compare the file at `path`, the export `kind`, with `merged`.

    `trained` has the probe. Raises TrainingError if the file is not the merged model.
    """
    file = ReadFile(path)
    size_bytes = path.stat().st_size
    try:
        say("export: comparing each tensor with the merged one")
        spans.begin(N_("compare tensors"), size_bytes)
        model = file.built()
        _compare_sizes(file, model, merged)
        fills = file.fills(model)
        difference = _compare_tensors(file, model, fills, merged)
        block, positions, expected = probe_on(device, trained)
        say("export: comparing the tokenizer, the template and the logits")
        spans.begin(N_("compare logits"), size_bytes)
        tokens = _compare_texts(file, merged, block)
    except DataError as error:
        raise TrainingError(f"the exported file is not the merged model: {error}") from error
    read_back = Streamed(model, fills, torch.float32, device)
    (found,) = read_back.probe_logits(block, positions=positions)
    whole = StreamedModel(merged, torch.float32, device)
    (exact,) = whole.probe_logits(block, positions=positions)
    has_experts = bool(read_geometry(merged).expert_layers)
    figures = judge(found, exact, LOGIT_TOLERANCES[kind], has_experts)
    types = Counter(tensor.tensor_type.name for tensor in file.tensors.values())
    return ExportParity(
        **figures,
        trained_difference=float(by_position(found, expected).square().mean().sqrt()),
        value_difference=difference,
        value_tolerance=VALUE_TOLERANCE,
        tensors=dict(sorted(types.items())),
        compared_tokens=tokens,
    )


def _compare_sizes(file: ReadFile, model: Any, merged: Path) -> None:
    """Raise TrainingError naming a key of config.json that the file has another value of."""
    config = empty_base(merged, torch.float32, PACKED_FLASH).config
    for key in file.config():
        found = getattr(model.config, key)
        wanted = getattr(config, key, None)
        if key == "max_position_embeddings":  # with YaRN, config.json may have the original ones
            wanted = positions_in(read_object(merged / "config.json"))
        if wanted is None:  # a width that follows from others: the tensors' shapes show it
            continue
        if not _is_near(found, wanted):
            raise TrainingError(
                f"the exported file is not the merged model: its {key} is {found}, and not {wanted}"
            )


def _is_near(found: Any, wanted: Any) -> bool:
    """Return whether two values of a config.json are equal up to fp32's rounding."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        return all(_is_near(found[key], wanted.get(key)) for key in found)
    if isinstance(found, float) and isinstance(wanted, float):
        return math.isclose(found, wanted, rel_tol=1e-6)
    return bool(found == wanted)


@torch.no_grad()
def _compare_tensors(
    file: ReadFile, model: nn.Module, fills: Mapping[int, Fill], merged: Path
) -> float:
    """Return the largest difference of a parameter beyond rounding, relative to its size.

    Raises TrainingError naming a tensor that differs, and DataError for other tensors.
    """
    stored, sources = match_tensors(model, merged)
    largest = 0.0
    for parameter, names, copies in sources:
        wanted = torch.empty(parameter.shape)
        fill_from(copies[0], stored)(wanted)
        found = torch.empty(parameter.shape)
        fills[id(parameter)](found)
        kind = file.sources(names[0])[0].tensor_type
        difference = _beyond_rounding(found, wanted, kind)
        if not difference <= VALUE_TOLERANCE:
            raise TrainingError(
                f"the exported file is not the merged model: {names[0]} differs by "
                f"{difference:.1e} of its size, beside the rounding of {kind.name}; tolerance "
                f"{VALUE_TOLERANCE:.0e}"
            )
        largest = max(largest, difference)
    return largest


def _beyond_rounding(found: Tensor, wanted: Tensor, kind: GGMLQuantizationType) -> float:
    """Return by how much `found` differs from `wanted` beyond the rounding to `kind`, at most.

    It is relative to the size of `wanted`; 0 or less if rounding explains it, infinite for NaN.
    """
    size = float(wanted.square().mean().sqrt()) or 1.0  # of biases that are all zero
    if kind in _ROW_ERRORS:
        errors = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp(min=1e-12)
        beyond = float((errors - _ROW_ERRORS[kind]).nan_to_num_(float("inf")).max())
        scale = float((found * wanted).sum() / wanted.square().sum())
        return max(0.0, beyond, abs(scale - 1) - _SIZE_ERROR)
    differences = (found - wanted).abs_() - _rounding(wanted, kind)
    return float(differences.nan_to_num_(float("inf")).max()) / size


def _rounding(values: Tensor, kind: GGMLQuantizationType) -> Tensor:
    """Return by how much rounding to `kind` changes each of `values` at most."""
    half_step, least = 2.0**-11, 2.0**-25  # of F16, and of its smallest numbers
    if kind == GGMLQuantizationType.F32:
        return torch.zeros(())
    if kind == GGMLQuantizationType.F16:
        return values.abs() * half_step + least
    # 32 values have a scale in F16, by which they are whole numbers up to 127, or from -16 to 15
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    largest = values.view(-1, block).abs().amax(dim=1, keepdim=True)
    step = 1 / 16 if kind == GGMLQuantizationType.Q5_0 else 0.5 / 127
    bound = largest * (step + half_step) + 127 * least
    return bound.expand(-1, block).reshape(values.shape)


def _compare_texts(file: ReadFile, merged: Path, block: Block) -> int:
    """Compare the ids of the probe's texts, of others and of each token, and the chat template.

    Return the number of ids. Raises TrainingError for what differs.
    """
    from transformers import AutoTokenizer  # takes seconds

    ours = load_tokenizer(merged)
    theirs = AutoTokenizer.from_pretrained(file.path.parent, gguf_file=file.path.name)
    texts = [*_TEXTS, *_documents(block, ours), *_tokens(ours)]
    compared = 0
    all_found = theirs(texts, add_special_tokens=False)["input_ids"]
    all_wanted = ours.encode_batch_fast(texts, add_special_tokens=False)
    for text, found, wanted in zip(texts, all_found, all_wanted, strict=True):
        if found != wanted.ids:
            raise TrainingError(
                "the exported file is not the merged model: its tokenizer gives other ids of "
                f"{text[:60]!r}"
            )
        compared += len(found)
    if file.value("tokenizer.chat_template", "") != read_template(merged):
        raise TrainingError(
            "the exported file is not the merged model: it has another chat template"
        )
    return compared


def _tokens(tokenizer: Any) -> list[str]:
    """Return the text of each token, so that each merge is needed for one of them."""
    ids = [[number] for number in range(tokenizer.get_vocab_size())]
    texts = tokenizer.decode_batch(ids, skip_special_tokens=False)
    # as the tokenizer does before anything else, and readers of GGUF do not
    return [unicodedata.normalize("NFC", text) for text in texts]


def _documents(block: Block, tokenizer: Any) -> list[str]:
    """Return the texts of the block's documents."""
    texts = []
    for number in np.unique(block.documents[block.documents >= 0]):  # without padding
        ids = block.tokens[block.documents == number].tolist()
        texts.append(tokenizer.decode(ids, skip_special_tokens=False))
    return texts
