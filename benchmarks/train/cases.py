"""What is measured: a model's geometry, documents of certain lengths, how many a step, and by whom.

The peers' micro-batches are as large as fits beside the model on H200s (139 GiB).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pipeline_lib.config.section import read_settings
from pipeline_lib.config.train import Train

OURS = "ours"  # the name of our side; that of a variant goes on with ": " and its keys
LORA = {"rank": 16, "alpha": 32}  # of all linears: ours, and peers that bring nothing of their own
# What is compared, where the product would choose by itself; keys that this version does not have
# are left out.
FAST = {"compile": True, "recompute": "none", "reshard": False}


@dataclass(frozen=True)
class Peer:
    """A recipe of Hugging Face's Trainer, or of TRL's; how documents become batches is `batches`.

    `max_length` pads to the case's `max_tokens`, `longest` to the longest of a batch; `flattened`
    lays documents in one row (DataCollatorWithFlattening), `trl` packs rows of `max_tokens` first.
    The latter two attend through a T x T mask made from the positions, since flash-attn is not
    installed where this runs.
    """

    name: str
    batches: Literal["max_length", "longest", "flattened", "trl"]
    documents: int  # of a rank at a time; with `trl`, rows
    zero: int | None = None  # DeepSpeed's stage; None is plain DDP
    is_liger: bool = False
    is_checkpointed: bool = False
    is_tutorial_lora: bool = False  # r = 8 on q, k, v and o instead of the adapters that we train
    most_steps: int | None = None  # for the slow


@dataclass(frozen=True)
class Case:
    """One race. `max_tokens` is the longest document; `train` holds our keys of that section.

    A rank takes `rank_documents` in a step, whose lengths are such that they fill `rank_blocks` of
    `block_tokens`, as packing a whole corpus does. The part of each document from `supervised_from`
    on is trained on.
    """

    name: str
    size: str
    lengths: str
    max_tokens: int
    block_tokens: int
    rank_documents: int
    rank_blocks: int
    method: str
    peers: tuple[Peer, ...] = ()
    precision: str = "bf16"
    supervised_from: float = 0.0
    layers: int | None = None  # so many, instead of the geometry's
    train: Mapping[str, Any] = field(default_factory=dict)

    def peer(self, name: str) -> Peer:
        """The peer of that name."""
        return next(peer for peer in self.peers if peer.name == name)


def changed(case: Case, changes: Sequence[str]) -> Case:
    """`case` with fields set by `KEY=VALUE`. Raises TypeError for a key that it does not have."""
    return replace(case, **parsed(changes))


def parsed(assignments: Sequence[str]) -> dict[str, Any]:
    """`KEY=VALUE` by key; values are JSON where they read as such, else text."""
    found: dict[str, Any] = {}
    for key, _, value in (assignment.partition("=") for assignment in assignments):
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return found


def train_settings(case: Case, assignments: Sequence[str] = ()) -> Train:
    """Our section `train` of such a run: the case's, changed by `KEY=VALUE`.

    Raises IntegrityError for one unknown.
    """
    lora = {"lora": LORA} if case.method == "lora" else {}
    fast = {key: value for key, value in FAST.items() if key in Train.model_fields}
    known = {"method": case.method, "precision": case.precision, **lora, **fast, **case.train}
    return read_settings(Train, {**known, **parsed(assignments)})


TUTORIAL = Peer("tutorial", "max_length", 4, zero=2, is_tutorial_lora=True, most_steps=7)
TUTORIAL_GC = replace(TUTORIAL, name="tutorial-gc", is_checkpointed=True, most_steps=6)
ZERO_3_LIGER = Peer("zero3-liger", "longest", 1, zero=3, is_liger=True)
ZERO_2_LIGER = Peer("zero2-liger", "longest", 1, zero=2, is_liger=True)
ZERO_3 = Peer("zero3", "longest", 1, zero=3)
ZERO_2 = Peer("zero2", "longest", 1, zero=2)
ZERO_3_GC = Peer("zero3-gc", "longest", 1, zero=3, is_checkpointed=True)
FLATTENED = Peer("flattened", "flattened", 1)
TRL = Peer("trl-packing", "trl", 1, is_liger=True)
FULL: Mapping[str, Any] = {"strategy": "fsdp"}
PLAIN: Mapping[str, Any] = {"compile": False}  # compiling for CPUs takes longer than these races


def _fixed(
    name: str, size: str, layers: int | None, peers: tuple[Peer, ...], block_tokens: int = 16_384
) -> Case:
    """Documents of 8192 tokens, 16,384 of a rank in a step."""
    blocks = 16_384 // block_tokens
    return Case(
        name, size, "8192", 8192, block_tokens, 2, blocks, "full", peers, layers=layers, train=FULL
    )


def _packed(
    name: str,
    lengths: str,
    max_tokens: int,
    rank_documents: int,
    method: str = "full",
    peers: tuple[Peer, ...] = (),
    rank_blocks: int = 1,
    supervised_from: float = 0.0,
) -> Case:
    """Documents of 8B in blocks of 16,384 tokens."""
    train: Mapping[str, Any] = {"strategy": "ddp"} if method == "lora" else FULL
    blocks = 16_384, rank_documents, rank_blocks
    return Case(
        name,
        "8B",
        lengths,
        max_tokens,
        *blocks,
        method,
        peers,
        supervised_from=supervised_from,
        train=train,
    )


def _tiny(
    name: str, method: str, peers: tuple[Peer, ...], size: str = "demo", **train: Any
) -> Case:
    """A case that CPUs do in seconds: whether all sides run, and compute the same."""
    known = {
        "strategy": "ddp" if method == "lora" else "fsdp",
        "micro_batch_blocks": 2,
        **PLAIN,
        **train,
    }
    return Case(name, size, "demo", 256, 256, 8, 4, method, peers, "fp32", 0.5, train=known)


_PACKED_LORA = (TUTORIAL, replace(TRL, documents=9), replace(FLATTENED, documents=40), TUTORIAL_GC)
_LONG_LORA = (TUTORIAL, replace(TRL, documents=6), replace(FLATTENED, documents=8))
_PACKED_FULL = (
    replace(TRL, documents=5, zero=3),
    replace(FLATTENED, documents=8, zero=3, is_liger=True),
)
_MOE = (replace(ZERO_3, documents=2), replace(ZERO_2, documents=2))
_ALL = (
    *(replace(ZERO_3_LIGER, documents=2), ZERO_2_LIGER, replace(ZERO_3, documents=2), ZERO_3_GC),
    *(replace(FLATTENED, documents=4), replace(TRL, documents=2, zero=3)),
)
_CASES = (
    Case(
        "demo",
        "demo",
        "demo",
        max_tokens=256,
        block_tokens=256,
        rank_documents=64,
        rank_blocks=32,
        method="full",
        peers=(
            Peer("padded", "max_length", 8),
            Peer("longest", "longest", 8),
            Peer("flattened", "flattened", 8),
        ),
        precision="fp32",
        supervised_from=0.5,
        train={"strategy": "ddp", "micro_batch_blocks": 4, **PLAIN},
    ),
    _tiny("tiny-full", "full", _ALL),
    _tiny(
        "tiny-lora",
        "lora",
        (TUTORIAL, TUTORIAL_GC, replace(FLATTENED, documents=4), replace(TRL, documents=2)),
    ),
    _tiny("tiny-moe", "full", _MOE, size="demo-moe", router_aux_loss=0.0),
    _tiny("tiny-hybrid", "full", (Peer("longest", "longest", 4),), size="demo-hybrid"),
    _fixed(
        "full-8B-8192",
        "8B",
        None,
        (replace(ZERO_3_LIGER, documents=2), ZERO_2_LIGER, ZERO_3, ZERO_2),
    ),
    _fixed(
        "full-8B-8192-12layers",
        "8B",
        12,
        (replace(ZERO_3_LIGER, documents=2), ZERO_2_LIGER, ZERO_3, ZERO_2),
    ),
    _fixed("full-8B-8192-2gpus", "8B", None, (ZERO_3_LIGER, ZERO_3), block_tokens=8192),
    # On one GPU the states of 4B leave room for one document at a time.
    _fixed("full-4B-8192", "4B", None, (ZERO_3_LIGER, ZERO_2_LIGER), block_tokens=8192),
    _packed("full-8B-1000", "1000", 2048, 16, peers=_PACKED_FULL),
    _packed("full-8B-alpaca", "alpaca", 1024, 80, supervised_from=0.5),
    _packed("full-8B-huanhuan", "huanhuan", 160, 272, supervised_from=0.5),
    _packed("lora-8B-1000", "1000", 2048, 32, "lora", _LONG_LORA, rank_blocks=2),
    _packed("lora-8B-alpaca", "alpaca", 1024, 80, "lora", _PACKED_LORA, supervised_from=0.5),
    # A block of one document, for `--variant context_ranks=2`.
    Case(
        "lora-8B-65536",
        "8B",
        "65536",
        max_tokens=65_536,
        block_tokens=65_536,
        rank_documents=1,
        rank_blocks=1,
        method="lora",
        supervised_from=0.5,
        train={"strategy": "ddp", "recompute": "full"},
    ),
    Case(
        "full-32B-4096-cut",
        "32B",
        "4096",
        max_tokens=4096,
        block_tokens=16_384,
        rank_documents=4,
        rank_blocks=1,
        method="full",
        peers=(replace(ZERO_3_LIGER, documents=2),),
        layers=6,
        train=FULL,
    ),
    # One period of its layers: three with the delta rule and one with attention. For 80 GB.
    Case(
        "qwen3.5-9B-cut",
        "qwen3.5-9B",
        "4096",
        max_tokens=4096,
        block_tokens=16_384,
        rank_documents=4,
        rank_blocks=1,
        method="full",
        peers=(replace(ZERO_2_LIGER, documents=2), replace(ZERO_2, documents=1)),
        layers=4,
        train=FULL,
    ),
    Case(
        "lora-qwen3.5-27B",
        "qwen3.5-27B",
        "4096",
        max_tokens=4096,
        block_tokens=8192,
        rank_documents=2,
        rank_blocks=1,
        method="lora",
        train={"strategy": "ddp", "recompute": "full"},
    ),
    Case(
        "moe-30B-A3B-cut",
        "30B-A3B",
        "4096",
        max_tokens=4096,
        block_tokens=16_384,
        rank_documents=4,
        rank_blocks=1,
        method="full",
        peers=_MOE,
        layers=6,
        train={**FULL, "router_aux_loss": 0.0},  # as the peers, whose config has none by default
    ),
)
CASES = {case.name: case for case in _CASES}
