"""What is read back of a verified checkpoint beside its tensors, and whether it is one of this run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from pipeline_lib.base.errors import IntegrityError
from pipeline_lib.base.fsio import read_json
from pipeline_lib.base.manifest import read_manifest
from pipeline_lib.base.spec import Spec
from pipeline_lib.train.checkpoint.publish import STATE_NAME, rank_name
from pipeline_lib.train.dist import World
from pipeline_lib.train.state import LOSS_SCALE

RANDOM, STRATEGY = "random.", "strategy."  # what the names in a rank's file begin with
_MAY_DIFFER = frozenset({"until_step"})


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The scalars of a verified checkpoint."""
    return dict(read_json(checkpoint / STATE_NAME))


def refuse_foreign(checkpoint: Path, spec: Spec) -> None:
    """Raise IntegrityError naming the settings and inputs in which the run that left `checkpoint` differs from `spec`.

    How a run is placed is in neither, and may change.
    """
    theirs, ours = (_decisive(each) for each in (Spec.from_json(read_manifest(checkpoint).spec, str(checkpoint)), spec))
    if differing := sorted(key for key in theirs.keys() | ours.keys() if theirs.get(key) != ours.get(key)):
        named = "; ".join(f"{key} is {_shown(theirs, key)} there and {_shown(ours, key)} here" for key in differing)
        raise IntegrityError(
            f"{checkpoint}: left by a run that computes something else ({named}); take it away from {checkpoint.parent}"
            " to begin anew, or give the config back what differs"
        )


def _decisive(spec: Spec) -> dict[str, Any]:
    """What decides the weights that come out, by a name that says where it is set."""
    settings = {f"train.{key}": value for key, value in spec.settings.items() if key not in _MAY_DIFFER}
    inputs = {f"the {name}": ref.digest for name, ref in spec.inputs.items()}
    return {**settings, **inputs, "the version of the training code": spec.version}


def _shown(values: Mapping[str, Any], key: str) -> str:
    return repr(values[key]) if key in values else "the default"


def own_tensors(world: World, strategy_state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What this rank alone has: torch's random states, and `own_state` of its strategy.

    Nothing in training draws from the random states of Python and numpy.
    """
    own = {f"{RANDOM}cpu": torch.get_rng_state()}
    if world.device.type == "cuda":
        own[f"{RANDOM}cuda"] = torch.cuda.get_rng_state(world.device)
    return own | {f"{STRATEGY}{name}": tensor for name, tensor in strategy_state.items()}


def read_own(checkpoint: Path, world: World) -> dict[str, Tensor]:
    """What `own_tensors` gave this rank, if the checkpoint is of as many ranks; else nothing."""
    path = checkpoint / rank_name(world.rank)
    if read_state(checkpoint)["world_size"] != world.size or not path.exists():
        return {}
    return load_file(str(path))


def strategy_state(checkpoint: Path, world: World, strategy: str) -> dict[str, Tensor]:
    """What the strategy of this rank kept for itself; of another strategy or world, what all can use."""
    own = read_own(checkpoint, world) if read_state(checkpoint)["strategy"] == strategy else {}
    if own:
        return {name.removeprefix(STRATEGY): tensor for name, tensor in own.items() if name.startswith(STRATEGY)}
    first = load_file(str(checkpoint / rank_name(0)))
    return {LOSS_SCALE: first[f"{STRATEGY}{LOSS_SCALE}"]} if f"{STRATEGY}{LOSS_SCALE}" in first else {}


def restore_random_state(own: Mapping[str, Tensor], world: World) -> None:
    """Continue this rank's random numbers where `own` left them, if it knows."""
    if f"{RANDOM}cpu" in own:
        torch.set_rng_state(own[f"{RANDOM}cpu"])
    if world.device.type == "cuda" and f"{RANDOM}cuda" in own:  # a run may move from CPUs to GPUs
        torch.cuda.set_rng_state(own[f"{RANDOM}cuda"], world.device)
