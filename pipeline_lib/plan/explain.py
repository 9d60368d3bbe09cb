"""`--explain`: the formulas of a plan with the numbers put in.

Every result shown is the one that the prediction was made of; a test works out what stands beside it.
"""

from collections.abc import Iterator

from pipeline_lib.plan.activations import FP32_BYTES, compute_bytes
from pipeline_lib.plan.checkpoints import MOMENTS_BYTES
from pipeline_lib.plan.choice import Setting
from pipeline_lib.plan.compute import COMPILE_S, Passes, ends_passes, layer_passes, variant_of
from pipeline_lib.plan.machine import Figure, Luck
from pipeline_lib.plan.memory import MARGIN, PARTS, sharded_over
from pipeline_lib.plan.placement import is_compiled, is_sharded, recompute_of, stays_gathered
from pipeline_lib.plan.prediction import Prediction
from pipeline_lib.plan.step_time import PhaseTime, step_time
from pipeline_lib.plan.units import gib, gigabytes, seconds


def explain(one: Prediction, setting: Setting) -> str:
    """Sizes, rates, memory, computing, exchanges, and the step that they make."""
    sections = (
        ("sizes", _sizes(one, setting)),
        ("rates, as expected (low to high)", _rates(setting)),
        ("memory of a rank", _memory(one, setting)),
        ("one micro-batch through one layer and through the ends", _passes(one, setting)),
        ("exchanges of a step", _exchanges(one)),
        ("the step", _step(one, setting)),
        ("the run", _run(one, setting)),
    )
    return "\n\n".join("\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in sections)


def _sizes(one: Prediction, setting: Setting) -> Iterator[str]:
    geometry, train, workload = setting.geometry, one.train, setting.workload
    trained, ranks = geometry.trained_parameters(train), setting.ranks.total
    yield f"parameters P = {geometry.parameters:,}; trained T = {trained:,}"
    yield f"weights that every token is multiplied by M = {geometry.matmul_parameters:,}, in {geometry.layers} layers"
    yield f"bytes of a number in {train.precision} b = {compute_bytes(train)}; in fp32 4"
    share = sharded_over(train, setting.ranks)
    yield f"ranks N = {ranks}, {setting.ranks.per_node} on each node; {share} share one copy of the weights"
    of_step = f"{setting.batch_blocks} x {workload.block_tokens} = {setting.batch_blocks * workload.block_tokens:,}"
    kept = "for a whole step" if stays_gathered(train) else "while they are used"
    gathered = f"; layers stay gathered {kept}" if is_sharded(train) else ""
    how = "compiled" if is_compiled(train) else "eager"
    yield f"layers run {how}, recompute {recompute_of(train)}{gathered}"
    yield f"tokens of a step = {of_step}, of which {workload.real_fraction:.1%} are no padding"
    micro = f"{train.micro_batch_blocks} x {workload.block_tokens}"
    yield f"tokens of a micro-batch t = {micro} = {train.micro_batch_blocks * workload.block_tokens:,}"
    blocks = f"{setting.batch_blocks} / ({ranks} x {train.micro_batch_blocks})"
    yield f"micro-batches of a rank in a step (accumulation) A = {blocks} = {one.accumulation}"
    yield f"mean document d = sum(n^2) / sum(n) = {workload.document_tokens:,.0f} tokens"


def _rates(setting: Setting) -> Iterator[str]:
    for name, rate in setting.machine.rates.items():
        yield f"{name:<18} {rate.value:>9.3g} ({rate.low:.3g} to {rate.high:.3g})  {rate.source}"


def _memory(one: Prediction, setting: Setting) -> Iterator[str]:
    """State by its formula; what is there for a while by its parts, at the moment that needs most."""
    memory, formulas = one.memory, _state_formulas(one, setting)
    for part in PARTS:
        size = getattr(memory, f"{part}_bytes")
        if size:
            formula = f" = {formulas[part]}" if part in formulas else ""
            yield f"{part:<12}{formula} = {size:,} B = {gib(size)}"
    yield f"the sum, {memory.moment} = {gib(memory.total_bytes)}; without the reserve {gib(memory.allocated_bytes)}"
    if memory.host_bytes:
        yield f"in host memory {gib(memory.host_bytes)}: {one.train.offload} offloaded"
    limit = setting.machine.gpu_memory_bytes
    if limit is not None:
        most = f"(1 - {MARGIN}) x {gib(limit)} = {gib(limit * (1 - MARGIN))}"
        yield f"fits if that is at most {most}: {'yes' if one.fits else 'no'}"


def _state_formulas(one: Prediction, setting: Setting) -> dict[str, str]:
    """What is kept between steps; a test works them out."""
    train, geometry = one.train, setting.geometry
    if train.offload != "none" or train.optimizer != "adamw":
        return {}
    trained, number = geometry.trained_parameters(train), compute_bytes(train)
    frozen = geometry.parameters - (trained if train.method == "full" else 0)
    share, ranks = sharded_over(train, setting.ranks), setting.ranks.total
    if not train.uses_deepspeed:
        gradients = f"{FP32_BYTES} x {trained:,} / {share}" if one.memory.gradients_bytes else ""
        found = {
            "weights": f"({FP32_BYTES} x {trained:,} + {number} x {frozen:,}) / {share}",
            "optimizer": f"{MOMENTS_BYTES} x {trained:,} / {share}",
        }
        return found | ({"gradients": gradients} if gradients else {})
    of_weights = ranks if train.strategy == "zero3" else 1
    of_gradients = 1 if train.strategy == "zero1" else ranks
    return {
        "weights": f"{number} x ({trained:,} + {frozen:,}) / {of_weights}",
        "gradients": f"{FP32_BYTES} x {trained:,} / {of_gradients}",
        "optimizer": f"({MOMENTS_BYTES} + {FP32_BYTES}) x {trained:,} / {ranks}",
    }


def _passes(one: Prediction, setting: Setting) -> Iterator[str]:
    machine, train, workload = setting.machine, one.train, setting.workload
    tokens = train.micro_batch_blocks * workload.block_tokens
    parts = {
        "layer": layer_passes(setting.geometry, train, machine, workload, Luck.EXPECTED),
        "ends": ends_passes(setting.geometry, train, machine, workload, Luck.EXPECTED),
    }
    yield "the device takes fixed + t x a token, the host what it takes to launch; the longer of the two decides"
    for name, passes in parts.items():
        source = f"measured as {variant_of(train)}" if passes.is_measured else "by formula"
        for direction in ("forward", "backward"):
            yield f"{name} {direction}: {_pass(passes, direction, tokens)}; {source}"
    if not parts["layer"].is_measured:
        yield from _layer_formula(setting, parts["layer"])


def _pass(passes: Passes, direction: str, tokens: int) -> str:
    one = passes.forward if direction == "forward" else passes.backward
    device = f"{one.fixed_s:.6g} + {tokens} x {one.per_token_s:.6g} = {one.device_s(tokens):.6g} s"
    return f"device {device}, host {one.host_s:.6g} s"


def _layer_formula(setting: Setting, layer: Passes) -> Iterator[str]:
    """What a token costs in the forward pass, taken apart."""
    geometry, speeds = setting.geometry, setting.machine.speeds()
    weights = (geometry.matmul_parameters - geometry.vocab * geometry.hidden) / geometry.layers
    products = f"2 x {weights:.10g} / {speeds.matmul_flop_s:.6g}"
    products_s = 2 * weights / speeds.matmul_flop_s
    channels, document = geometry.heads * geometry.head_dim, setting.workload.document_tokens
    attention = f"2 x {channels} x {document:.6g} / {speeds.attention_flop_s:.6g}"
    attention_s = 2 * channels * document / speeds.attention_flop_s
    rest_s = layer.forward.per_token_s - products_s - attention_s
    yield f"of a token forward, products: {products} = {products_s:.6g} s"
    yield f"of a token forward, attention: {attention} = {attention_s:.6g} s"
    yield f"of a token forward, small kernels and adapters: the rest, {rest_s:.3g} s"


def _exchanges(one: Prediction) -> Iterator[str]:
    if not one.exchanges:
        yield "none: there is one rank"
    for each in one.exchanges:
        exchange, link = each.exchange, "between nodes" if each.crosses_nodes else "within nodes"
        yield (
            f"{exchange.kind} of {exchange.name} ({exchange.phase}): {exchange.times:g} times "
            f"{gigabytes(exchange.payload_bytes)} in {exchange.pieces} pieces {link}: {seconds(each.seconds)} in all, "
            f"of which {seconds(each.exposed_s)} are waited for"
        )


def _step(one: Prediction, setting: Setting) -> Iterator[str]:
    time = step_time(setting.geometry, one.train, setting.machine, setting.workload, one.accumulation, Luck.EXPECTED)
    for name in ("forward", "backward", "update"):
        phase: PhaseTime = getattr(time, name)
        yield (
            f"{name}: device {phase.device_s:.6g} s beside host {phase.host_s:.6g} s take {phase.computing_s:.6g} s; "
            f"copies add {phase.copying_s:.6g} s, exchanges {phase.exchanging_s:.6g} s: {phase.total_s:.6g} s"
        )
    total = " + ".join(f"{getattr(time, name).total_s:.6g}" for name in ("forward", "backward", "update"))
    yield f"step = {total} = {time.total_s:.6g} s, {_band(one.step_s)}"
    parts = ", ".join(f"{name} {seconds(spent)}" for name, spent in one.parts.items() if spent > 0)
    yield f"by what it is for: {parts}"


def _run(one: Prediction, setting: Setting) -> Iterator[str]:
    workload, ranks = setting.workload, setting.ranks.total
    real = f"{setting.batch_blocks} x {workload.block_tokens} x {workload.real_fraction:.6g}"
    yield (
        f"tokens/s a rank = {real} / {one.step_s.value:.6g} / {ranks} = {one.tokens_per_s_per_rank.value:.6g}, "
        f"{_band(one.tokens_per_s_per_rank)}"
    )
    if one.mfu is not None and setting.machine.peak_flop_s is not None:
        peak = f"{ranks} ranks of {setting.machine.peak_flop_s:.4g} FLOP/s"
        yield f"MFU = FLOPs of the step / (step x {peak}) = {one.mfu.value:.2%}"
    trained = setting.geometry.trained_parameters(one.train)
    formula = f"({FP32_BYTES} + {MOMENTS_BYTES}) x {trained:,}"
    yield f"checkpoint = {formula} = {one.checkpoint_bytes:,} B = {gigabytes(one.checkpoint_bytes)}"
    if one.run_s is not None:
        steps = f"{setting.steps} steps of {one.step_s.value:.6g} s"
        compiling = f" and {seconds(COMPILE_S)} of compilation" if is_compiled(one.train) else ""
        yield f"run = {steps}, with saves and validations{compiling}: {seconds(one.run_s.value)}"


def _band(figure: Figure) -> str:
    return f"between {figure.low:.4g} and {figure.high:.4g}"
