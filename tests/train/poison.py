"""Training in which chosen steps go wrong on one rank: a loss or gradient not finite, a spike."""

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipeline_lib.core.errors import Interrupted, TrainingError
from pipeline_lib.train import rank as rank_module
from pipeline_lib.train import step as step_module
from pipeline_lib.train.rank import RankJob, train_rank
from tests.train.helpers import Killed, digest_of, signal_this

NAN_LOSS, INF_GRADIENT, SPIKE = "nan_loss", "inf_gradient", "spike"
_LOSS_FACTORS = {NAN_LOSS: float("nan"), SPIKE: 50.0}


@dataclass
class Poison:
    """What goes wrong in which step, on rank 1; at which event it is killed, when asked to stop."""

    steps: Mapping[int, str]
    killed_at: tuple[str, int] | None = None  # name and step of an event
    stopped_in: int | None = None  # the step in which every rank gets a SIGTERM


@dataclass
class Course:
    """What a rank saw: a digest of weights and moments as each step began, events by name."""

    digests: dict[int, str] = field(default_factory=dict)
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    error: str = ""
    exit_code: int = 0

    def named(self, name: str) -> list[dict[str, Any]]:
        """The fields of every event of that name."""
        return [fields for found, fields in self.events if found == name]


def train_poisoned(environ: Mapping[str, str], job: RankJob, poison: Poison) -> Course:
    """Train with `poison`, in its own process, as functions of the package are replaced there."""
    course, now = Course(), {"step": 0}
    strategies: list[Any] = []

    def observe(name: str, fields: dict[str, Any]) -> None:
        if name == "step.begin":
            now["step"] = fields["step"]
            tensors = {key: _local(tensor) for key, tensor in strategies[0].snapshot().items()}
            course.digests[fields["step"]] = digest_of(tensors)
        elif name != "step.end":
            course.events.append((name, fields))
        if poison.killed_at == (name, fields.get("step")):
            raise Killed
        if name == "step.begin" and fields["step"] == poison.stopped_in:
            signal_this(signal.SIGTERM)

    _replace(environ["RANK"] == "1", poison, now, strategies)
    try:
        train_rank(job, environ, lambda _: None, (observe,))
    except Killed:
        pass
    except (Interrupted, TrainingError) as error:
        course.error, course.exit_code = str(error), error.exit_code
    return course


def _replace(is_poisoned: bool, poison: Poison, now: dict[str, int], strategies: list[Any]) -> None:
    losses: Any = vars(step_module)["loss_sums"]
    make_strategy: Any = vars(rank_module)["make_strategy"]

    def kind() -> str:
        return poison.steps.get(now["step"], "") if is_poisoned else ""

    def poisoned_losses(*arguments: Any) -> tuple[Tensor, Tensor]:
        total, of_routers = losses(*arguments)
        return total * _LOSS_FACTORS.get(kind(), 1.0), of_routers

    def make(*arguments: Any) -> Any:
        strategy = make_strategy(*arguments)
        backward = strategy.backward
        factors = {INF_GRADIENT: float("inf")}
        setattr(strategy, "backward", lambda loss: backward(loss * factors.get(kind(), 1.0)))  # noqa: B010
        strategies.append(strategy)
        return strategy

    vars(step_module)["loss_sums"] = poisoned_losses
    vars(rank_module)["make_strategy"] = make


def _local(tensor: Tensor) -> Tensor:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach().cpu().to(torch.float32)
