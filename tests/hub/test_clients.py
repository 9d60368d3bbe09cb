"""The clients as people run them: in own processes, by environment, offline, over TLS, killed."""

import os
import random
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub.utils._xet_progress_reporting import XetDownloadProgressReporter

from pipeline_lib.core.errors import HubError
from pipeline_lib.hub.huggingface import bar_telling
from pipeline_lib.hub.snapshot import resolve
from tests import fake_hub as faults
from tests.fake_hub import FakeHub, point_clients, serving
from tests.hub.conftest import NAME, Fetcher, download_by_the_client_itself
from tests.processes import wait_for

FILES = {"config.json": b'{"a": 1}', "model.safetensors": random.Random(1).randbytes(200_000)}
ROOT = Path(__file__).parents[2]
BYTES = {"huggingface": "/cdn/", "modelscope": "FilePath=model.safetensors"}


def test_a_killed_download_goes_on_where_it_was(fetcher: Fetcher) -> None:
    commit = fetcher.add(FILES)
    where = BYTES[fetcher.client]
    fetcher.hub.fault(where, faults.dripping_later)

    def has_much() -> bool:
        with suppress(FileNotFoundError):  # one was finished meanwhile
            return any(
                path.stat().st_size >= 90_000
                for path in (fetcher.root / "work").glob("*.incomplete")
            )
        return False

    with started(fetcher, commit) as process:
        try:
            wait_for(has_much, "the download of the first half")
        finally:
            process.kill()
    wait_for(lambda: fetcher.hub.sent_bytes(where) > 0, "the end of the broken answer")
    before = fetcher.hub.sent_bytes(where)
    assert fetcher.fetch(commit) == FILES
    assert fetcher.hub.sent_bytes(where) - before <= 110_000


def started(fetcher: Fetcher, commit: str | None, **environ: str) -> subprocess.Popen[str]:
    """A process of its own that fetches what `fetcher` would, into the folder `out` of its own."""
    code = f"""
import sys
from pathlib import Path
from huggingface_hub import constants
from pipeline_lib.core.errors import PipelineError
from pipeline_lib.hub.snapshot import resolve
from pipeline_lib.hub.repository import Repository
from pipeline_lib.hub.snapshot import Snapshot
constants.DOWNLOAD_CHUNK_SIZE = 4096
repository = Repository({fetcher.client!r}, "model", {NAME!r})
try:
    snapshot = Snapshot(repository, resolve(repository, {commit!r}), Path({str(fetcher.root / "work")!r}), print)
    snapshot.fetch(list(snapshot.files), Path("out"), lambda here, total: None)
except PipelineError as error:
    sys.exit(f"{{error.exit_code}} {{error}}")
"""
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HF_", "MODELSCOPE_"))
    }
    url, caches = fetcher.hub.url, fetcher.root / "caches"
    mirrors = {
        "HF_ENDPOINT": url,
        "HF_HOME": str(caches),
        "MODELSCOPE_ENDPOINT": url,
        "MODELSCOPE_CACHE": str(caches),
    }
    mirrors |= {
        "MODELSCOPE_HOME": str(caches),
        "MODELSCOPE_DOWNLOAD_INTRA_CLOUD": "0",
        "PYTHONPATH": str(ROOT),
    }
    place = fetcher.root / "process"
    place.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=place,
        env={**clean, **mirrors, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def in_a_process(
    fetcher: Fetcher, commit: str | None, **environ: str
) -> subprocess.CompletedProcess[str]:
    """The same to its end."""
    with started(fetcher, commit, **environ) as process:
        output, errors = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def test_mirror_and_token_are_those_of_the_clients_own_variables(fetcher: Fetcher) -> None:
    fetcher.add(FILES)
    fetcher.hub.token = "hf_secret0123456789"
    variable = {"huggingface": "HF_TOKEN", "modelscope": "MODELSCOPE_API_TOKEN"}[fetcher.client]
    accepted = in_a_process(fetcher, None, **{variable: fetcher.hub.token})
    assert accepted.returncode == 0, accepted.stderr
    assert fetcher.hub.token not in accepted.stdout + accepted.stderr
    out = fetcher.root / "process" / "out"
    assert {path.name: path.read_bytes() for path in out.iterdir()} == FILES


def test_what_the_user_has_in_the_clients_cache_is_taken_from_there(fetcher: Fetcher) -> None:
    commit = fetcher.add(FILES)
    download_by_the_client_itself(fetcher, commit)
    before = fetcher.hub.sent_bytes("model.safetensors") + fetcher.hub.sent_bytes("/cdn/")
    assert fetcher.fetch(commit) == FILES
    assert fetcher.hub.sent_bytes("model.safetensors") + fetcher.hub.sent_bytes("/cdn/") == before


def test_a_wrong_file_in_the_cache_is_replaced(fetcher: Fetcher) -> None:
    commit = fetcher.add(FILES)
    download_by_the_client_itself(fetcher, commit)
    caches = [
        path
        for path in (fetcher.root / "clients").rglob("*")
        if path.is_file() and not path.is_symlink()
    ]
    damaged = [path for path in caches if path.read_bytes() == FILES["model.safetensors"]]
    assert damaged
    for path in damaged:
        path.write_bytes(b"x" * 200_000)
    assert fetcher.fetch(commit) == FILES


@pytest.fixture
def offline(fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch) -> tuple[Fetcher, str]:
    """Main was downloaded by `hf download`; now there is no network."""
    if fetcher.client == "modelscope":
        pytest.skip("ModelScope's client has no offline mode")
    commit = fetcher.add(FILES)
    download_by_the_client_itself(fetcher, "main")
    fetcher.hub.requests.clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return fetcher, commit


def test_offline_the_cache_is_enough(offline: tuple[Fetcher, str]) -> None:
    fetcher, commit = offline
    assert resolve(fetcher.repository, None) == resolve(fetcher.repository, "main") == commit
    assert fetcher.fetch(commit) == FILES
    assert fetcher.hub.requests == []


def test_offline_what_the_cache_lacks_is_named(
    offline: tuple[Fetcher, str], tmp_path: Path
) -> None:
    fetcher, commit = offline
    with pytest.raises(
        HubError, match="offline, and the cache .* does not know this revision; give `revision` a"
    ):
        resolve(fetcher.repository, "v9")
    with pytest.raises(HubError, match="offline, and the cache .* has no listing of commit"):
        fetcher.fetch("0" * 40)
    for path in (tmp_path / "clients" / "huggingface").rglob("model.safetensors"):
        path.unlink()
    with pytest.raises(HubError, match=r"offline, and model\.safetensors is not in the cache"):
        fetcher.fetch(commit)
    assert fetcher.hub.requests == []


def test_offline_is_what_the_variable_says(fetcher: Fetcher) -> None:
    if fetcher.client == "modelscope":
        pytest.skip("ModelScope's client has no offline mode")
    fetcher.add(FILES)
    done = in_a_process(fetcher, None, HF_HUB_OFFLINE="1")
    assert done.returncode == 1
    assert "69 huggingface model owner/thing: offline, and the cache" in done.stderr
    assert fetcher.hub.requests == []


def test_without_a_hub_what_has_arrived_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving() as hub:
        point_clients(hub, tmp_path / "clients", monkeypatch)
        fetcher = Fetcher(hub, "modelscope", tmp_path)
        commit = fetcher.add(FILES)
        assert fetcher.fetch(commit) == FILES
    assert fetcher.fetch(commit, "again") == FILES
    with pytest.raises(HubError, match="check the network"):
        resolve(fetcher.repository, None)


def test_a_certificate_that_is_not_trusted_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl here to make a certificate")
    certificate = tmp_path / "both.pem"
    request = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "1",
        "-subj",
        "/CN=127.0.0.1",
    ]
    subprocess.run(
        [*request, "-keyout", certificate, "-out", tmp_path / "c.pem"],
        check=True,
        capture_output=True,
    )
    with certificate.open("a") as file:
        file.write((tmp_path / "c.pem").read_text())
    with serving(certificate) as hub:
        point_clients(hub, tmp_path / "clients", monkeypatch)
        for client in ("huggingface", "modelscope"):
            fetcher = Fetcher(hub, client, tmp_path)
            with pytest.raises(HubError, match="TLS certificate is not trusted here"):
                resolve(fetcher.repository, None)


def test_chunked_files_come_by_the_accelerated_download(hub: FakeHub, tmp_path: Path) -> None:
    """The hub announces chunks, but serves none: the client takes the file into its own cache."""
    fetcher = Fetcher(hub, "huggingface", tmp_path)
    commit = fetcher.add(FILES)
    hub.repositories["model", NAME].xet = True
    assert fetcher.fetch(commit) == FILES
    cached = tmp_path / "clients" / "huggingface" / "models--owner--thing" / "snapshots" / commit
    assert [path.name for path in cached.iterdir()] == ["model.safetensors"]


def test_files_come_side_by_side(fetcher: Fetcher) -> None:
    files = {f"{number}.json": b"12345678" for number in range(8)}
    commit = fetcher.add(files)
    fetcher.hub.fault(".json", faults.slowly, times=99)
    start_s = time.monotonic()
    assert fetcher.fetch(commit) == files
    assert time.monotonic() - start_s < 8 * 0.8


def test_the_accelerated_download_tells_of_its_bytes() -> None:
    told: list[int] = []
    reporter = XetDownloadProgressReporter(
        reconstruction_desc="", total=100, log_level=0, tqdm_class=bar_telling(told.append)
    )
    report = SimpleNamespace(
        total_bytes_completed=60,
        total_transfer_bytes_completed=50,
        total_bytes_completion_rate=1.0,
        total_transfer_bytes_completion_rate=1.0,
        total_bytes=100,
    )
    with reporter:
        reporter.update_progress(report)
    assert told == [60, 0]


def test_a_file_that_takes_more_than_the_clients_hour_goes_on(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modelscope_hub._download.DOWNLOAD_TOTAL_TIMEOUT", 1)
    monkeypatch.setattr("modelscope_hub._download.DOWNLOAD_MIN_BYTES_PER_SECOND", 0)
    fetcher = Fetcher(hub, "modelscope", tmp_path)
    commit = fetcher.add(FILES)
    hub.fault(BYTES["modelscope"], faults.dripping_later)
    assert fetcher.fetch(commit) == FILES
    assert hub.sent_bytes(BYTES["modelscope"]) < 210_000
