import json
import random
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from pipeline_lib.core.errors import DataError, DiskFull, HubError, IntegrityError
from pipeline_lib.hub import snapshot
from pipeline_lib.hub.snapshot import resolve
from tests import fake_hub as faults
from tests.hub.conftest import NAME, Fetcher, download_by_the_client_itself

WEIGHTS = random.Random(0).randbytes(50_000)
MODEL = {"config.json": b'{"a": 1}', "model.safetensors": WEIGHTS, "tokenizer.json": b"{}"}
# Where the bytes of the weights come from on either hub.
BYTES = {"huggingface": "/cdn/", "modelscope": "FilePath=model.safetensors"}


def test_everything_arrives_as_it_is(fetcher: Fetcher) -> None:
    files = {
        **MODEL,
        "data/a b%20c.jsonl": b"",
        "data/\u751a\u5b1b.json": b"x" * 100,
        "generation_config.json": b"1",
    }
    assert fetcher.fetch(fetcher.add(files)) == files
    written = [path for path in (fetcher.root / "out").rglob("*") if path.is_file()]
    assert all(path.stat().st_nlink == 2 for path in written)  # not written twice


def test_a_data_set_is_no_model(fetcher: Fetcher) -> None:
    commit = fetcher.add(MODEL)
    fetcher.kind = "dataset"
    with pytest.raises(
        HubError, match=f"dataset {NAME}: HTTP 404: it does not exist, or is private"
    ):
        fetcher.fetch(commit)
    rows = {f"part-{number}.jsonl": bytes([number]) for number in range(8)}
    assert fetcher.fetch(fetcher.add(rows)) == rows


def test_what_has_arrived_is_not_fetched_again(fetcher: Fetcher) -> None:
    commit = fetcher.add(MODEL)
    fetcher.fetch(commit)
    before = len(fetcher.hub.requests)
    assert fetcher.fetch(commit, "again") == MODEL
    assert len(fetcher.hub.requests) == before


def test_a_lost_connection_is_resumed(fetcher: Fetcher) -> None:
    commit = fetcher.add(MODEL)
    where = BYTES[fetcher.client]
    fetcher.hub.fault(where, faults.dropped)
    assert fetcher.fetch(commit) == MODEL
    assert fetcher.hub.sent_bytes(where) < len(WEIGHTS) + 4096
    assert [bool(request.range) for request in fetcher.hub.requests if where in request.path] == [
        False,
        True,
    ]


@pytest.mark.parametrize(
    "fault", [faults.dropped, faults.silent, faults.shorter, faults.longer, faults.flipped]
)
def test_a_broken_transfer_is_made_good(fetcher: Fetcher, fault: faults.Change) -> None:
    commit = fetcher.add(MODEL)
    fetcher.hub.fault(BYTES[fetcher.client], fault)
    fetcher.hub.fault("tokenizer.json", fault)
    assert fetcher.fetch(commit) == MODEL


def test_an_announced_length_that_is_wrong_is_made_good(fetcher: Fetcher) -> None:
    commit = fetcher.add(MODEL)
    fetcher.hub.fault(BYTES[fetcher.client], faults.misannounced)
    assert fetcher.fetch(commit) == MODEL


def test_parts_of_two_contents_never_make_a_file(fetcher: Fetcher) -> None:
    commit = fetcher.add(MODEL)
    fetcher.hub.fault(BYTES[fetcher.client], faults.dropped)
    fetcher.hub.fault(BYTES[fetcher.client], faults.flipped)
    assert fetcher.fetch(commit) == MODEL


@pytest.mark.parametrize("fault", [faults.shorter, faults.longer, faults.flipped])
def test_what_stays_wrong_is_named_and_not_kept(fetcher: Fetcher, fault: faults.Change) -> None:
    commit = fetcher.add(MODEL)
    fetcher.hub.fault(BYTES[fetcher.client], fault, times=99)
    with pytest.raises(
        IntegrityError,
        match=r"model\.safetensors: .* the hub lists 50000 bytes.*sha256 [0-9a-f]{64}",
    ):
        fetcher.fetch(commit)
    assert not (fetcher.root / "out").exists()
    fetcher.hub.faults.clear()
    assert fetcher.fetch(commit) == MODEL


def test_a_git_blob_with_other_bytes_of_the_same_size_is_refused(fetcher: Fetcher) -> None:
    commit = fetcher.add(MODEL)
    fetcher.hub.fault("tokenizer.json", faults.flipped, times=99)
    with pytest.raises(IntegrityError, match=r"tokenizer\.json"):
        fetcher.fetch(commit)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_hub_is_asked_again(fetcher: Fetcher, status: int) -> None:
    commit = fetcher.add(MODEL)
    where = {
        "huggingface": ("/tree/", "/resolve/", "/cdn/"),
        "modelscope": ("/repo/files", "FilePath="),
    }
    for part in where[fetcher.client]:
        fetcher.hub.fault(part, faults.refusal(status))
    assert fetcher.fetch(commit) == MODEL


def in_two_seconds() -> str:
    return format_datetime(datetime.now(UTC) + timedelta(seconds=2), usegmt=True)


@pytest.mark.parametrize("form", ["seconds", "date"])
def test_the_wait_that_the_hub_asks_for_is_kept(fetcher: Fetcher, form: str) -> None:
    commit = fetcher.add(MODEL)
    wait = "1" if form == "seconds" else in_two_seconds()
    fetcher.hub.fault(
        "/tree/",
        faults.refusal(429, Retry_After=wait),
        times=3 if fetcher.client == "modelscope" else 1,
    )
    fetcher.hub.fault("/repo/files", faults.refusal(429, Retry_After=wait), times=2)
    start_s = time.monotonic()
    assert fetcher.fetch(commit) == MODEL
    assert time.monotonic() - start_s > 0.9
    assert any("the hub answers HTTP 429; trying again in" in line for line in fetcher.said)


def test_a_hub_that_asks_for_too_long_a_wait_is_left(fetcher: Fetcher) -> None:
    commit = fetcher.add(MODEL)
    fetcher.fault_listing(faults.refusal(503, Retry_After="86400"))
    with pytest.raises(
        HubError, match=r"HTTP 503 and asks to wait \d{5} s; tried once; run again later"
    ):
        fetcher.fetch(commit)


def test_a_hub_that_stays_busy_is_left(fetcher: Fetcher) -> None:
    commit = fetcher.add(MODEL)
    fetcher.hub.fault(BYTES[fetcher.client], faults.refusal(500), times=99)
    with pytest.raises(HubError, match=r"500.*run again"):
        fetcher.fetch(commit)


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_refusal_names_what_to_do_and_is_not_repeated(fetcher: Fetcher, status: int) -> None:
    commit = fetcher.add(MODEL)
    fetcher.fault_listing(faults.refusal(status))
    with pytest.raises(HubError, match=rf"{NAME}: HTTP {status}: .*_TOKEN is not set"):
        fetcher.fetch(commit)
    assert len(fetcher.hub.requests) == 1


def test_a_gated_model_says_where_to_accept_its_licence(fetcher: Fetcher) -> None:
    commit = fetcher.add(MODEL)
    for where in ("/resolve/", "FilePath="):
        fetcher.hub.fault(where, faults.refusal(403, "GatedRepo"), times=99)
    with pytest.raises(
        HubError,
        match=rf"gated: accept its licence at {fetcher.hub.url}/\S*{NAME} and set \w+_TOKEN",
    ):
        fetcher.fetch(commit)


def test_a_circle_of_redirects_ends(fetcher: Fetcher) -> None:
    commit = fetcher.add(MODEL)
    for where in (BYTES[fetcher.client], "circle"):
        fetcher.hub.fault(where, faults.circle, times=999)
    with pytest.raises(HubError, match="redirect"):
        fetcher.fetch(commit)


def test_a_hub_that_drips_is_left(fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "SILENCE_S", 2.0)
    commit = fetcher.add(MODEL)
    fetcher.hub.fault(BYTES[fetcher.client], faults.dripping, times=99)
    with pytest.raises(HubError, match=r"less than 1\.0 MB came in 2 s; run again"):
        fetcher.fetch(commit)


def test_nothing_is_fetched_onto_a_disk_that_is_too_small(
    fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = fetcher.add(MODEL)
    monkeypatch.setattr("pipeline_lib.core.files._free_bytes", lambda where: 10_000)
    with pytest.raises(DiskFull, match=rf"{NAME} at {commit[:12]} needs .* MB are free"):
        fetcher.fetch(commit)
    assert fetcher.hub.sent_bytes("") == fetcher.hub.sent_bytes("/tree/") + fetcher.hub.sent_bytes(
        "/repo/files"
    )


def test_a_token_is_sent_to_the_hub_only_and_never_shown(
    fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    canary = "hf_canary0123456789abcdef"
    monkeypatch.setenv("HF_TOKEN", canary)
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", canary)
    fetcher.hub.token = canary
    commit = fetcher.add(MODEL)
    assert fetcher.fetch(commit) == MODEL
    expected = {
        request.path: None if "/cdn/" in request.path else canary
        for request in fetcher.hub.requests
    }
    assert {request.path: request.token for request in fetcher.hub.requests} == expected
    fetcher.hub.token = "another"
    (fetcher.root / "work" / "listing.json").unlink()
    with pytest.raises(HubError, match="_TOKEN is set, but may not read it") as refusal:
        fetcher.fetch(commit)
    assert canary not in str(refusal.value)
    fetcher.hub.fault(
        "/", faults.refusal(400, Location=f"{fetcher.hub.url}?token={canary}"), times=99
    )
    with pytest.raises(HubError) as refusal:
        fetcher.fetch(commit)
    assert canary not in str(refusal.value)
    assert "?" not in str(refusal.value)


def test_an_index_that_names_what_is_not_there_is_refused_before_the_weights(
    fetcher: Fetcher,
) -> None:
    index = json.dumps(
        {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    ).encode()
    commit = fetcher.add({**MODEL, "model.safetensors.index.json": index})
    with pytest.raises(
        IntegrityError,
        match=r"names 1 file that the repository does not have, 'model-2\.safetensors'",
    ):
        fetcher.fetch(commit)
    assert not any(request.path.endswith("model.safetensors") for request in fetcher.hub.requests)
    assert not (fetcher.root / "out").exists()


@pytest.mark.parametrize(
    "shard", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "config.json", 7]
)
def test_an_index_that_points_outside_is_refused(fetcher: Fetcher, shard: object) -> None:
    index = json.dumps({"weight_map": {"a": shard}}).encode()
    commit = fetcher.add({**MODEL, "model.safetensors.index.json": index})
    with pytest.raises(DataError, match="refused|no safetensors index"):
        fetcher.fetch(commit)
    assert not (fetcher.root / "out").exists()


HOSTILE = [
    "../x", "a/../../x", "/etc/x", "C:\\x", "c:x", "a\\b", "nul\0", "bell\a", ".git/config", "a/.GIT/hooks/x", "./x",
    "a//b", "x" * 300, "manifest.json",
]  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_is_refused_before_anything_is_written(fetcher: Fetcher, name: str) -> None:
    commit = fetcher.add({**MODEL, name: b"boo"})
    with pytest.raises(DataError, match=r"refused, nothing was written: .*"):
        fetcher.fetch(commit)
    written = {path.name for path in fetcher.root.rglob("*") if path.is_file()}
    assert written <= {"listing.json", "session"}


@pytest.mark.parametrize("names", [("a.json", "A.json"), ("x/a.json", "X/b.json")])
def test_names_that_differ_by_case_are_refused(fetcher: Fetcher, names: tuple[str, str]) -> None:
    commit = fetcher.add(dict.fromkeys(names, b"1"))
    with pytest.raises(DataError, match="are one file where disks ignore case"):
        fetcher.fetch(commit)


def test_a_symbolic_link_is_refused(fetcher: Fetcher) -> None:
    if fetcher.client == "huggingface":
        pytest.skip("Hugging Face lists links as files that hold the name of their target")
    commit = fetcher.add(MODEL)
    fetcher.hub.repositories["model", NAME].modes["config.json"] = "120000"
    with pytest.raises(DataError, match=r"'config\.json' is a symbolic link"):
        fetcher.fetch(commit)


def test_a_mirror_that_is_behind_is_asked_again_later(fetcher: Fetcher) -> None:
    index = json.dumps({"weight_map": {"a": "model.safetensors"}}).encode()
    files = {**MODEL, "model.safetensors.index.json": index}
    commit = fetcher.add(
        {name: content for name, content in files.items() if name != "model.safetensors"}
    )
    with pytest.raises(IntegrityError):
        fetcher.fetch(commit)
    fetcher.hub.repositories["model", NAME].commits[commit] = files
    assert fetcher.fetch(commit) == files


def test_what_lies_in_the_users_cache_may_be_edited(fetcher: Fetcher) -> None:
    files = {**MODEL, "rows.parquet": WEIGHTS}
    commit = fetcher.add(files)
    download_by_the_client_itself(fetcher, commit)
    assert fetcher.fetch(commit) == files
    caches = {path.resolve() for path in (fetcher.root / "clients").rglob("*") if path.is_file()}
    for path in caches:
        if path.read_bytes() == files["rows.parquet"] and not path.samefile(
            fetcher.root / "out" / "model.safetensors"
        ):
            path.write_bytes(b"edited")
    assert (fetcher.root / "out" / "rows.parquet").read_bytes() == WEIGHTS


def test_it_is_said_before_a_hub_is_asked_that_may_not_answer(
    fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = fetcher.add(MODEL)
    monkeypatch.setattr(
        "pipeline_lib.hub.snapshot.in_time", lambda call, doing: pytest.fail(str(fetcher.said))
    )
    with pytest.raises(pytest.fail.Exception, match=f"{NAME} at {commit[:12]}: listing its files"):
        fetcher.fetch(commit)


def broken_json(answer: faults.Answer) -> faults.Answer:
    return replace(answer, body=answer.body[:-9])


def other_json(answer: faults.Answer) -> faults.Answer:
    return faults.as_json(
        [{"type": "file", "path": 1}] if answer.body.startswith(b"[") else {"Data": {"Files": [{}]}}
    )


@pytest.mark.parametrize("fault", [broken_json, other_json])
def test_an_answer_that_makes_no_sense_is_called_so(fetcher: Fetcher, fault: faults.Change) -> None:
    commit = fetcher.add(MODEL)
    fetcher.fault_listing(fault)
    with pytest.raises(HubError, match=rf"{NAME}: the hub's answer makes no sense \(\w+: "):
        fetcher.fetch(commit)


def test_an_error_of_ours_does_not_blame_the_network(
    fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = fetcher.add(MODEL)

    def bug(*_: object) -> None:
        raise KeyError("ours")

    monkeypatch.setattr("pipeline_lib.hub.snapshot._describe", bug)
    with pytest.raises(KeyError, match="ours"):
        fetcher.fetch(commit)
    monkeypatch.setattr("pipeline_lib.hub.huggingface._remote_file", bug)
    monkeypatch.setattr("pipeline_lib.hub.modelscope.is_commit", bug)
    (fetcher.root / "work" / "listing.json").unlink(missing_ok=True)
    with pytest.raises(KeyError, match="ours"):
        fetcher.fetch(commit) if fetcher.client == "huggingface" else resolve(
            fetcher.repository, None
        )
