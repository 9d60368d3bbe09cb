import io
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline_lib.core.text import RedactedText, cut, redact, shortened

SECRET = "aB3dE6gH9jK2mN5pQ8sT1vW4"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"use hf_{SECRET} here", "use hf_*** here"),
        (f"export HF_TOKEN=hf_{SECRET}", "export HF_TOKEN=***"),
        (f"sk-proj-{SECRET}.", "sk-***."),
        ("ms-0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0", "ms-***"),
        (f"ghp_{SECRET} and github_pat_{SECRET}", "ghp_*** and github_pat_***"),
        ("AKIAIOSFODNN7EXAMPLE", "AKIA***"),
        (f"Authorization: Bearer {SECRET}", "Authorization: Bearer ***"),
        (f"authorization: bearer {SECRET}", "authorization: bearer ***"),
        ("Authorization: Basic YW5uOmh1bnRlcjI=", "Authorization: Basic ***"),
        ("{'authorization': 'Basic YW5uOmh1bnRlcjI='}", "{'authorization': 'Basic ***'}"),
        (f"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.{SECRET}_-", "eyJ***"),
        (f"AIza{SECRET}-_{SECRET[:9]}", "AIza***"),
        ("xoxb-1234567890-abcdefghij", "xoxb-***"),
        (f"https://host/x?X-Amz-Signature={SECRET}&x=1", "https://host/x?X-Amz-Signature=***&x=1"),
        ("https://ann:hunter2@host/x?y=1", "https://ann:***@host/x?y=1"),
        ("https://:hunter2@host", "https://:***@host"),
        (f"https://{SECRET}@host/x.git", "https://***@host/x.git"),
        (
            f"https://a.blob.core.windows.net/c/f?sv=2&sig={SECRET}%3D&se=3",
            "https://a.blob.core.windows.net/c/f?sv=2&sig=***&se=3",
        ),
        (f"glpat-{SECRET} and glrt-{SECRET}", "glpat-*** and glrt-***"),
        (f"sk_live_{SECRET}, rk_test_{SECRET}", "sk_live_***, rk_test_***"),
        (f"npm_{SECRET} pypi-{SECRET}", "npm_*** pypi-***"),
        (
            f"-----BEGIN RSA PRIVATE KEY-----\n{SECRET}\n-----END RSA PRIVATE KEY-----\nrest",
            "-----BEGIN RSA PRIVATE KEY-----***\nrest",
        ),
        (f"-----BEGIN PRIVATE KEY-----\n{SECRET}", "-----BEGIN PRIVATE KEY-----***"),
        ('{"password": "hunter2", "user": "ann"}', '{"password": "***", "user": "ann"}'),
        (r'"{\"api_key\": \"hunter2\"}"', r'"{\"api_key\": \"***\"}"'),
        ("?token=hunter2&page=2", "?token=***&page=2"),
        ("AWS_SECRET_ACCESS_KEY=hunter2", "AWS_SECRET_ACCESS_KEY=***"),
        ("db_password: hunter2; next", "db_password: ***; next"),
        ("API-KEY = 'hunter2'", "API-KEY = '***'"),
    ],
)
def test_credentials_are_masked_and_their_kind_stays(text: str, shown: str) -> None:
    assert redact(text) == shown
    assert redact(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        "",
        "max_tokens=4096, tokenizer: Qwen3",
        "a token of the text",
        "a basic understanding, Basic authentication",
        "the task-oriented ms-dos disk, risk-averse",
        "https://host:8080/path?query=1",
        "git@github.com:org/name.git, ssh://git@host/x, glaiveai/glaive-function-calling-v2",
        "data/global-mmlu-lite-test.jsonl, THUDM/glm-4.1v-9b-thinking, eos_token: <|im_end|>, "
        "pad_token=x",
        "mail ann@host, ratio 3:4",
        '{"instruction": "你好", "output": "hi"}',
    ],
)
def test_other_text_stays_as_it_is(text: str) -> None:
    assert redact(text) == text


def test_a_stream_in_the_place_of_another_passes_on_redacted_lines() -> None:
    inner = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    shown = RedactedText(inner)
    for part in ("first pass", "word=hunter2\nsecond ", "https://ann:hunt"):
        shown.write(part)
    inner.buffer.seek(0)
    assert inner.buffer.read() == b"first password=***\n"
    shown.write("er2@host")
    shown.flush()
    inner.buffer.seek(0)
    assert inner.buffer.read() == b"first password=***\nsecond https://ann:***@host"


@given(
    st.text(),
    st.sampled_from(["hf_", "sk-", "token=", "Bearer ", "eyJ", "AIza", "Authorization: Basic "]),
    st.text(alphabet=" \n\"'.", max_size=3),
)
def test_no_secret_survives_whatever_stands_around_it(before: str, kind: str, after: str) -> None:
    assert SECRET not in redact(f"{before} {kind}{SECRET}{after}")


@pytest.mark.parametrize(
    "piece",
    [
        "a",
        "token",
        "://",
        "x:",
        "bearer ",
        "hf_",
        '\\"',
        "token=",
        " ",
        "eyJ",
        "xoxb-",
        "authorization: ",
    ],
)
def test_long_text_costs_time_in_proportion(piece: str) -> None:
    def seconds(size: int) -> float:
        text = piece * (size // len(piece))
        start = time.process_time()
        redact(text)
        return time.process_time() - start

    assert seconds(400_000) < 40 * max(seconds(40_000), 0.01)


@pytest.mark.parametrize(
    ("text", "most_chars", "short"),
    [
        ("one two three", 13, "one two three"),
        ("one two three", 12, "one two ..."),
        ("one two three", 11, "one two ..."),
        ("one two three", 10, "one two..."),
        ("many lines\n  of two", 15, "many lines ..."),
        ("see https://hub/owner/thing/resolve", 20, "see https://hub/o..."),
        ("the hub refused it: https://hub/owner/thing", 30, "the hub refused it: ..."),
        ("", 10, ""),
    ],
)
def test_what_is_cut_ends_with_a_whole_word_where_that_leaves_half(
    text: str, most_chars: int, short: str
) -> None:
    assert cut(text, most_chars) == short


@given(st.text("ab \n", max_size=60), st.integers(8, 40))
def test_what_is_cut_is_no_longer_than_asked_and_says_that_it_was_cut(
    text: str, most_chars: int
) -> None:
    short = cut(text, most_chars)
    assert len(short) <= most_chars
    assert short == text or (
        short.endswith("...") and text.startswith(short.removesuffix("...").rstrip())
    )


def test_words_of_others_are_one_line_that_moves_no_cursor_and_holds_no_credentials() -> None:
    assert (
        shortened(f"  refused\r\n\tby \x1b[2J hf_{SECRET} {'again ' * 9}", 40)
        == "refused by [2J hf_*** again again ..."
    )
