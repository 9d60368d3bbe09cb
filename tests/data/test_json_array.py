import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline_lib.core.errors import DataError
from pipeline_lib.data import read_json
from pipeline_lib.data.read_json import JsonArray


def elements(content: bytes, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The elements of `content`, read some bytes at a time; where they lie is checked."""
    monkeypatch.setattr(read_json, "CHUNK_BYTES", chunk_bytes)
    found = list(JsonArray(io.BytesIO(content), "rows.json"))
    assert [element.place.row for element in found] == list(range(1, len(found) + 1))
    texts = [element.text or b"" for element in found]
    for element, text in zip(found, texts, strict=True):
        assert content[element.place.byte_offset :].startswith(text)
    return texts


@pytest.fixture(params=[1, 2, 3, 7, 1 << 16])
def chunk_bytes(request: pytest.FixtureRequest) -> int:
    """Chunks that cut everything everywhere, and those of real use."""
    return int(request.param)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(
    rows=st.lists(JSON, max_size=4),
    ascii_only=st.booleans(),
    indent=st.none() | st.just(2),
    size=st.sampled_from([1, 3, 50]),
    mark=st.booleans(),
)
def test_any_array_is_read_as_json_reads_it(
    rows: list[object], ascii_only: bool, indent: int | None, size: int, mark: bool
) -> None:
    text = json.dumps(rows, ensure_ascii=ascii_only, indent=indent)
    content = (read_json.BOM if mark else b"") + text.encode(errors="replace")
    with pytest.MonkeyPatch.context() as patch:
        found = elements(content, size, patch)

    read = [json.loads(element) for element in found]
    assert json.dumps(read) == json.dumps(json.loads(content.removeprefix(read_json.BOM)))


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        (b"[]", []),
        (b"\xef\xbb\xbf[1]", [b"1"]),
        (b"[12345, -0.5e+10 ,true,null]", [b"12345", b"-0.5e+10", b"true", b"null"]),
        (b'["\\ud83d\\ude00", "\\ud800", "\\\\"]', [b'"\\ud83d\\ude00"', b'"\\ud800"', b'"\\\\"']),
        ('["娘娘", "😀"]'.encode(), ['"娘娘"'.encode(), '"😀"'.encode()]),
        (b'["\xff", {"a": "\xe4\xbd"}]', [b'"\xff"', b'{"a": "\xe4\xbd"}']),
        (b"[NaN, -Infinity, " + b"9" * 5000 + b"]", [b"NaN", b"-Infinity", b"9" * 5000]),
        (b'["a\tb\nc"]', [b'"a\tb\nc"']),
    ],
)
def test_elements_are_found_byte_for_byte(
    content: bytes, texts: list[bytes], chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert elements(content, chunk_bytes, monkeypatch) == texts


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'[\n{"a": 1},\n{"a": }\n]', r"rows\.json:3:7: not JSON: Expecting value; mend"),
        (b'[{"a": 1}', r"rows\.json:1:10: not JSON: expected ',', the file ends"),
        (b'[{"a": 1},', r"1:11: not JSON: Expecting value"),
        (b'[{"a": 1} {"a": 2}]', r"1:11: not JSON: expected ',', found '{'"),
        (b'[{"a": 1}]\n[]', r"2:1: not JSON: more text after the end"),
        (b'[{"a": 1]', r"1:9: not JSON: Expecting ',' delimiter"),
        (b'[{"a": "b}]', r"1:8: not JSON: Unterminated string"),
        (b'\xef\xbb\xbf[\r\n{"a": 1},\r\n  tru]', r"3:3: not JSON: Expecting value"),
        ('["娘娘", \n "娘", x]'.encode(), r"2:7: not JSON: Expecting value"),
        (b'["\xff\xfe", x]', r"1:8: not JSON: Expecting value"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": 1}', r"1:1: not JSON: expected '\[', found '{'"),
    ],
)
def test_what_is_no_array_is_an_error_with_line_and_column(
    content: bytes, message: str, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if len(content) > 1000:
        chunk_bytes = 1 << 16
    with pytest.raises(DataError, match=message):
        elements(content, chunk_bytes, monkeypatch)


def test_a_row_without_end_is_an_error_before_it_fills_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(read_json, "MAX_LINE_BYTES", 1000)
    content = b'[{"a": 1},\n{"a": "' + b"x" * 100_000
    with pytest.raises(
        DataError, match=r"rows\.json:2:1: not JSON: a row of more than 1000 bytes; is a quote"
    ):
        elements(content, 100, monkeypatch)
