"""The end of `plan --details`: the formulas of a plan with the numbers filled in.

Every result shown is taken from the prediction; a test evaluates the formulas beside it.
"""

import math
from collections.abc import Iterator

from pipeline_lib.arch.geometry import FP32_BYTES, NF4_BYTES
from pipeline_lib.arch.layers import (
    feeds_in_chunks,
    is_compiled,
    is_sharded,
    keeps_on_host,
    micro_batch_tokens,
    recompute_of,
    stays_gathered,
    tokens_at_once,
)
from pipeline_lib.config.optimizers import OPTIMIZERS
from pipeline_lib.core.units import brief, count, gib, gigabytes
from pipeline_lib.plan import predict
from pipeline_lib.plan.activations import compute_bytes
from pipeline_lib.plan.case import Case
from pipeline_lib.plan.machine import End
from pipeline_lib.plan.memory import MARGIN, PARTS
from pipeline_lib.plan.moments import sharded_over
from pipeline_lib.plan.passes import COMPILE_S, ends_passes, layer_forward, layer_passes, variant_of
from pipeline_lib.plan.step_time import PHASES, PhaseTime, step_time
from pipeline_lib.plan.trained import portions
from pipeline_lib.plan.ways import Ways
from pipeline_lib.plan.workload import documents_at
from pipeline_lib.records.plan import PART_NAMES, Figure


def explain(one: predict.Prediction, case: Case) -> str:
    """Return the formulas of sizes, rates, memory, computation, step and run, with numbers."""
    rates = (
        f"{name:<18} {rate.value:>9.3g} ({rate.low:.3g} to {rate.high:.3g})  {rate.source}"
        for name, rate in case.machine.rates.items()
    )
    sections = (
        ("sizes", _sizes(one, case)),
        ("rates, as expected (low to high)", rates),
        ("memory of a rank", _explain_memory(one, case)),
        ("one micro-batch through one layer and through the ends", _passes(one, case)),
        ("communication of a step", _exchanges(one)),
        ("the step", _step(one, case)),
        ("the run", _run(one, case)),
    )
    return "\n\n".join(
        "\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in sections
    )


def _sizes(one: predict.Prediction, case: Case) -> Iterator[str]:
    geometry = case.geometry
    train = one.train
    workload = case.workload
    trained = geometry.trained_parameters(train)
    ranks = case.ranks.total
    yield f"parameters P = {geometry.parameters:,}; trained T = {trained:,}"
    yield (
        f"weights in matrix products M = {geometry.matmul_parameters:,}, in {geometry.layers} "
        "layers"
    )
    yield f"bytes of a number in {train.precision} b = {compute_bytes(train)}; in fp32 4"
    share = sharded_over(train, case.ranks)
    yield (
        f"ranks N = {ranks}, {case.ranks.per_node} on each node; {share} share one copy of "
        "the weights"
    )
    of_step = (
        f"{case.batch_blocks} x {workload.block_tokens} = "
        f"{case.batch_blocks * workload.block_tokens:,}"
    )
    gathered = ""
    if is_sharded(train):
        gathered = (
            ", no reshard after forward" if stays_gathered(train) else ", reshard after forward"
        )
    how = "compiled" if is_compiled(train) else "eager"
    yield f"layers run {how}, activation checkpointing {recompute_of(train)}{gathered}"
    yield f"tokens of a step = {of_step}, {1 - workload.real_fraction:.1%} of them padding"
    micro = f"{train.micro_batch_blocks} x {workload.block_tokens}"
    groups = str(ranks)
    if train.ranks_per_block > 1:
        micro = f"{micro} / {train.ranks_per_block}"
        groups = f"{ranks} / {train.ranks_per_block}"
    tokens = micro_batch_tokens(train, workload.block_tokens)
    chunks = ""
    if feeds_in_chunks(train, bool(geometry.expert_layers), tokens):
        chunks = f"; the MLP of a layer takes {tokens_at_once(tokens):,} at a time"
    yield f"tokens of a micro-batch on a rank t = {micro} = {tokens:,}{chunks}"
    blocks = f"{case.batch_blocks} / ({groups} x {train.micro_batch_blocks})"
    yield f"micro-batches of a rank in a step (accumulation) A = {blocks} = {one.accumulation}"
    yield f"mean document d = sum(n^2) / sum(n) = {workload.document_tokens:,.0f} tokens"


def _explain_memory(one: predict.Prediction, case: Case) -> Iterator[str]:
    memory = one.memory
    formulas = _state_formulas(one, case)
    for part in PARTS:
        size = getattr(memory, f"{part}_bytes")
        if size:
            formula = f" = {formulas[part]}" if part in formulas else ""
            yield f"{part:<12}{formula} = {size:,} B = {gib(size)}"
    yield (
        f"peak {memory.moment} = {gib(memory.total_bytes)}; without the reserve "
        f"{gib(memory.allocated_bytes)}"
    )
    if memory.host_bytes:
        away = [f"{one.train.offload} offloaded"] if one.train.offload != "none" else []
        away += ["activations"] if keeps_on_host(one.train) else []
        yield f"in host memory {gib(memory.host_bytes)}: {', '.join(away)}"
    limit = case.machine.gpu_memory_bytes
    if limit is not None:
        most = f"(1 - {MARGIN}) x {gib(limit)} = {gib(limit * (1 - MARGIN))}"
        yield f"fits if the peak is at most {most}: {'yes' if one.fits else 'no'}"


def _state_formulas(one: predict.Prediction, case: Case) -> dict[str, str]:
    """Return the formulas of what is kept between steps, as arithmetic that a test evaluates."""
    train = one.train
    geometry = case.geometry
    if train.offload != "none" or not OPTIMIZERS[train.optimizer].has_fp32_moments:
        return {}
    trained = geometry.trained_parameters(train)
    number = compute_bytes(train)
    frozen = geometry.parameters - (trained if train.method == "full" else 0)
    share = sharded_over(train, case.ranks)
    ranks = case.ranks.total
    moments = _moments(one, case)
    if not train.uses_deepspeed:
        quantized = geometry.quantized_parameters(train)
        in_four_bits = f" + {NF4_BYTES} x {quantized:,}" if quantized else ""
        found = {
            "weights": f"({FP32_BYTES} x {trained:,} + {number} x "
            f"{frozen - quantized:,}{in_four_bits}) / {share}",
            "optimizer": f"({moments}) / {share}",
        }
        return found | (
            {"gradients": f"{FP32_BYTES} x {trained:,} / {share}"}
            if one.memory.gradients_bytes
            else {}
        )
    of_weights = ranks if train.strategy == "zero3" else 1
    of_gradients = 1 if train.strategy == "zero1" else ranks
    return {
        "weights": f"{number} x ({trained:,} + {frozen:,}) / {of_weights}",
        "gradients": f"{FP32_BYTES} x {trained:,} / {of_gradients}",
        "optimizer": f"({moments} + {FP32_BYTES} x {trained:,}) / {ranks}",
    }


def _moments(one: predict.Prediction, case: Case) -> str:
    """Return the bytes of all moments in fp32, as arithmetic."""
    return " + ".join(
        f"{FP32_BYTES * len(portion.rule.moments)} x {portion.elements:,}"
        for portion in portions(case.geometry, one.train)
    )


def _passes(one: predict.Prediction, case: Case) -> Iterator[str]:
    case = case.by(one.train)
    tokens = case.micro_batch_tokens
    parts = {"layer": layer_passes(case, End.EXPECTED), "ends": ends_passes(case, End.EXPECTED)}
    yield (
        "device time = fixed + t x time of a token; host time = launching the kernels; the "
        "longer one counts"
    )
    for name, passes in parts.items():
        source = f"measured as {variant_of(one.train)}" if passes.is_measured else "by formula"
        for direction, cost in (("forward", passes.forward), ("backward", passes.backward)):
            device = (
                f"{cost.fixed_s:.6g} + {tokens} x {cost.per_token_s:.6g} = "
                f"{cost.device_s(tokens):.6g} s"
            )
            yield f"{name} {direction}: device {device}, host {cost.host_s:.6g} s; {source}"
    layer = parts["layer"]
    if layer.is_measured:
        return
    yield from _token_forward(one, case, layer.forward.per_token_s)


def _token_forward(one: predict.Prediction, case: Case, per_token_s: float) -> Iterator[str]:
    """Yield the parts of one token's forward pass through a layer, which takes `per_token_s`."""
    geometry = case.geometry
    document = documents_at(case.workload, End.EXPECTED)
    speeds = case.machine.speeds_in(document)
    forward = layer_forward(geometry, one.train, speeds, document)
    weights = f"{forward.weights:.10g}"
    if forward.adapters:
        weights = f"({weights} + {forward.adapters:.10g})"
    products = f"2 x {weights} / {speeds.matmul_flop_s:.6g}"
    attention = (
        f"2 x {geometry.heads * geometry.head_dim} x {document:.6g} / {speeds.attention_flop_s:.6g}"
    )
    if geometry.delta is not None:
        attention = f"{geometry.attention_layers / geometry.layers:.4g} x {attention}"
    counted = (
        "; experts counted as the dense products that take as long"
        if geometry.expert_layers
        else ""
    )
    counted += (
        "; fp8 as the products in bf16 that take as long" if one.train.precision == "fp8" else ""
    )
    yield f"forward of one token, matrix products: {products} = {forward.products_s:.6g} s{counted}"
    yield f"forward of one token, attention: {attention} = {forward.attention_s:.6g} s"
    if forward.delta_s:
        yield f"forward of one token, delta rule: {forward.delta_s:.6g} s"
    yield f"forward of one token, small kernels: {forward.pointwise_s:.6g} s"
    corrected = per_token_s / forward.sum_s
    yield f"forward of one token, in all: {forward.sum_s:.6g} s"
    if not math.isclose(corrected, 1.0):
        yield f"times {corrected:.4g}, as in similar layers that were measured: {per_token_s:.6g} s"


def _exchanges(one: predict.Prediction) -> Iterator[str]:
    if not one.exchanged:
        yield "none: there is one rank"
    for each in one.exchanged:
        exchange = each.exchange
        link = "between nodes" if each.crosses_nodes else "within nodes"
        yield (
            f"{exchange.kind} of {exchange.name} ({exchange.phase}): {each.times:g} times "
            f"{gigabytes(exchange.payload_bytes)} in {exchange.pieces} pieces {link}: "
            f"{brief(each.seconds)} in all, {brief(each.exposed_s)} of it not hidden"
        )


def _step(one: predict.Prediction, case: Case) -> Iterator[str]:
    time = step_time(case.by(one.train), Ways.one(one.train, case.geometry), End.EXPECTED)
    totals = []
    for name in PHASES:
        phase: PhaseTime = getattr(time, name)
        totals.append(f"{phase.total_s[0]:.6g}")
        yield (
            f"{name}: device {phase.device_s[0]:.6g} s beside host {phase.host_s[0]:.6g} s take "
            f"{phase.computing_s[0]:.6g} s; copies add {phase.copying_s[0]:.6g} s, communication "
            f"{phase.exchanging_s[0]:.6g} s: {totals[-1]} s"
        )
    yield f"step = {' + '.join(totals)} = {time.total_s[0]:.6g} s, {_band(one.step_s)}"
    spent = (
        (PART_NAMES.get(name, name), seconds) for name, seconds in one.parts.items() if seconds > 0
    )
    yield f"by purpose: {', '.join(f'{name} {brief(seconds)}' for name, seconds in spent)}"


def _run(one: predict.Prediction, case: Case) -> Iterator[str]:
    workload = case.workload
    ranks = case.ranks.total
    real = f"{case.batch_blocks} x {workload.block_tokens} x {workload.real_fraction:.6g}"
    yield (
        f"tokens/s a rank = {real} / {one.step_s.value:.6g} / {ranks} = "
        f"{one.tokens_per_s_per_rank.value:.6g}, {_band(one.tokens_per_s_per_rank)}"
    )
    if one.mfu is not None and case.machine.peak_flop_s is not None:
        peak = f"{count(ranks, 'ranks')} of {case.machine.peak_flop_s:.4g} FLOP/s"
        of_bf16 = (
            ", of bf16, as attention, head and norms are, so it may exceed 100%"
            if one.train.precision == "fp8"
            else ""
        )
        yield f"causal MFU = FLOPs of the step / (step x {peak}) = {one.mfu.value:.2%}{of_bf16}"
    trained = case.geometry.trained_parameters(one.train)
    formula = f"{FP32_BYTES} x {trained:,} + {_moments(one, case)}"
    yield f"checkpoint = {formula} = {one.checkpoint_bytes:,} B = {gigabytes(one.checkpoint_bytes)}"
    if one.run_s is not None:
        steps = f"{count(case.steps, 'steps')} of {one.step_s.value:.6g} s"
        compiling = f" and {brief(COMPILE_S)} of compilation" if is_compiled(one.train) else ""
        yield f"run = {steps}, with saves and validations{compiling}: {brief(one.run_s.value)}"


def _band(figure: Figure) -> str:
    return f"between {figure.low:.4g} and {figure.high:.4g}"
