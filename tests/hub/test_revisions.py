import json
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline_lib.core.errors import HubError
from pipeline_lib.hub.snapshot import Revisions, resolve
from tests import fake_hub as faults
from tests.hub.conftest import NAME, Fetcher

FILES = {"config.json": b"{}", "tokenizer.json": b"{}"}


@pytest.fixture
def memo(tmp_path: Path) -> Path:
    return tmp_path / "store" / "revisions.json"


def looked_up(memo: Path, fetcher: Fetcher, revision: str | None) -> str:
    revisions = Revisions.load(memo)
    commit = revisions.commit_of(fetcher.repository, revision)
    revisions.save()
    return commit


@pytest.mark.parametrize("revision", [None, "v1"])
def test_a_branch_is_looked_up_once_and_stays_when_it_moves(
    fetcher: Fetcher, memo: Path, revision: str | None
) -> None:
    first = fetcher.add(FILES)
    repository = fetcher.hub.repositories["model", NAME]
    repository.branches["v1"] = first
    assert looked_up(memo, fetcher, revision) == first
    asked = len(fetcher.hub.requests)
    second = repository.commit({**FILES, "config.json": b"[]"}, revision or "main")
    assert second != first
    assert looked_up(memo, fetcher, revision) == first
    assert len(fetcher.hub.requests) == asked
    entries = json.loads(memo.read_text())
    assert list(entries) == [f"{fetcher.client} model {NAME} {revision or 'main branch'}"]
    memo.unlink()
    assert looked_up(memo, fetcher, revision) == second


def test_a_commit_needs_neither_network_nor_memory(fetcher: Fetcher, memo: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    assert looked_up(memo, fetcher, commit) == commit
    assert fetcher.hub.requests == []
    assert not memo.exists()


def test_models_and_data_sets_of_one_name_are_kept_apart(fetcher: Fetcher, memo: Path) -> None:
    model = fetcher.add(FILES)
    assert looked_up(memo, fetcher, None) == model
    fetcher.kind = "dataset"
    data = fetcher.add({"train.jsonl": b"{}"})
    assert looked_up(memo, fetcher, None) == data != model


def test_what_another_process_learned_first_stays(fetcher: Fetcher, memo: Path) -> None:
    commit = fetcher.add(FILES)
    mine = Revisions.load(memo)
    assert mine.commit_of(fetcher.repository, None) == commit
    theirs = replace(mine, entries={key: {"commit": "f" * 40} for key in mine.entries})
    theirs.save()
    mine.save()
    assert looked_up(memo, fetcher, None) == "f" * 40


@pytest.mark.parametrize("text", ["[1]", "{", '{"a": 1}'])
def test_a_damaged_memory_is_as_none(fetcher: Fetcher, memo: Path, text: str) -> None:
    memo.parent.mkdir()
    memo.write_text(text)
    commit = fetcher.add(FILES)
    assert looked_up(memo, fetcher, None) == commit


def test_a_revision_that_is_not_there_is_named_as_such(fetcher: Fetcher) -> None:
    fetcher.add(FILES)
    with pytest.raises(
        HubError, match="no such revision" if fetcher.client == "huggingface" else "HTTP 404"
    ):
        resolve(fetcher.repository, "v9")


def test_an_unreachable_hub_says_what_to_check(
    fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubError, match="check the network, the proxy and the mirror"):
        resolve(fetcher.repository, None)


def test_a_busy_hub_is_asked_again(fetcher: Fetcher) -> None:
    commit = fetcher.add(FILES)
    for where in ("/revision/", f"/models/{NAME}"):
        fetcher.hub.fault(where, faults.refusal(429, Retry_After="0"))
    said: list[str] = []
    assert resolve(fetcher.repository, None, said.append) == commit


def test_an_answer_that_never_ends_is_left(
    fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline_lib.hub.patience.DEADLINE_S", 1.0)
    monkeypatch.setattr("modelscope_hub._legacy_api.REPO_TREE_PAGE_TIMEOUT_SECONDS", 60)
    fetcher.add(FILES)
    fetcher.hub.fault(f"/models/{NAME}", faults.dripping, times=99)
    with pytest.raises(HubError, match="looking up its commit: no whole answer within 1 s"):
        resolve(fetcher.repository, None)


def test_modelscope_names_no_commit_after_a_removal(fetcher: Fetcher) -> None:
    if fetcher.client != "modelscope":
        pytest.skip("Hugging Face names the commit of a branch")
    fetcher.add({**FILES, "old.json": b"1"})
    fetcher.hub.repositories["model", NAME].commit(FILES)
    with pytest.raises(HubError, match=r"names no commit for 'master'; give `revision` a commit"):
        resolve(fetcher.repository, None)
