import errno
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from pipeline_lib.core.errors import DiskFull, HubError
from pipeline_lib.hub.patience import Busy, patiently, retry_after_s
from pipeline_lib.hub.refusals import Credentials, broken, plain
from pipeline_lib.hub.repository import Repository

REPOSITORY = Repository("huggingface", "model", "owner/thing")
SECRET = "my-own-secret-4711"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("at https://hub/a/b?X-Amz-Signature=123&x=1 now", "at https://hub/a/b now"),
        ("'http://user:pass@mirror/x'", "'http://mirror/x'"),
        (f"token {SECRET} refused", "token *** refused"),
        ("sent hf_abcdefghij", "sent hf_***"),
        ("one\ntwo", "one"),
        ("x" * 1000, "x" * 297 + "..."),
        (f"{'refused ' * 36}https://hub/owner/thing", f"{'refused ' * 36}..."),
        ("moves\x1b[2Jthe cursor", "moves [2Jthe cursor"),
        ("", ""),
    ],
)
def test_no_query_password_or_token_is_shown(text: str, shown: str) -> None:
    assert plain(text, SECRET) == shown


def test_a_token_is_not_shown_by_those_who_hold_it() -> None:
    assert SECRET not in f"{Credentials('HF_TOKEN', SECRET)!r} {Credentials('HF_TOKEN', SECRET)}"


def test_a_full_disk_is_named_as_such() -> None:
    error = broken(
        REPOSITORY, OSError(errno.ENOSPC, "No space left on device"), Credentials("HF_TOKEN", None)
    )
    assert isinstance(error, DiskFull)


@pytest.mark.parametrize(
    ("value", "wait_s"), [("7", 7), ("0", 0), ("soon", None), ("-1", None), ("", None)]
)
def test_retry_after_in_seconds(value: str, wait_s: float | None) -> None:
    assert retry_after_s({"retry-AFTER": value}) == wait_s


@pytest.mark.parametrize(("ahead_s", "at_least"), [(90, 80), (-90, 0)])
def test_retry_after_as_a_date(ahead_s: float, at_least: float) -> None:
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=ahead_s), usegmt=True)
    wait_s = retry_after_s({"Retry-After": date})
    assert wait_s is not None
    assert at_least <= wait_s <= max(0, ahead_s)


@pytest.mark.parametrize(
    ("asked_s", "said", "expected"),
    [
        (
            140.0,
            "asking: the hub answers HTTP 429 and asks to wait 140 s; tried 3 times; run",
            [140.0, 140.0],
        ),
        (None, "asking: the hub answers HTTP 429; tried 5 times; run", [1.0, 2.0, 4.0, 8.0]),
    ],
)
def test_waits_grow_and_have_a_budget_together(
    monkeypatch: pytest.MonkeyPatch, asked_s: float | None, said: str, expected: list[float]
) -> None:
    waits: list[float] = []
    monkeypatch.setattr("pipeline_lib.hub.patience.time.sleep", waits.append)

    def call() -> None:
        raise Busy("the hub answers HTTP 429", asked_s)

    with pytest.raises(HubError, match=said):
        patiently(call, "asking", lambda text: None)
    assert waits == expected
