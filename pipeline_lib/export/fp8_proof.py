"""The proof that a folder in FP8 is the merged model: read back, by none of the code that wrote it.

1. config.json is that of the merged folder, with the layout of compressed-tensors. Each linear of
   its layers is the merged one, rounded to E4M3 by a scale that is its row's; every other tensor is
   the merged one, bit for bit.
2. Its logits on the probe of the training, with the activations of those linears rounded token by
   token as a server does, are those of the merged folder within what that rounding changes.
3. The files of the tokenizer, the chat template and the stop tokens are the merged folder's.
"""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeline_lib.arch.config_json import read_object
from pipeline_lib.arch.fp8 import IGNORED, QUANTIZATION, SCALE
from pipeline_lib.arch.weight_files import weights_bytes
from pipeline_lib.config.content import TOKENIZER_FILES
from pipeline_lib.core.errors import DataError, TrainingError
from pipeline_lib.core.files import sha256_file
from pipeline_lib.core.language import N_
from pipeline_lib.core.spans import Spans
from pipeline_lib.core.stage import Say
from pipeline_lib.data.encode import load_tokenizer
from pipeline_lib.export.proof import VALUE_TOLERANCE, by_position, judge, probe_on
from pipeline_lib.model.attention import PACKED_FLASH
from pipeline_lib.model.build import empty_base
from pipeline_lib.model.streaming import Fill, Streamed, StreamedModel
from pipeline_lib.model.weights import Stored, base_parameters, find_tensors
from pipeline_lib.records.export import ExportParity

# Of the logits' size at a position, by what E4M3 rounds in weights and activations: 3 bits behind
# the first one. The values are compared by themselves.
LOGIT_TOLERANCE = 0.25
_SCALE_TOLERANCE = 2.0**-8  # of bf16
_NOT_THE_MODEL = "the exported folder is not the merged model"


def prove(
    exported: Path, merged: Path, trained: Path, device: torch.device, say: Say, spans: Spans
) -> ExportParity:
    """Return the figures that compare the folder `exported` with `merged`.

    `trained` has the probe. Raises TrainingError if the folder is not the merged model.
    """
    say("export: comparing each tensor with the merged one")
    read_bytes = weights_bytes(exported) + weights_bytes(merged)
    spans.begin(N_("compare tensors"), read_bytes)
    compared_tokens = _compare_texts(exported, merged)
    model = empty_base(merged, torch.float32, PACKED_FLASH)
    linears = _linears(model)
    found = find_tensors(exported)
    wanted = find_tensors(merged)
    try:
        _compare_names(found, wanted, linears)
        difference = _compare_tensors(found, wanted, linears)
    except DataError as error:
        raise TrainingError(f"{_NOT_THE_MODEL}: {error}") from error
    say("export: comparing the logits")
    spans.begin(N_("compare logits"), read_bytes)
    block, positions, expected = probe_on(device, trained)
    for linear in linears.values():
        linear.register_forward_pre_hook(_rounded_input)
    read_back = Streamed(model, _fills(model, found), torch.float32, device)
    (logits,) = read_back.probe_logits(block, positions=positions)
    whole = StreamedModel(merged, torch.float32, device)
    (exact,) = whole.probe_logits(block, positions=positions)
    return ExportParity(
        **judge(logits, exact, LOGIT_TOLERANCE, has_experts=False),
        trained_difference=float(by_position(logits, expected).square().mean().sqrt()),
        value_difference=difference,
        value_tolerance=VALUE_TOLERANCE,
        tensors=dict(sorted(Counter(tensor.kind for tensor in found.values()).items())),
        compared_tokens=compared_tokens,
    )


def _compare_texts(exported: Path, merged: Path) -> int:
    """Compare config.json, and the files of the tokenizer; return how many tokens it has.

    Raises TrainingError naming a file that differs.
    """
    config = read_object(exported / "config.json")
    if config.pop("quantization_config", None) != QUANTIZATION:
        raise TrainingError(f"{_NOT_THE_MODEL}: its config.json has another quantization_config")
    if config != read_object(merged / "config.json"):
        raise TrainingError(f"{_NOT_THE_MODEL}: its config.json has other keys")
    templates = [path.relative_to(merged) for path in merged.glob("*/*.jinja")]
    for name in (*map(Path, TOKENIZER_FILES), *templates):
        if _hash_of(exported / name) != _hash_of(merged / name):
            raise TrainingError(f"{_NOT_THE_MODEL}: it has another {name}")
    return int(load_tokenizer(exported).get_vocab_size())


def _hash_of(path: Path) -> str | None:
    return sha256_file(path) if path.is_file() else None


def _linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linears that a reader of the layout takes as FP8, by their weights' names."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != IGNORED:
            found[f"{name}.weight"] = module
    return found


def _compare_names(
    found: dict[str, Stored], wanted: dict[str, Stored], linears: dict[str, nn.Linear]
) -> None:
    """Raise TrainingError naming a tensor that is missing, besides, or of another shape or type."""
    kinds = {name: (tensor.shape, tensor.kind) for name, tensor in wanted.items()}
    for name in linears:
        shape, _ = kinds[name]
        kinds[name] = (shape, "F8_E4M3")
        kinds[f"{name}{SCALE}"] = ((shape[0], 1), "BF16")
    for name in sorted(kinds.keys() | found.keys()):
        there = (found[name].shape, found[name].kind) if name in found else None
        if there != kinds.get(name):
            raise TrainingError(
                f"{_NOT_THE_MODEL}: {name} is {there or 'missing'}, expected {kinds.get(name)}"
            )


def _compare_tensors(
    found: dict[str, Stored], wanted: dict[str, Stored], linears: dict[str, nn.Linear]
) -> float:
    """Return the largest difference of a weight beyond rounding, relative to its tensor's size.

    Raises TrainingError naming a tensor that differs.
    """
    largest = 0.0
    for name, tensor in wanted.items():
        if name not in linears:
            if not torch.equal(found[name].read(), tensor.read()):
                raise TrainingError(f"{_NOT_THE_MODEL}: {name} differs")
            continue
        difference = _beyond_rounding(tensor.read().float(), found[name], found[f"{name}{SCALE}"])
        if not difference <= VALUE_TOLERANCE:
            raise TrainingError(
                f"{_NOT_THE_MODEL}: {name} differs by {difference:.1e} of its size, beside the "
                f"rounding of E4M3; tolerance {VALUE_TOLERANCE:.0e}"
            )
        largest = max(largest, difference)
    return largest


def _beyond_rounding(weight: Tensor, codes: Stored, scales: Stored) -> float:
    """Return by how much `codes` times `scales` differ from `weight` beyond rounding, at most.

    It is relative to the root mean square of `weight`, and infinite if a scale is not its row's.
    """
    scale = scales.read().float()
    row = weight.abs().amax(dim=1, keepdim=True)
    has_other_scale = (scale * 448 - row).abs() > _SCALE_TOLERANCE * row
    if bool((has_other_scale & (row > 0)).any()) or not bool((scale > 0).all()):
        return float("inf")
    scaled = weight / scale
    # Half of the distance between neighbours: with 3 bits behind the first, from 2 ** -6 on
    powers = torch.exp2(torch.floor(torch.log2(scaled.abs().clamp(min=2.0**-6))))
    beyond = (codes.read().float() - scaled).abs_() - powers * 2.0**-4
    size = float(weight.square().mean().sqrt()) or 1.0
    worst = (beyond * scale).nan_to_num_(float("inf")).max()
    return max(0.0, float(worst)) / size


def _fills(model: nn.Module, found: dict[str, Stored]) -> dict[int, Fill]:
    """Return what fills each parameter of `model` with its values in the folder, by its id."""
    fills: dict[int, Fill] = {}
    for parameter, names in base_parameters(model):
        name = next(name for name in names if name in found)
        fills[id(parameter)] = partial(_fill, found[name], found.get(f"{name}{SCALE}"))
    return fills


def _fill(stored: Stored, scales: Stored | None, values: Tensor) -> None:
    stored.copy_to(values, stored.whole)
    if scales is not None:
        values.mul_(scales.read().to(values))


def _rounded_input(linear: nn.Module, arguments: tuple[Any, ...]) -> tuple[Tensor]:
    """Return the activations [..., H] rounded to E4M3 by a scale for each token."""
    (values,) = arguments
    scale = (values.abs().amax(dim=-1, keepdim=True) / 448).clamp(min=1e-12)
    return ((values / scale).to(torch.float8_e4m3fn).to(values.dtype) * scale,)
