"""Weights of the result that link to the last checkpoint are sealed by its hashes, unread."""

import os
import shutil
from pathlib import Path

import pytest

from pipeline_lib.core.run_folder import WEIGHTS
from pipeline_lib.core.stage import Job
from pipeline_lib.core.store import FileEntry, Manifest, Spec, Store, write_manifest
from pipeline_lib.launch.stage import take_hashes
from tests.locks import hold

NAME = f"{WEIGHTS}/shard.safetensors"
KNOWN = "5" * 64  # by the manifest; another than the content has


@pytest.fixture
def job(tmp_path: Path) -> Job:
    job = Job(
        Spec("train", 1, {}),
        Store(tmp_path / "store"),
        {},
        tmp_path / "out",
        print,
        hold(tmp_path / "lock"),
    )
    (job.out / WEIGHTS).mkdir(parents=True)
    return job


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "step-00000001"
    (folder / WEIGHTS).mkdir(parents=True)
    (folder / NAME).write_bytes(b"weights")
    files = {NAME: FileEntry(bytes=7, sha256=KNOWN)}
    write_manifest(folder, Manifest(stage="checkpoint", digest="x", spec={}, files=files))
    return folder


def test_a_link_has_the_hash_of_its_checkpoint(job: Job, checkpoint: Path) -> None:
    os.link(checkpoint / NAME, job.out / NAME)
    take_hashes(job, checkpoint)
    assert job.hashes == {NAME: KNOWN}


def test_a_file_that_was_edited_after_it_was_sealed_is_read(job: Job, checkpoint: Path) -> None:
    os.link(checkpoint / NAME, job.out / NAME)
    sealed_ns = (checkpoint / "manifest.json").stat().st_mtime_ns
    os.utime(checkpoint / NAME, ns=(sealed_ns + 1, sealed_ns + 1))
    take_hashes(job, checkpoint)
    assert job.hashes == {}


def test_a_copy_is_read(job: Job, checkpoint: Path) -> None:
    shutil.copyfile(checkpoint / NAME, job.out / NAME)
    take_hashes(job, checkpoint)
    assert job.hashes == {}


def test_without_the_checkpoint_all_is_read(job: Job, tmp_path: Path) -> None:
    take_hashes(job, tmp_path / "step-00000002")
    assert job.hashes == {}
