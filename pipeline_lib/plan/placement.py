"""How layers are run, as far as memory and time go by it, and which keys of that the plan chooses.

It settles every `auto` before anything runs; one that is not settled is off, as it is to train/layers.py.
"""

from collections.abc import Collection

from pipeline_lib.config.schema import CHOSEN_KEYS, Train

AUTO = "auto"


def recompute_of(train: Train) -> str:
    """`none`, `selective` or `full`."""
    return "none" if train.recompute == AUTO else train.recompute


def is_sharded(train: Train) -> bool:
    """Whether FSDP2 gathers the weights."""
    return train.strategy in ("fsdp", "hsdp")


def stays_gathered(train: Train) -> bool:
    """Whether layers that were gathered for the first micro-batch of a step stay so until the last one is done."""
    return is_sharded(train) and train.reshard is False


def is_compiled(train: Train) -> bool:
    """Whether torch.compile has the layers."""
    return train.compile is True


def can_compile(train: Train, has_triton: bool) -> bool:
    """Whether `compile: auto` may be true: where it was tried on GPUs, and layers stay one graph.

    That leaves out DeepSpeed, and adapters that are peft's own modules; and fp32 and GPUs without Triton (machine.py),
    where documents attend one by one and layers would be compiled anew for other lengths.
    """
    is_native = not train.uses_deepspeed
    is_whole = train.method == "full" or has_fused_adapters(train)
    return has_triton and is_native and is_whole and train.precision != "fp32"


def eager_under_deepspeed(train: Train) -> Train:
    """`train` as `auto` would have it after a change of the strategy: DeepSpeed's never compile."""
    return train.model_copy(update={"compile": False}) if train.uses_deepspeed else train


def has_fused_adapters(train: Train) -> bool:
    """Whether each linear with its adapter is one operator (train/adapted.py), or peft's own module.

    `zero3` gathers the weights of a module when that itself is called, which the operator does not.
    """
    return train.method == "lora" and train.lora.dropout == 0 and not train.lora.dora and train.strategy != "zero3"


def free_keys(train: Train, held: Collection[str]) -> frozenset[str]:
    """Keys that the plan chooses: those that are `auto`, and with `strategy: auto` all of CHOSEN_KEYS but `held`."""
    is_open = train.strategy == AUTO
    return frozenset(key for key in CHOSEN_KEYS if getattr(train, key) == AUTO or (is_open and key not in held))


def settled(train: Train, has_triton: bool) -> Train:
    """`train` without `auto` where there is nothing to choose by: what needs no foresight.

    The strategy is one that exists.
    """
    usual = {"recompute": "none", "reshard": True, "compile": can_compile(train, has_triton)}
    return train.model_copy(update={key: value for key, value in usual.items() if getattr(train, key) == AUTO})
