"""The flight recorder's files: read as plain values, and who was not in the exchange that hung.

NCCL's own files have not been read: there is no GPU here. Gloo's recorder writes the same format by the same code.
"""

import os
import pickle
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipeline_lib.launch.environment import find_hang, read_record
from tests.ranks import run_ranks


def record(*exchanges: tuple[int, str, str], group: str = "0", members: str = "[0, 1, 2]") -> dict[str, Any]:
    """As torch lays it out: each exchange is its number, its name and its state."""
    return {
        "version": "2.10",
        "pg_config": {group: {"name": group, "desc": "default_pg", "ranks": members}},
        "entries": [
            {
                "process_group": (group, "default_pg"),
                "collective_seq_id": number,
                "profiling_name": f"nccl:{name}",
                "time_created_ns": 1_000 + number,
                "state": state,
                "retired": state == "completed",
                "is_p2p": False,
                "input_sizes": [[4]],
            }
            for number, name, state in exchanges
        ],
    }


def leave(run_dir: Path, records: dict[int, Any]) -> None:
    (run_dir / "flight").mkdir(parents=True, exist_ok=True)
    for rank, content in records.items():
        data = content if isinstance(content, bytes) else pickle.dumps(content, protocol=2)
        (run_dir / "flight" / f"rank_{rank}").write_bytes(data)


BEFORE = (1, "all_gather_base", "completed")


def test_who_did_not_join_is_named(tmp_path: Path) -> None:
    stuck = record(BEFORE, (2, "all_reduce", "started"), (3, "broadcast", "scheduled"))
    leave(tmp_path, {0: stuck, 1: record(BEFORE), 2: stuck})
    hang = find_hang(tmp_path, 3)

    assert hang is not None
    assert (hang.exchange, hang.number, hang.joined, hang.absent, hang.unheard) == ("all_reduce", 2, (0, 2), (1,), ())
    assert str(hang) == "all_reduce number 2 of default_pg did not end: rank 1 did not join it"


def test_a_frozen_rank_leaves_no_record(tmp_path: Path) -> None:
    stuck = record(BEFORE, (2, "all_reduce", "started"))
    leave(tmp_path, {0: stuck, 2: stuck})

    assert str(find_hang(tmp_path, 3)).endswith("rank 1 left no record")


def test_the_group_that_hung_first_is_told(tmp_path: Path) -> None:
    later = record((5, "all_reduce", "started"), group="0", members="[0, 1]")
    first = record((2, "reduce_scatter", "started"), group="7", members="[0, 1]")
    both = {**later, "entries": later["entries"] + first["entries"], "pg_config": later["pg_config"]}
    leave(tmp_path, {0: both, 1: both})

    assert str(find_hang(tmp_path, 2)).startswith("reduce_scatter number 2")


def test_nothing_hung_and_nothing_left_are_told_apart_from_a_hang(tmp_path: Path) -> None:
    assert find_hang(tmp_path, 2) is None
    leave(tmp_path, {0: record(BEFORE), 1: record(BEFORE)})
    assert find_hang(tmp_path, 2) is None


@dataclass
class Hostile:
    canary: Path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.canary}",)


def test_a_hostile_record_is_not_run(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    hostile = pickle.dumps({"entries": [Hostile(canary)]})
    with pytest.raises(pickle.UnpicklingError, match="plain values only"):
        read_record(hostile)
    leave(tmp_path, {0: hostile, 1: record((2, "all_reduce", "started"))})

    assert str(find_hang(tmp_path, 3)) == "all_reduce number 2 of default_pg did not end: ranks 0, 2 left no record"
    assert not canary.exists()


@pytest.mark.parametrize(
    "broken",
    [b"", b"\x80\x02", b"no pickle", pickle.dumps([1]), pickle.dumps({"entries": 3}), pickle.dumps({"entries": [1]})],
    ids=["empty", "cut", "text", "list", "number", "entry"],
)
def test_a_broken_record_is_passed_over(tmp_path: Path, broken: bytes) -> None:
    leave(tmp_path, {0: broken})

    assert find_hang(tmp_path, 2) is None


def dump(environ: dict[str, str]) -> bytes:
    """Two exchanges, the second of them by one rank alone."""
    os.environ.update({**environ, "TORCH_FR_BUFFER_SIZE": "100"})
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(4))
    if dist.get_rank() == 0:
        dist.broadcast(torch.ones(2), src=0, async_op=True)
    dumped = bytes(torch._C._distributed_c10d._dump_fr_trace())  # type: ignore[attr-defined]
    time.sleep(1)  # the other may still be dumping
    return dumped


def test_what_torch_itself_writes_is_read(tmp_path: Path) -> None:
    dumps = run_ranks(dump, 2)
    names = [entry["profiling_name"] for entry in read_record(dumps[0])["entries"]]

    assert "gloo:all_reduce" in names
    for rank, data in dumps.items():
        made = read_record(data)
        # Gloo does not say what has ended; NCCL's watchdog does.
        for entry in made["entries"]:
            entry["state"], entry["retired"] = "started", entry["profiling_name"] != "gloo:broadcast"
        leave(tmp_path, {rank: made})
    hang = find_hang(tmp_path, 2)
    assert hang is not None
    assert (hang.exchange, hang.absent) == ("broadcast", (1,))
