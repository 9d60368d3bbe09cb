"""The batch of an optimizer step: micro-batch x accumulation x GPUs, or DeepSpeed's total."""

import math
from typing import Any

from pipeline_lib.config.import_draft import Draft
from pipeline_lib.config.import_tokens import is_packed
from pipeline_lib.config.import_tools import SWIFT, Origin

MOST_GPUS = 64  # of one node, by the schema
_MICRO = "per_device_train_batch_size"
_ACCUMULATION = "gradient_accumulation_steps"
_BATCH = (
    f"{_MICRO} {_ACCUMULATION} train_batch_size ray_num_workers num_processes nproc_per_node "
    "packing neat_packing"
)


def convert_batch(draft: Draft, origin: Origin) -> None:
    """Convert the samples or tokens of a step, and the GPUs of a machine.

    The keys of the length of a sample have to be converted before.
    """
    micro = draft.whole(_MICRO, origin.default(_MICRO))
    ranks = _ranks(draft)
    accumulation = _accumulation(draft, origin, micro, ranks)
    total = draft.whole("train_batch_size")
    numbers = (micro, accumulation, total, ranks)
    if any(number is not None and number < 1 for number in numbers):
        draft.problems.append("the batch: its numbers have to be at least 1")
        return
    if draft.truth("use_cpu") or draft.truth("no_cuda"):
        draft.taken("use_cpu no_cuda", {"cluster.gpus_per_node": 0})
    if micro is None or accumulation is None:
        _batch_of_total(draft, total, ranks)
        return
    if total is not None and draft.has(_MICRO) and draft.has(_ACCUMULATION):
        ranks_of_total, rest = divmod(total, micro * accumulation)
        if rest or not ranks_of_total or ranks not in (None, ranks_of_total):
            number = ranks or "a whole number of"
            text = f"train_batch_size {total} is not {micro} x {accumulation} x {number} GPUs"
            draft.problems.append(f"{text}; DeepSpeed refuses it, too")
            return
        ranks = ranks_of_total
    if ranks is not None and ranks // _machines(draft) > MOST_GPUS:
        ranks = None
    samples = total or micro * accumulation * (ranks or 1)
    values, of_packing = _values(draft, origin, samples)
    if draft.values.get("cluster.gpus_per_node") == 0:
        product = f"{micro} x {accumulation} accumulated, on the CPU"
    else:
        values["cluster.gpus_per_node"] = _gpus_of_a_machine(draft, ranks)
        product = f"{micro} a GPU x {accumulation} accumulated x {_gpus(ranks)}{of_packing}"
    draft.changed(_BATCH, values, f"samples of an optimizer step over all ranks: {product}")


def _values(draft: Draft, origin: Origin, samples: int) -> tuple[dict[str, Any], str]:
    """Return our value for a batch of `samples` there, and what to say of packed sequences."""
    block = draft.values.get("shard.block_tokens")
    if block is not None and is_packed(draft):
        tokens = {"train.global_batch_tokens": samples * block}
        return tokens, f"; with packing, a sample there is a packed sequence of {block} tokens"
    values = {"train.global_batch_samples": samples}
    if origin.is_of_training and is_packed(draft):
        text = "; a sample there is a packed sequence, of a length that no file says: set"
        return values, f"{text} train.global_batch_tokens"
    why = "off there, so a batch counts samples; none sees another here"
    draft.taken("packing neat_packing", why=why)
    return values, ""


def _gpus(ranks: int | None) -> str:
    if ranks is None:
        text = "1 GPU, since the files do not say how many there are."
        return f"{text} With N, import with --gpus N"
    return f"{ranks} GPUs" if ranks > 1 else "1 GPU"


def _machines(draft: Draft) -> int:
    return draft.whole("num_machines", 1) or 1


def _gpus_of_a_machine(draft: Draft, ranks: int | None) -> int:
    return max(1, (ranks or 1) // _machines(draft))


def _ranks(draft: Draft) -> int | None:
    """Return the number of GPUs of all machines, or None if neither file nor `--gpus` says it."""
    machines = _machines(draft)
    why = "which GPUs a run may take: the same variable says it here"
    draft.taken("cuda_visible_devices", why=why)
    if machines > 1:
        why = "for several machines set cluster.nodes and cluster.internode_gbit_s; the batch "
        draft.changed("num_machines", None, f"{why}counts all GPUs (docs/two-machines.md)")
    draft.taken("num_machines", why="one machine, as here by default")
    of_all = "num_processes" if draft.has("num_processes") else "ray_num_workers"
    total = draft.whole(of_all)
    per_node = draft.whole("nproc_per_node")
    if total is not None and total % machines:
        draft.problems.append(f"num_processes: {total} is no multiple of {machines} machines")
    if per_node is None:
        return total
    if total is not None and total != per_node * machines:
        one = draft.given["nproc_per_node"][0]
        text = f"{one.file}: {one}: contradicts {of_all}: {total}"
        draft.problems.append(f"{text}; correct one of them, or leave out --gpus")
    return per_node * machines


def _accumulation(draft: Draft, origin: Origin, micro: int | None, gpus: int | None) -> int | None:
    """Return the micro-batches that a rank accumulates; None if neither file nor tool says it."""
    by_default: int | None = origin.default(_ACCUMULATION)
    if origin.tool == SWIFT and micro:
        by_default = math.ceil(16 / micro / (gpus or 1))
    elif by_default is None and micro:
        by_default = 1
    return draft.whole(_ACCUMULATION, by_default)


def _batch_of_total(draft: Draft, total: int | None, ranks: int | None) -> None:
    """Convert the batch of a DeepSpeed JSON whose micro-batch is not given."""
    gpus = draft.values.get("cluster.gpus_per_node", _gpus_of_a_machine(draft, ranks))
    values = {"cluster.gpus_per_node": gpus}
    if total is not None:
        why = "samples of an optimizer step over all GPUs"
        if ranks is None:
            why += "; no file says how many GPUs there are, so 1"
        draft.changed(_BATCH, {"train.global_batch_samples": total, **values}, why)
        return
    why = "the Trainer's arguments decide, and no file has them: give them as another FILE, or set"
    draft.changed(_BATCH, values, f"{why} train.global_batch_samples and cluster.gpus_per_node")
