"""The products of a layer and the head: forward, gradients of input and weight; and adapters'.

Adapters of rank 16 can be computed in several ways: `peft` as its module does it under autocast,
and `ours` as the training stage lets that module compute (adapted.py), both with all that is around
the products; `added`, with their products added to the layer's own in place; `wider`, where the
layer's products go over 16 more columns, which the narrow ones were written into; `merged`, in
weights that are made anew in every step (bf16 would lose small adapters: a bound, not a choice).
"""

import math
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.kernels.clock import Call
from benchmarks.kernels.report import Line, Report, gradients, random
from pipeline_lib.doctor.exchange import timed
from pipeline_lib.model.lora import fuse_adapters

RANK = 16
MIX_S = 3.0
NARROW_SHARE = 0.3  # of the patience: what moves memory does not heat the GPU
_KINDS = ("forward", "dgrad", "wgrad")


@dataclass(frozen=True)
class Linear:
    """Products with one matrix, or with several side by side, of which each has an adapter."""

    name: str
    inputs: int
    outputs: int
    members: int = 1

    @property
    def rank(self) -> int:
        """Of all its adapters."""
        return RANK * self.members


class Products:
    """Measures each shape once."""

    def __init__(self, report: Report) -> None:
        """Of the model and the tokens of `report`."""
        self.report, self._known = report, dict[tuple[str, int, int, bool], float]()

    def seconds(self, kind: str, inputs: int, outputs: int, adds: bool = False) -> float:
        """Of one product of `kind`; what `adds` adds to what lies in the output."""
        key = kind, inputs, outputs, adds
        if key not in self._known:
            tokens = self.report.tokens
            sizes = (tokens * inputs, inputs * outputs, tokens * outputs)
            written = {"forward": sizes[2], "dgrad": sizes[0], "wgrad": sizes[1]}[kind]
            name = f"{kind} {tokens} x {inputs} -> {outputs}{', added' if adds else ''}"
            is_narrow = min(inputs, outputs) <= 4 * RANK
            self._known[key] = self.report.measure(
                "products",
                name,
                lambda: self._call(kind, inputs, outputs, adds),
                flops=2.0 * tokens * inputs * outputs,
                moved_bytes=2.0 * (sum(sizes) + adds * written),
                share=NARROW_SHARE if is_narrow else 1.0,
            )
        return self._known[key]

    def _call(self, kind: str, inputs: int, outputs: int, adds: bool) -> Call:
        device, tokens = self.report.device, self.report.tokens
        shapes = {"x": (tokens, inputs), "w": (outputs, inputs), "g": (tokens, outputs)}
        names = {"forward": "xwg", "dgrad": "gwx", "wgrad": "gxw"}[kind]
        left, right, out = (random(*shapes[name], device=device) for name in names)
        left = left.t() if kind == "wgrad" else left
        right = right.t() if kind == "forward" else right
        if adds:
            return lambda: out.addmm_(left, right, alpha=0.5)
        return lambda: torch.mm(left, right, out=out)

    def trained(self, linear: Linear) -> float:
        """Of all three products of a linear that is trained."""
        return sum(self.seconds(kind, linear.inputs, linear.outputs) for kind in _KINDS)

    def adapted(self, linear: Linear) -> dict[str, float]:
        """By the way of computing adapters: of all products of a frozen linear and its adapters."""
        inputs, outputs, rank = linear.inputs, linear.outputs, linear.rank
        frozen = sum(self.seconds(kind, inputs, outputs) for kind in _KINDS[:2])
        narrow = self.seconds("forward", inputs, rank) + self.seconds("dgrad", rank, outputs)
        narrow += self.seconds("wgrad", rank, outputs) + self.seconds("wgrad", inputs, rank)
        adding = self.seconds("forward", rank, outputs, adds=True) + self.seconds(
            "dgrad", inputs, rank, adds=True
        )
        wider = self.seconds("forward", inputs + rank, outputs) + self.seconds(
            "dgrad", inputs, outputs + rank
        )
        return {
            "added": frozen + narrow + adding,
            "wider": wider + narrow,
            "merged": frozen + narrow + self._merge(linear),
        }

    def _merge(self, linear: Linear) -> float:
        device, size = self.report.device, linear.inputs * linear.outputs

        def make() -> Call:
            weight, merged = (
                random(linear.outputs, linear.inputs, device=device) for _ in range(2)
            )
            b = random(linear.outputs, linear.rank, device=device)
            a = random(linear.rank, linear.inputs, device=device)
            return lambda: torch.addmm(weight, b, a, alpha=0.5, out=merged)

        name = f"merge adapters into {linear.outputs} x {linear.inputs}"
        return self.report.measure(
            "products", name, make, 2.0 * size * linear.rank, 4.0 * size, share=NARROW_SHARE
        )

    def module(self, name: str, linear: Linear) -> float:
        """Of peft's module, forward and backward, as it is or as the way `ours` has it."""
        from peft import LoraConfig, inject_adapter_in_model

        device, tokens = self.report.device, self.report.tokens
        size = linear.inputs * linear.outputs

        def make() -> Call:
            with device:
                module = nn.ModuleDict(
                    {"linear": nn.Linear(linear.inputs, linear.outputs, bias=False)}
                ).bfloat16()
            inject_adapter_in_model(
                LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=["linear"]), module
            )
            if name == "ours":
                fuse_adapters(module)
            adapted = module["linear"].to(device)
            x = random(tokens, linear.inputs, device=device, trained=True)
            weights = [each for each in adapted.parameters() if each.requires_grad]
            for each in weights:
                each.data = each.data.float()

            def work(x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
                with torch.autocast(device.type, torch.bfloat16):
                    return adapted(x)  # type: ignore[no-any-return]

            return gradients(work, [x, *weights])

        moved_bytes = 4.0 * (tokens * (linear.inputs + linear.outputs) + size)
        return self.report.measure(
            "products",
            f"{name} {linear.inputs} -> {linear.outputs}",
            make,
            4.0 * tokens * size,
            moved_bytes,
        )


def measure_products(report: Report) -> None:
    """Lines for all products; ways for the parts `products full` and `products lora` of a step."""
    products, layers = Products(report), report.geometry.layers
    apart = [Linear(name, *widths) for name, widths in report.geometry.linears.items()]
    fused = _fused(apart)
    for name, linears in (("apart", apart), ("fused", fused)):
        report.way(
            "products full", name, layers * sum(products.trained(linear) for linear in linears)
        )
        each = [products.adapted(linear) for linear in linears]
        for way in each[0]:
            part = "products lora" if way != "merged" else "products lora, inexactly"
            report.way(part, f"{name}, {way}", layers * sum(found[way] for found in each))
    for name in ("peft", "ours"):
        shapes = {(linear.inputs, linear.outputs) for linear in apart}
        known = {shape: products.module(name, Linear("", *shape)) for shape in shapes}
        report.way(
            "products lora", name, layers * sum(known[each.inputs, each.outputs] for each in apart)
        )
    vocab, hidden = report.geometry.vocab, report.geometry.hidden
    head = [products.seconds(kind, hidden, vocab) for kind in _KINDS]
    report.say(
        f"{'products':<12} head: {1000 * sum(head):.1f} ms trained, {1000 * sum(head[:2]):.1f} ms "
        "frozen"
    )
    _measure_mix(report, apart, layers)


def _fused(apart: list[Linear]) -> list[Linear]:
    """Those that share an input, side by side."""
    found: dict[str, list[Linear]] = {}
    for linear in apart:
        group = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}
        short = linear.name.removesuffix("_proj")
        found.setdefault(group.get(short, short), []).append(linear)
    return [
        Linear(name, members[0].inputs, sum(member.outputs for member in members), len(members))
        for name, members in found.items()
    ]


def _measure_mix(report: Report, linears: list[Linear], layers: int) -> None:
    """A layer's products in turn for MIX_S: what a GPU keeps up when it is hot."""
    device, tokens = report.device, report.tokens
    try:
        sets = [
            [random(*shape, device=device) for shape in ((tokens, i), (o, i), (tokens, o))]
            for i, o in ((linear.inputs, linear.outputs) for linear in linears)
        ]

        def layer() -> None:
            for x, w, _ in sets:
                torch.mm(x, w.t())
            for x, w, g in reversed(sets):
                torch.mm(g, w)
                torch.mm(g.t(), x)

        layer()
        usual_s = timed(layer, 3, device) / 3
        lasting_s = MIX_S if device.type == "cuda" else 0.0
        seconds = timed(layer, max(1, int(lasting_s / usual_s)), device) / max(
            1, int(lasting_s / usual_s)
        )
    except RuntimeError as error:
        report.say(f"products     a layer's in turn failed: {error}")
        return
    sizes = [(linear.inputs, linear.outputs) for linear in linears]
    flops = 6.0 * tokens * sum(i * o for i, o in sizes)
    moved = 6.0 * sum(tokens * (i + o) + i * o for i, o in sizes)
    report.add(
        Line("products", f"a layer's in turn, for {MIX_S:g} s", seconds, flops, moved, layers)
    )
    report.heat = max(
        1.0, layers * seconds / report.ways.get("products full", {}).get("apart", math.inf)
    )
