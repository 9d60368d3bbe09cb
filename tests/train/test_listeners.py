"""Nobody gets in: where a training listens, what another user can do, and no rank unpickles."""

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch import distributed
from torch.distributed import distributed_c10d

from pipeline_lib.launch.environment import RENDEZVOUS_FILE
from pipeline_lib.train.rank import RankJob
from tests.listeners import assert_private, listeners, stores_that_another_user_finds
from tests.ranks import run_ranks
from tests.train.conftest import Arena
from tests.train.helpers import train
from tests.train.launching import ENDLESS, make_stage


@pytest.mark.root
def test_a_training_on_one_machine_has_no_store_that_others_reach(arena: Arena) -> None:
    stage = make_stage(arena, **ENDLESS)
    # as on a cluster, where runs on several nodes want it
    process = stage.start(GLOO_SOCKET_IFNAME="eth0")
    stage.wait_for_step(2)
    processes = stage.processes()
    found = listeners([psutil.Process(process.pid), *processes])
    assert found, "gloo's connections between the ranks"
    assert_private(found)
    assert stores_that_another_user_finds(found) == set()
    meeting = Path(stage.rank(0).environ()[RENDEZVOUS_FILE])
    assert meeting.parent.stat().st_mode & 0o777 == 0o700

    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75, stage.output
    assert not meeting.parent.exists()


@pytest.mark.root
def test_the_attack_finds_a_store_of_torch() -> None:
    """Otherwise its failures would prove nothing."""
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    place = ("127.0.0.1", store.port)
    assert stores_that_another_user_finds([place]) == {place}


def train_without_pickles(environ: Mapping[str, str], job: RankJob) -> Any:
    """Train as a rank that fails where torch would unpickle what another rank has sent."""

    def refuse(*_: Any) -> None:
        raise AssertionError("what a peer sent is unpickled")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed_c10d, "_tensor_to_object", refuse)
        return train(environ, job)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3"])
def test_no_rank_unpickles_what_others_send(arena: Arena, tmp_path: Path, strategy: str) -> None:
    settings: dict[str, Any] = {"strategy": strategy, "save_every_steps": 2}
    if strategy == "hsdp":
        settings["shard_ranks"] = 1
    first = arena.job(2, tmp_path / "first", until_step=2, **settings)
    run_ranks(train_without_pickles, 2, first)
    resumed = arena.job(2, tmp_path / "resumed", until_step=4, **settings)
    assert resumed.resume_from is not None
    run_ranks(train_without_pickles, 2, resumed)
