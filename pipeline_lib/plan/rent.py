"""What to rent: one config planned on several kinds of machines, with what each would cost.

Prices come from the user, on the command line or in a file; none are known here.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pipeline_lib.config.checks import cross_check
from pipeline_lib.config.schema import Config
from pipeline_lib.core.errors import ConfigError, PipelineError
from pipeline_lib.core.units import HOUR_S, brief, per_million_tokens
from pipeline_lib.plan.answer import Answer
from pipeline_lib.plan.fitting import what_would_fit
from pipeline_lib.plan.gpus import find_gpu, near_names

FLAG = "--machines"
_WIDTH = 120
_FORM = re.compile(
    r"(?P<gpu>[^:@]+):(?P<gpus>[1-9]\d*)(x(?P<nodes>[1-9]\d*))?(@(?P<price>\d+(\.\d+)?))?"
)
Plan = Callable[[Config], Answer]


@dataclass(frozen=True)
class Offer:
    """Machines that can be rented: `nodes` nodes of `gpus` GPUs, and the price of a GPU-hour."""

    gpu: str
    gpus: int
    nodes: int
    price: float | None

    def __str__(self) -> str:
        """Return the machines in words."""
        nodes = f"{self.nodes} nodes of " if self.nodes > 1 else ""
        return f"{nodes}{self.gpus} x {self.gpu}"


@dataclass(frozen=True)
class OfferRow:
    """What a config takes on an offer's machines, or why it cannot be trained there.

    `hours` and `cost` are those of the training, None while its steps are not known; `token_cost`
    is that of a million tokens.
    """

    offer: Offer
    fits: bool
    text: str
    step_s: float | None = None
    hours: float | None = None
    cost: float | None = None
    token_cost: float | None = None


def read_offers(texts: Sequence[str]) -> list[Offer]:
    """Return the offers in `texts`: each is `a10:4@0.6`, `h100:8x2@2.5`, or a file with such lines.

    The numbers are GPUs of a node, nodes, and what an hour of one GPU costs, which may be left out.
    Raise ConfigError with everything that is wrong.
    """
    offers = []
    problems = []
    for text in _lines(texts):
        match = _FORM.fullmatch(text)
        if match is None:
            problems.append(
                f"{FLAG} {text}: not of the form GPU:GPUS[xNODES][@PRICE], as a10:4@0.6"
            )
            continue
        gpu = find_gpu(match["gpu"])
        if gpu is None:
            near = near_names(match["gpu"])
            problems.append(f"{FLAG} {text}: {match['gpu']!r} is not known; {near}")
            continue
        price = float(match["price"]) if match["price"] else None
        offers.append(Offer(gpu.name, int(match["gpus"]), int(match["nodes"] or 1), price))
    if problems:
        raise ConfigError(FLAG, problems)
    return offers


def _lines(texts: Sequence[str]) -> Iterator[str]:
    for text in texts:
        if not Path(text).is_file():
            yield text
            continue
        for line in Path(text).read_text(encoding="utf-8").splitlines():
            content = line.partition("#")[0].strip()
            if content:
                yield content


def rows_of(config: Config, offers: Sequence[Offer], plan: Plan) -> list[OfferRow]:
    """Return a row for each offer: what fits first, the cheapest first, and of these the fastest.

    `plan` answers for a config. The batch is rounded to what the GPUs can share.
    """
    rows = [_row(config, offer, plan) for offer in offers]
    unknown = float("inf")

    def order(row: OfferRow) -> tuple[bool, float, float, float]:
        money = unknown if row.cost is None else row.cost
        of_tokens = unknown if row.token_cost is None else row.token_cost
        return not row.fits, money, of_tokens, row.step_s or unknown

    return sorted(rows, key=order)


def _row(config: Config, offer: Offer, plan: Plan) -> OfferRow:
    there, rounded = config_on(config, offer)
    problems = cross_check(there)
    if problems:
        keys, text = problems[0]
        return OfferRow(offer, False, f"{'.'.join(map(str, keys))}: {text}")
    try:
        found = plan(there)
    except PipelineError as error:
        return OfferRow(offer, False, str(error))
    choice = found.choice
    way = found.content.prediction
    if choice is None or way is None or found.case is None:
        return OfferRow(offer, False, "the time is not known")
    if not choice.chosen.fits:
        return OfferRow(offer, False, what_would_fit(found.case)[0])
    hours = None if way.run_s is None else way.run_s.value / HOUR_S
    cost = found.content.summary.cost
    token_cost = None
    if offer.price is not None:
        token_cost = per_million_tokens(offer.price, way.tokens_per_s_per_rank.value)
    return OfferRow(
        offer,
        True,
        ", ".join(way.words) + rounded,
        way.step_s.value,
        hours,
        None if cost is None else cost.value,
        token_cost,
    )


def config_on(config: Config, offer: Offer) -> tuple[Config, str]:
    """Return the config on the offer's machines, and what is said if its batch is rounded."""
    cluster = config.cluster
    changes = {
        "gpu": offer.gpu,
        "gpus_per_node": offer.gpus,
        "nodes": offer.nodes,
        "gpu_hour_price": offer.price,
        "measured": None,
        "memory_gb": None,
        "intranode_gbyte_s": None,
    }
    there = cluster.model_copy(update=changes)
    changed = config.model_copy(update={"cluster": there})
    train = config.train
    if train.global_batch_samples is not None:
        return changed, ""
    block_tokens = config.shard.block_tokens
    at_once = train.blocks_at_once(there.ranks)
    blocks = train.global_batch_tokens // block_tokens
    shared = max(1, round(blocks / at_once)) * at_once
    if shared == blocks or blocks < at_once:
        return changed, ""
    tokens = shared * block_tokens
    rounded = train.model_copy(update={"global_batch_tokens": tokens})
    return changed.model_copy(update={"train": rounded}), f"; batch of {tokens:,} tokens"


def table_of(rows: Sequence[OfferRow]) -> str:
    """Return the rows as text."""
    has_money = any(row.offer.price is not None for row in rows)
    table = Table(box=None, padding=(0, 2, 0, 0))
    names = ["machines", "", "a step", "training"]
    if has_money:
        names += ["money", "1M tokens"]
    for name in names:
        table.add_column(name, no_wrap=True)
    table.add_column("how, or what would fit")
    for row in rows:
        cells = [
            str(row.offer),
            "fits" if row.fits else "no",
            _shown(row.step_s, brief),
            _shown(row.hours, lambda hours: brief(hours * HOUR_S)),
        ]
        if has_money:
            cells += [_shown(row.cost, "{:,.2f}".format), _shown(row.token_cost, "{:,.3f}".format)]
        table.add_row(*cells, row.text)
    file = StringIO()
    console = Console(
        file=file, width=_WIDTH, force_terminal=False, color_system=None, markup=False, emoji=False
    )
    console.print(table)
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip().splitlines())


def _shown(value: float | None, show: Callable[[float], str]) -> str:
    return "" if value is None else show(value)
