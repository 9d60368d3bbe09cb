"""Ways to spread a model over ranks, one small file each; the loop knows none by name."""

from pipeline_lib.train.dist import World
from pipeline_lib.train.parallel.base import Strategy
from pipeline_lib.train.parallel.ddp import Ddp
from pipeline_lib.train.parallel.fsdp import Fsdp

STRATEGIES: dict[str, type[Strategy]] = {"ddp": Ddp, "fsdp": Fsdp}


def make_strategy(name: str, world: World, precision: str) -> Strategy:
    """The strategy that the config calls `name`."""
    return STRATEGIES[name](world, precision)


__all__ = ["STRATEGIES", "Strategy", "make_strategy"]
