"""The doctor on nodes whose links can be throttled."""

from pathlib import Path

import pytest

from tests.slurm.loopback import loopback
from tests.slurm.needs import needs_namespaces
from tests.slurm.test_doctor import examined, no_site

__all__ = ["no_site"]
pytestmark = [pytest.mark.slow, pytest.mark.slurm, needs_namespaces]


def test_a_slow_link_is_found(tmp_path: Path) -> None:
    with loopback(nodes=3, namespaces=True) as slurm:
        slurm.limit_link("n3", "100mbit")
        said, facts, wrong = examined(tmp_path / "doctor.json", "--nodes", "3")

    rates = {
        (one["first"], one["second"]): min(one["there"], one["back"]) * 8 / 1e6
        for one in facts["pairs"]
    }
    assert rates["n1", "n2"] > 400
    assert rates["n1", "n3"] < 110
    assert rates["n2", "n3"] < 110
    assert "n3: all of its pairs are slow, so it is its own link" in "\n".join(wrong)
    assert "NCCL_SOCKET_IFNAME=eth0" in said
