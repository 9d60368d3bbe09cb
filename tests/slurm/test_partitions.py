"""What a cluster has, and requests that it can never meet."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline_lib.core.errors import ConfigError
from pipeline_lib.slurm.can_start import refuse_jobs
from pipeline_lib.slurm.cluster import (
    NodeGroup,
    fitted,
    groups_of,
    limit_of,
    parse_group,
    read_groups,
    too_much,
    wrong_partitions,
)
from pipeline_lib.slurm.request import JobRequest
from pipeline_lib.slurm.site import Site

GPUS = NodeGroup(
    "gpu",
    is_default=True,
    is_up=True,
    limit_minutes=1440,
    nodes=4,
    cpus=64,
    memory_mb=500_000,
    gpus=8,
)
CPUS = NodeGroup(
    "cpu",
    is_default=False,
    is_up=True,
    limit_minutes=None,
    nodes=9,
    cpus=128,
    memory_mb=250_000,
    gpus=0,
)
REQUEST = JobRequest(2, 8, 4, 8, 200_000, 600, 120)


@pytest.mark.parametrize(
    ("limit", "minutes", "gres", "gpus"),
    [
        ("1-00:30:00", 1470, "(null)", 0),
        ("2:00:00", 120, "gpu:4", 4),
        ("30:00", 30, "gpu:h100:8", 8),
        ("infinite", None, "gpu:h100:8(S:0-1)", 8),
        ("n/a", None, "gpu:a100_3g.20gb:2,gpu:a100:4", 6),
        ("1-00:00:00", 1440, "lustre:1,gpu:2", 2),
        ("1-00:00:00", 1440, "shard:16,gpu:4(S:0)", 4),
    ],
)
def test_lines_of_sinfo(limit: str, minutes: int | None, gres: str, gpus: int) -> None:
    group = parse_group(f"gpu*|up|{limit}|4|64+|500000+|{gres}\n")
    assert group == replace(GPUS, limit_minutes=minutes, gpus=gpus)


def test_unlike_nodes_of_a_partition_are_groups_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --exact sinfo says the least that any of them has, and a + (its manual page)."""
    line = "gpu*|up|1-00:00:00|{}|{}|{}|gpu:8"
    merged = [line.format(3, "64+", "500000+")]
    exact = [line.format(2, 64, 500_000), line.format(1, 192, 1_500_000)]
    script = tmp_path / "sinfo"
    script.write_text(
        f"#!{sys.executable}\nimport sys\nprint('\\n'.join({exact} if '--exact' in sys.argv else "
        f"{merged}))\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    groups = read_groups()

    assert [(group.nodes, group.cpus, group.memory_mb) for group in groups] == [
        (2, 64, 500_000),
        (1, 192, 1_500_000),
    ]
    large = replace(REQUEST, nodes=1, cpus_per_task=16, memory_mb=1_000_000)
    assert list(too_much(large, Site(partition="gpu"), groups)) == []
    assert list(too_much(replace(large, nodes=2), Site(partition="gpu"), groups)) == [
        "cluster.nodes: 2 nodes of this size, and partition gpu has 1"
    ]
    assert fitted(replace(REQUEST, memory_mb=2_000_000), groups).memory_mb == 1_500_000


def test_a_request_that_fits_is_let_through() -> None:
    assert list(too_much(REQUEST, Site(partition="gpu"), [GPUS, CPUS])) == []
    assert list(too_much(REQUEST, Site(), [GPUS, CPUS])) == []
    assert limit_of([GPUS, CPUS]) is None
    assert limit_of([GPUS]) == 1440


def test_partitions_are_the_default_one_or_a_list() -> None:
    assert groups_of(None, [GPUS, CPUS]) == [GPUS]
    assert groups_of("cpu", [GPUS, CPUS]) == [CPUS]
    assert groups_of("gpu,cpu", [GPUS, CPUS]) == [GPUS, CPUS]
    assert list(wrong_partitions(Site(partition="gpu,cpu"), [GPUS, CPUS])) == []


def test_a_partition_that_takes_no_jobs_is_named() -> None:
    [said] = wrong_partitions(Site(partition="gpu"), [replace(GPUS, is_up=False), CPUS])
    assert said.startswith("partition 'gpu' is down and takes no jobs")


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (
            replace(REQUEST, gpus_per_node=16),
            "cluster.gpus_per_node: 16 GPUs, .* of partition gpu have at most 8",
        ),
        (
            replace(REQUEST, cpus_per_task=9),
            "cluster.cpus_per_rank: 8 ranks x 9 need 72 CPUs, and .* at most 64",
        ),
        (
            replace(REQUEST, memory_mb=600_000),
            "cluster.memory_gb: the job needs 600 GB .* at most 500 GB",
        ),
        (replace(REQUEST, nodes=5), "cluster.nodes: 5 nodes of this size, and partition gpu has 4"),
        (
            replace(REQUEST, runtime_minutes=2000),
            "cluster.runtime_minutes: 2000 minutes, .* gpu allows 1440",
        ),
    ],
)
def test_what_the_cluster_never_has_is_refused_by_its_key(request_: JobRequest, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        refuse_jobs(Site(partition="gpu"), request_, [GPUS, CPUS])


def test_an_unknown_partition_is_named_with_those_there_are() -> None:
    with pytest.raises(ConfigError) as caught:
        refuse_jobs(Site(partition="gpuu", cpu_partition="x"), REQUEST, [GPUS, CPUS])
    assert "partition 'gpuu' does not exist (did you mean gpu?); partitions: cpu, gpu; set" in str(
        caught.value
    )
    assert "PIPELINE_SLURM_PARTITION" in str(caught.value)
    assert "`cpu_partition` in the site file, or PIPELINE_SLURM_CPU_PARTITION" in str(caught.value)


def test_without_slurm_that_is_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(
        ConfigError, match="there is no sinfo on PATH; .* leave out `--profile slurm`"
    ):
        read_groups()
