"""The classes of distribution strategies by `train.strategy`; the training loop names none."""

from pipeline_lib.config.train import Train
from pipeline_lib.train.ddp import Ddp
from pipeline_lib.train.deepspeed import Zero
from pipeline_lib.train.dist import World
from pipeline_lib.train.fsdp import Fsdp, Hsdp
from pipeline_lib.train.strategy import Strategy

STRATEGY_CLASSES: dict[str, type[Strategy]] = {
    "ddp": Ddp,
    "fsdp": Fsdp,
    "hsdp": Hsdp,
    "zero1": Zero,
    "zero2": Zero,
    "zero3": Zero,
}


def make_strategy(world: World, train: Train, accumulation: int) -> Strategy:
    """Return the strategy that `train` names."""
    return STRATEGY_CLASSES[train.strategy](world, train, accumulation)
