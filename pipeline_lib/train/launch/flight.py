"""The flight recorder of torch: which exchange hung, and who was not in it.

NCCL's watchdog leaves a file for each rank that saw a timeout. It is a pickle of plain values, written by C++, and is
read as such: a pickle that names anything to be imported or called is refused. Read from what gloo's recorder, which
shares the format, writes; with NCCL, on GPUs, it has not been run.
"""

import io
import json
import pickle
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

FLIGHT = "flight"
_PREFIX = "rank_"  # torch appends the rank's number
_MAX_BYTES = 1 << 28
# What unpickling and looking into broken bytes raise.
_BROKEN = (pickle.UnpicklingError, ValueError, EOFError, LookupError, TypeError, AttributeError, OverflowError, OSError)


@dataclass(frozen=True)
class Hang:
    """An exchange that some ranks were in and that did not end; `absent` were not in it, `unheard` left no record."""

    exchange: str
    number: int
    group: str
    joined: tuple[int, ...]
    absent: tuple[int, ...]
    unheard: tuple[int, ...]

    def __str__(self) -> str:
        """`all_reduce number 812 of default_pg did not end: rank 3 did not join it`."""
        what = f"{self.exchange} number {self.number} of {self.group} did not end"
        whom = [f"{_ranks(self.absent)} did not join it"] if self.absent else []
        whom += [f"{_ranks(self.unheard)} left no record"] if self.unheard else []
        return f"{what}: {', '.join(whom) or 'all ranks had joined it'}"


def _ranks(numbers: tuple[int, ...]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        """Refuse: plain values need nothing that would have to be imported."""
        raise pickle.UnpicklingError(f"it names {module}.{name}, and a record holds plain values only")


def recorder_environment(run_dir: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """What turns the recorder on, and has it write below `run_dir`, as far as `environ` does not say otherwise.

    Each setting has an older name too: torch takes the first that is set, and the user's is to be the one.
    """
    made: dict[str, str] = {}
    for names, value in (
        (("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), "2000"),
        (("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"), str(run_dir / FLIGHT / _PREFIX)),
        (("TORCH_NCCL_DUMP_ON_TIMEOUT",), "1"),
    ):
        if not any(name in environ for name in names):
            made |= dict.fromkeys(names, value)
    return made


def read_record(data: bytes) -> dict[str, Any]:
    """The record in `data`. Raises UnpicklingError and its like for what is none; runs nothing."""
    record = _PlainUnpickler(io.BytesIO(data)).load()  # noqa: S301 - it refuses all but plain values
    if not isinstance(record, dict) or not isinstance(record.get("entries"), list):
        raise pickle.UnpicklingError("it is no record of exchanges")
    return record


def find_hang(run_dir: Path, ranks: int) -> Hang | None:
    """The first exchange that did not end, by the records of the run in `run_dir`; None without one."""
    records = {}
    for rank in range(ranks):
        path = run_dir / FLIGHT / f"{_PREFIX}{rank}"
        with suppress(*_BROKEN):
            if path.stat().st_size <= _MAX_BYTES:
                records[rank] = read_record(path.read_bytes())
    hangs = []
    for group in {name for record in records.values() for name in _groups(record)}:
        with suppress(*_BROKEN):
            if found := _hang_of(group, records, ranks):
                hangs.append(found)
    return min(hangs, default=(0, None), key=lambda found: found[0])[1]


def _groups(record: Mapping[str, Any]) -> set[str]:
    with suppress(*_BROKEN):
        return {str(entry["process_group"][0]) for entry in record["entries"]}
    return set()


def _hang_of(group: str, records: Mapping[int, Mapping[str, Any]], ranks: int) -> tuple[int, Hang] | None:
    """The first exchange of `group` that did not end, and when it was begun."""
    made = {
        rank: {
            int(entry["collective_seq_id"]): entry
            for entry in record["entries"]
            if str(entry["process_group"][0]) == group and not entry["is_p2p"]
        }
        for rank, record in records.items()
    }
    hung = [number for of_rank in made.values() for number, entry in of_rank.items() if not _has_ended(entry)]
    if not hung:
        return None
    number = min(hung)
    joined = tuple(rank for rank in sorted(made) if number in made[rank])
    entry = made[joined[0]][number]
    members = _members(group, records, ranks)
    absent = tuple(rank for rank in members if rank in made and max(made[rank], default=0) < number)
    unheard = tuple(rank for rank in members if rank not in records)
    exchange = str(entry["profiling_name"]).rpartition(":")[2]
    name = str(entry["process_group"][1]) or group
    return int(entry["time_created_ns"]), Hang(exchange, number, name, joined, absent, unheard)


def _has_ended(entry: Mapping[str, Any]) -> bool:
    return entry["state"] == "completed" or bool(entry["retired"])


def _members(group: str, records: Mapping[int, Mapping[str, Any]], ranks: int) -> list[int]:
    """The ranks of `group`; all of the world where no record says."""
    for record in records.values():
        with suppress(*_BROKEN):
            return sorted(int(rank) for rank in json.loads(record["pg_config"][group]["ranks"]))
    return list(range(ranks))
