"""The proof that an exported folder is the trained model: tensors by value, and logits.

The logits are those that the training left.

Rounding the weights changes logits, by a few percent where it changes a router's choice of experts,
and so it hides a slightly wrong merge. So no weight is rounded before logits are compared:

1. The exported config.json with the trained weights, which nothing merged or rounded, gives the
   logits of the probe.
2. Each exported tensor is the trained one, rounded to its dtype. Adapters are merged by peft for
   this, under the names of the training's own model, and none of the code that wrote the files is
   used.

The model is read part by part, and the tensors module by module: on CPUs at most a part in fp32 is
in memory, on a GPU as many as have room.
"""

import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeline_lib.arch.config_json import read_object
from pipeline_lib.arch.families import family_in, read_geometry
from pipeline_lib.arch.geometry import FP32_BYTES
from pipeline_lib.arch.layers import PROBE_TOKENS
from pipeline_lib.arch.weight_files import Piece, weights_bytes
from pipeline_lib.config.train import Train
from pipeline_lib.core.errors import DataError, TrainingError
from pipeline_lib.core.language import N_
from pipeline_lib.core.run_folder import WEIGHTS
from pipeline_lib.core.spans import Spans
from pipeline_lib.core.stage import Job, Say
from pipeline_lib.core.threads import READERS, threads
from pipeline_lib.data.blocks import Block
from pipeline_lib.model.batch import make_batch
from pipeline_lib.model.build import DTYPES, build_trainable
from pipeline_lib.model.gpu import device_with
from pipeline_lib.model.kept import Kept
from pipeline_lib.model.nf4 import rounded
from pipeline_lib.model.probe import load_probe, probe_positions
from pipeline_lib.model.streaming import Fill, Streamed, StreamedModel, fill_from
from pipeline_lib.model.weights import (
    Stored,
    find_tensors,
    match_tensors,
    quantized_linears,
    without_adapters,
)
from pipeline_lib.plan.evaluation import largest_part_parameters, scoring_bytes
from pipeline_lib.plan.stages import ADAPTERS_IN_PROOF_BYTES
from pipeline_lib.records.merge import Parity
from pipeline_lib.train.optimizer import trainable
from pipeline_lib.train.saved_tensors import SavedTensor, fill_saved, find_saved

REFUSED = "refused"  # the folder of the run's directory with a model that the proof refused
# By what `python -m benchmarks.merges` measured (benchmarks/RESULTS.md).
# beyond rounding, relative to the tensor's root mean square: fp32 sums in another order
VALUE_TOLERANCE = 1e-5
LOGIT_TOLERANCE = 1e-4  # of logits in fp32
# after a training in bf16 or fp16, logits may differ by so many times the noise of bf16
_NOISES = 4
_FLIPPED_TOLERANCE = 0.5  # at positions where a router chose other experts
# Of the probe's block, by which the noise is measured at as many positions as of the whole. On CPUs
# no more of it is compared, at 37 GFLOP/s a core in fp32: 7 minutes of a core for a model of 8B.
_NOISE_TOKENS = 1024
_LEAST_POSITIONS = 8  # of the probe, that are compared on CPUs
# values; on CPUs what is computed of them stays in the cache
_COMPARED_AT_ONCE = {"cpu": 2**20, "cuda": 2**26}
# in fp32, of what a GPU compares: the base's, the merged one, and what the comparison makes
_UNIT_COPIES = 4
_SIGNIFICANT_BITS = {torch.float32: 24, torch.bfloat16: 8, torch.float16: 11}


@contextmanager
def kept_if_refused(job: Job, what: str) -> Iterator[None]:
    """Move `job.out` to the run's directory if the block refuses it with a TrainingError.

    The error then says where it is; `what` has the place for that: `the refused model is in {kept}`.
    """
    kept = job.run_dir / REFUSED
    shutil.rmtree(kept, ignore_errors=True)  # of an earlier attempt
    try:
        yield
    except TrainingError as error:
        shutil.move(job.out, kept)
        text = what.format(kept=kept)
        raise TrainingError(f"{error}. Nothing was published; {text}") from error


def prove(
    exported: Path,
    base: Path,
    trained: Path,
    train: Train,
    device: torch.device,
    say: Say,
    spans: Spans,
    others: Sequence[Path] = (),
) -> Parity:
    """Return the figures that compare `exported` with what `train` made of `base`, in `trained`.

    With `others`, checkpoints before it, `exported` has to be the mean of all of them. Raises
    TrainingError if the exported model is not the trained one.
    """
    kept = kept_on(device, exported, base, trained)
    reference = Reference(exported, base, trained, train, kept, others)
    where = "on the GPU" if device.type == "cuda" else "on the CPUs"
    try:
        read_bytes = weights_bytes(exported) + weights_bytes(base)
        say(f"merge: comparing each tensor with the trained one, {where}")
        spans.begin(N_("compare tensors"), read_bytes)
        values = compare_tensors(reference, device)
    except DataError as error:  # the files do not hold the model of their config.json
        raise TrainingError(f"the exported model is not the trained one: {error}") from error
    say(f"merge: comparing logits with those that the training left, {where}")
    spans.begin(N_("compare logits"), read_bytes)
    return Parity(**compare_logits(reference, device), **values)


@dataclass(frozen=True)
class Reference:
    """The trained model: what the exported config.json describes, with base and trained weights."""

    exported: Path
    base: Path
    trained: Path
    train: Train
    kept: Kept = field(default_factory=Kept)
    # checkpoints, as `trained` is one: the exported weights are the mean of all of them
    others: Sequence[Path] = ()

    def built(self, dtype: torch.dtype) -> nn.Module:
        """Return the model as trained, on the meta device, in `dtype`; no linear is quantized."""
        lora = self.train.lora.model_copy(update={"base": "unquantized"})
        precision = next(name for name, each in DTYPES.items() if each == dtype)
        train = self.train.model_copy(
            update={"lora": lora, "precision": precision, "attention": "flash"}
        )
        train = train.model_copy(update={"router_aux_loss": 0.0})  # only the logits are wanted
        model = build_trainable(self.exported, train)
        if train.method == "full":
            for parameter in model.parameters():
                parameter.data = parameter.data.to(dtype)
        return model

    def fills(self, model: nn.Module) -> dict[int, Fill]:
        """Return what fills each parameter of `model`, from `built`, by the parameter's id."""
        found, sources = match_tensors(model, self.base)
        stored = self.kept.tensors(found)
        fills: dict[int, Fill] = {}
        for parameter, names, (first, *_) in sources:
            fills[id(parameter)] = fill_from(first, stored)
            if names[0] in self._quantized:
                fills[id(parameter)] = partial(self._fill_quantized, stored[names[0]])
        adapters = self.adapters
        for name, parameter in trainable(model).items():
            fills[id(parameter)] = partial(self._fill_trained, name, adapters.get(name))
        return fills

    def streamed(self, dtype: torch.dtype, device: torch.device) -> Streamed:
        """Return the model for passes in `dtype`, with one part in memory."""
        model = self.built(dtype)
        has_room = device.type == "cuda"  # for two parts: see `device_for`
        return Streamed(
            without_adapters(model), self.fills(model), dtype, device, reads_ahead=has_room
        )

    def _fill_quantized(self, stored: Stored, values: Tensor) -> None:
        values.copy_(rounded(stored.read(), DTYPES[self.train.precision], stored.name))

    @cached_property
    def adapters(self) -> dict[str, Tensor]:
        """The trained tensors in fp32, if they are adapters that fit into memory; else none."""
        if self.train.method != "lora":
            return {}
        shapes = {
            name: parameter.shape
            for name, parameter in trainable(self.built(torch.float32)).items()
        }
        if FP32_BYTES * sum(shape.numel() for shape in shapes.values()) > ADAPTERS_IN_PROOF_BYTES:
            return {}
        tensors = {name: torch.empty(shape) for name, shape in shapes.items()}
        self._fill(tensors)
        return tensors

    def _fill_trained(self, name: str, adapter: Tensor | None, values: Tensor) -> None:
        if adapter is not None:
            values.copy_(adapter)
            return
        self._fill({name: values})

    def _fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill `tensors` with the trained ones of these names."""
        fill_saved(self.trained / WEIGHTS, self._saved, tensors)

    @cached_property
    def _quantized(self) -> frozenset[str]:
        """The names of the weights that were in 4 bits in the training."""
        model = build_trainable(self.exported, self.train)
        return frozenset(name for _, name in quantized_linears(model))

    @cached_property
    def _saved(self) -> dict[str, SavedTensor]:
        saved = find_saved(self.trained / WEIGHTS)
        return {name: each.with_stored(self.kept.tensor) for name, each in saved.items()}


def kept_on(device: torch.device, exported: Path, base: Path, trained: Path) -> Kept:
    """Return what keeps the tensors of all three folders on a GPU with room for them; else nothing.

    The room is that beside what the proof takes by itself.
    """
    if device.type == "cpu":
        return Kept()
    of_training = sum(path.stat().st_size for path in (trained / WEIGHTS).glob("*.safetensors"))
    size_bytes = weights_bytes(exported) + weights_bytes(base) + of_training
    geometry = read_geometry(exported)
    unit = _UNIT_COPIES * FP32_BYTES * largest_part_parameters(geometry)
    needed = max(scoring_bytes(geometry, PROBE_TOKENS, FP32_BYTES), unit)
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return Kept(device, size_bytes) if size_bytes + needed <= free_bytes else Kept()


def compare_tensors(reference: Reference, device: torch.device) -> dict[str, Any]:
    """Return by how much exported tensors differ from the trained ones beyond rounding, at most.

    Raises TrainingError naming the tensor that differs too much, and DataError if the files do not
    match config.json.
    """
    largest, compared = 0.0, 0
    for written, difference in differences(reference, device):
        if not difference <= VALUE_TOLERANCE:
            raise TrainingError(
                f"the exported model is not the trained one: {written.name} in {written.path.name} "
                f"differs by {difference:.1e} of its size from the trained weights, beside "
                f"rounding; tolerance {VALUE_TOLERANCE:.0e}"
            )
        largest = max(largest, difference)
        compared += 1
    return {
        "value_difference": largest,
        "value_tolerance": VALUE_TOLERANCE,
        "compared_tensors": compared,
    }


def differences(reference: Reference, device: torch.device) -> Iterator[tuple[Stored, float]]:
    """Yield each exported tensor, and by how much it differs from the trained one beyond rounding.

    Values are computed on `device`. Raises DataError if the files do not match config.json.
    """
    model = reference.built(torch.float32)
    every_fills = [reference.fills(model)]
    for other in reference.others:
        every_fills.append(replace(reference, trained=other).fills(model))
    found, sources = match_tensors(model, reference.exported)
    written = reference.kept.tensors(found)
    copies = {id(parameter): of_one for parameter, _, of_one in sources}

    def compare(unit: nn.Module) -> list[tuple[Stored, float]]:
        found = []
        for parameter, values in _mean_merged(unit, every_fills, device):
            for piece in chain.from_iterable(copies.pop(parameter, ())):
                stored = written[piece.name]
                found.append((stored, _difference(values, piece, stored)))
        return found

    units = list(_units(model))
    at_once = 1 if reference.others else _at_once(units, device, reference.kept)
    with threads(at_once, "proof") as pool:
        yield from chain.from_iterable(pool.map(compare, units))
    yield from _beside(reference)


def _at_once(units: Sequence[nn.Module], device: torch.device, kept: Kept) -> int:
    """Return how many `units` to compare at a time: what a GPU has room for; one on CPUs.

    There one at a time takes all cores. The room for what is `kept` is not filled yet.
    """
    if device.type == "cpu":
        return 1
    largest = max(sum(parameter.numel() for parameter in unit.parameters()) for unit in units)
    free_bytes, _ = torch.cuda.mem_get_info(device)
    room_bytes = free_bytes - kept.size_bytes
    return max(1, min(READERS, room_bytes // (_UNIT_COPIES * FP32_BYTES * largest)))


def _units(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules with parameters; an adapted one once, with all that it contains."""
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if _is_adapted(module) or module._parameters:
            yield module
        if not _is_adapted(module):
            waiting += module.children()


def _is_adapted(module: nn.Module) -> bool:
    """Return whether `module` is one of peft's, which has an adapter beside what it adapts."""
    return hasattr(module, "lora_A")


@torch.no_grad()
def _mean_merged(
    unit: nn.Module, every_fills: Sequence[Mapping[int, Fill]], device: torch.device
) -> list[tuple[int, Tensor]]:
    """Return what `_merged` does, the mean over `every_fills`."""
    first, *others = every_fills
    merged = _merged(unit, first, device)
    for fills in others:
        again = _merged(unit, fills, device)
        for (_, total), (_, values) in zip(merged, again, strict=True):
            total.add_(values)
    if others:
        for _, total in merged:
            total.div_(len(every_fills))
    return merged


@torch.no_grad()
def _merged(
    unit: nn.Module, fills: Mapping[int, Fill], device: torch.device
) -> list[tuple[int, Tensor]]:
    """Return the id and fp32 values of each parameter in `unit`, with adapters merged by peft.

    The values are on `device`.
    """
    modules: list[Any] = list(unit.modules()) if _is_adapted(unit) else [unit]
    slots = []
    for module in modules:
        for name, parameter in module._parameters.items():
            if parameter is not None:
                slots.append((module, name))
    empty = [module._parameters[name] for module, name in slots]
    for (module, name), parameter in zip(slots, empty, strict=True):
        values = torch.empty(parameter.shape, dtype=torch.float32, device=device)
        fills[id(parameter)](values)
        module._parameters[name] = nn.Parameter(values, requires_grad=False)
    for module in modules:
        if _is_adapted(module):
            module.merge()
    merged = [module._parameters[name] for module, name in slots]
    for (module, name), parameter in zip(slots, empty, strict=True):
        module._parameters[name] = parameter
    for module in modules:
        if _is_adapted(module):
            module.merged_adapters.clear()  # peft merges no adapter twice
    return [
        (id(parameter), values.detach()) for parameter, values in zip(empty, merged, strict=True)
    ]


def _difference(expected: Tensor, piece: Piece, written: Stored) -> float:
    """Return how far `written` is at most from `expected`'s `piece`, beyond rounding.

    It is relative to the root mean square of the values. A value of NaN gives infinity.
    """
    wanted = expected[piece.slices].reshape(written.shape)
    of_row = math.prod(wanted.shape[1:])
    rows = max(1, _COMPARED_AT_ONCE[wanted.device.type] // max(1, of_row))
    memory = torch.empty(
        min(len(wanted), rows), *wanted.shape[1:], dtype=written.dtype, device=wanted.device
    )
    largest = 0.0
    for first in range(0, len(wanted), rows):
        ours = wanted[first : first + rows]
        theirs = memory[: len(ours)]
        written.copy_to(theirs, (slice(first, first + len(ours)), *written.whole[1:]))
        rounded_ours = ours.to(theirs.dtype)
        if torch.equal(rounded_ours, theirs):  # never with NaN
            continue
        is_other = rounded_ours != theirs  # the few that need a closer look; true for NaN
        near = ours[is_other]
        there = theirs[is_other]
        beyond = (near - there.float()).abs_() - _half_steps(there)
        largest = max(largest, float(beyond.nan_to_num(math.inf).max()))
    if largest <= 0.0:
        return 0.0
    size = float(wanted.square().mean().sqrt())
    return largest / size if size else math.inf


def _half_steps(values: Tensor) -> Tensor:
    """Return half the distance between neighbours of `values`: how far rounding moves them."""
    sizes = values.float().abs()
    mantissas, _ = torch.frexp(sizes)
    powers = sizes.div_(mantissas)  # of two, by which the distance between neighbours goes
    return powers.mul_(0.5 ** (_SIGNIFICANT_BITS[values.dtype] + 1)).masked_fill_(values == 0, 0.0)


def _beside(reference: Reference) -> Iterator[tuple[Stored, float]]:
    """Yield each tensor beside the text model, with 0 if equal to the base's, else infinity.

    Equal means bit for bit.
    """
    parts = family_in(read_object(reference.base / "config.json")).beside
    if not parts:
        return
    stored, written = (find_tensors(folder) for folder in (reference.base, reference.exported))
    for name in (name for name in stored if name.startswith(parts)):
        is_kept = name in written and torch.equal(stored[name].read(), written[name].read())
        yield stored[name], 0.0 if is_kept else math.inf


# The logits. The noise of bf16 is measured: logits in bf16 against those in fp32, both of the
# trained model.


def device_for(folder: Path) -> torch.device:
    """Return a GPU with room for two parts of the model in `folder` in fp32, else the CPU."""
    return device_with(scoring_bytes(read_geometry(folder), PROBE_TOKENS, FP32_BYTES))


def _beginning(block: Block, tokens: int) -> Block:
    return Block(block.tokens[:tokens], block.supervised[:tokens], block.documents[:tokens])


def probe_on(device: torch.device, trained: Path) -> tuple[Block, Tensor, Tensor]:
    """Return the block of the probe in `trained`, the positions [K] and the logits [K, V] there.

    On CPUs that is its beginning.
    """
    block, expected = load_probe(trained)
    positions = probe_positions(make_batch([block]))
    if device.type == "cpu":  # logits depend on earlier tokens alone
        compared = max(int((positions < _NOISE_TOKENS).sum()), _LEAST_POSITIONS)
        positions = positions[:compared]
        expected = expected[:compared]
        block = _beginning(block, int(positions[-1]) + 1)
    return block, positions, expected


def compare_logits(reference: Reference, device: torch.device) -> dict[str, Any]:
    """Return `judge`'s figures for the trained model's logits, and rounding's effect.

    The effect is that on the exported model's logits. Raises TrainingError if the trained weights
    with the exported config.json do not give the logits of the probe.
    """
    block, positions, expected = probe_on(device, reference.trained)
    start = _beginning(block, _NOISE_TOKENS)
    both = torch.cat([positions, probe_positions(make_batch([start]))])
    (logits,) = reference.streamed(torch.float32, device).probe_logits(block, positions=both)
    found = logits[: len(positions)]
    exact = logits[len(positions) :]
    has_experts = bool(read_geometry(reference.base).expert_layers)
    tolerance = LOGIT_TOLERANCE
    if DTYPES[reference.train.precision] != torch.float32:
        # That of bf16 for fp16 too: it is the larger one, and without autocast fp16 may overflow.
        (noisy,) = reference.streamed(torch.bfloat16, device).probe_logits(start)
        noise = by_position(noisy, exact)
        tolerance = max(tolerance, _NOISES * float(noise.median() if has_experts else noise.max()))
    figures = judge(expected, found, tolerance, has_experts)
    exported_model = StreamedModel(reference.exported, torch.float32, device, kept=reference.kept)
    (exported,) = exported_model.probe_logits(start)
    return {**figures, "rounding_difference": float((exported - exact).norm() / exact.norm())}


def by_position(found: Tensor, expected: Tensor) -> Tensor:
    """Return the norm of the logits' difference [K, V], relative to `expected`'s: [K].

    There is one by position.
    """
    sizes: Tensor = torch.linalg.vector_norm(expected, dim=-1)
    distances: Tensor = torch.linalg.vector_norm(found - expected, dim=-1)
    return distances.div_(sizes)


def judge(found: Tensor, expected: Tensor, tolerance: float, has_experts: bool) -> dict[str, Any]:
    """Return the figures of the comparison of the logits `found` and `expected`.

    Raises TrainingError if the shapes differ, or if a position differs by more than `tolerance`. In
    a model with experts, fewer than half of the positions may differ by more: routers that chose
    other experts there.
    """
    if found.shape != expected.shape:
        raise TrainingError(
            f"exported logits have shape {tuple(expected.shape)}, trained ones {tuple(found.shape)}"
        )
    difference = by_position(found, expected)
    is_near = difference <= tolerance  # false for NaN
    apart = int((~is_near).sum())
    is_flipped = (
        has_experts
        and 2 * apart < len(difference)
        and bool((difference <= _FLIPPED_TOLERANCE).all())
    )
    if apart and not is_flipped:
        raise TrainingError(
            "the exported model is not the trained one: logits differ by "
            f"{float(difference.max()):.2e} of their size at a position, and at {apart} of "
            f"{len(difference)} by more than the tolerance, {tolerance:.0e}"
        )
    near = found[is_near]
    exact = expected[is_near]
    return {
        "compared_logits": expected.numel(),
        "max_abs_difference": float((near - exact).abs().max()),
        "relative_difference": float((near - exact).norm() / exact.norm()),
        "tolerance": tolerance,
        "positions_apart": apart,
        "top1_agreement": float((found.argmax(-1) == expected.argmax(-1)).float().mean()),
    }
