"""What can be wrong in a process's environment: each is named, with a remedy, none as a bug."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline_lib.cli.main import main
from pipeline_lib.config import content
from pipeline_lib.config.content import data_files
from pipeline_lib.core.errors import DataError

ROWS = "".join(
    json.dumps({"prompt": f"What is {n}?", "completion": f"{n} is {n}."}) + "\n" for n in range(40)
)
CONFIG = """\
experiment: odd
model: {{source: {source}}}
data: {{train: [{{source: file, path: '{path}'}}], validation_fraction: 0.2}}
cluster: {{gpus_per_node: 0, cpu_ranks: 1}}
train: {{lr: 1.0e-4, global_batch_tokens: 1024}}
"""
# None of them answers, or is asked at all.
NOWHERE = {"HF_ENDPOINT": "http://127.0.0.1:1", "MODELSCOPE_ENDPOINT": "http://127.0.0.1:1"}
HUGGING_FACE, MODELSCOPE = ("huggingface, name: nobody/nothing", "modelscope, name: nobody/nothing")


def checked(
    folder: Path,
    source: str = "tiny",
    path: str = "rows.jsonl",
    encoding: str = "utf-8",
    **environ: str,
) -> "subprocess.CompletedProcess[str]":
    """`check` of a config in `folder`, on a terminal with that `encoding`."""
    (folder / "rows.jsonl").write_text(ROWS)
    (folder / "my.yaml").write_text(CONFIG.format(source=source, path=path), encoding="utf-8")

    return subprocess.run(
        [sys.executable, "-m", "pipeline_lib", "check", "my.yaml"],
        cwd=folder,
        env={**os.environ, **NOWHERE, **environ},
        capture_output=True,
        encoding=encoding,
        timeout=300,
    )


@pytest.mark.parametrize(
    ("source", "environ", "remedy"),
    [
        (
            HUGGING_FACE,
            {"ALL_PROXY": "socks5://127.0.0.1:1"},
            "ALL_PROXY and HTTPS_PROXY, or `pip install socksio",
        ),
        (HUGGING_FACE, {"HTTP_PROXY": "odd://127.0.0.1:1"}, "check the addresses in HTTP_PROXY"),
        (
            HUGGING_FACE,
            {"HTTP_PROXY": "http://127.0.0.1:port"},
            "check the addresses in HTTP_PROXY",
        ),
        (
            HUGGING_FACE,
            {"SSL_CERT_FILE": "/not/there"},
            "SSL_CERT_FILE or SSL_CERT_DIR names certificates",
        ),
        (HUGGING_FACE, {"HF_TOKEN": "hf_“abc”"}, "HF_TOKEN holds '“', which no token has"),
        (HUGGING_FACE, {"HF_ENDPOINT": "127.0.0.1"}, "the mirror's address"),
        (
            MODELSCOPE,
            {"ALL_PROXY": "socks5://127.0.0.1:1"},
            "ALL_PROXY and HTTPS_PROXY, or `pip install socksio",
        ),
        (
            MODELSCOPE,
            {"MODELSCOPE_API_TOKEN": "“abc”"},
            "MODELSCOPE_API_TOKEN holds '“', which no token has",
        ),
        (
            MODELSCOPE,
            {"REQUESTS_CA_BUNDLE": "/not/there", "MODELSCOPE_ENDPOINT": "https://127.0.0.1:1"},
            "SSL_CERT_FILE and REQUESTS_CA_BUNDLE",
        ),
    ],
)
def test_what_the_network_needs_is_named(
    tmp_path: Path, source: str, environ: dict[str, str], remedy: str
) -> None:
    done = checked(tmp_path, source, **environ)
    assert done.returncode == 69, done.stderr
    assert remedy in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "environ",
    [
        {"HOME": "/proc/none"},
        {"HOME": ""},
        {"XDG_CACHE_HOME": "/proc/none"},
        {"HF_HOME": "/proc/none"},
        {"TMPDIR": "/not/there"},
        {"HF_TOKEN": "hf_abc\n"},
        {"PYTHONIOENCODING": "ascii"},
    ],
    ids=str,
)
def test_what_does_no_harm_stops_nothing(tmp_path: Path, environ: dict[str, str]) -> None:
    (tmp_path / "数据.jsonl").write_text(ROWS)
    done = checked(tmp_path, path="数据.jsonl", **environ)
    assert done.returncode == 0, done.stderr


def test_names_of_files_that_the_locale_cannot_hold(tmp_path: Path) -> None:
    (tmp_path / "数据.jsonl").write_text(ROWS)
    ascii_only = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = checked(tmp_path, path="数据.jsonl", **ascii_only)
    assert done.returncode == 2
    assert "takes file names for ascii: `export PYTHONUTF8=1`" in done.stderr


CHINESE = "数据.jsonl"


@pytest.fixture(scope="module")
def in_gbk(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables of a process in a Chinese locale of before UTF-8, which is made for it."""
    folder = tmp_path_factory.mktemp("locales")
    if shutil.which("localedef") is None:
        pytest.skip("there is no localedef (Debian: libc-bin) to make the locale")
    command = ["localedef", "-i", "zh_CN", "-f", "GBK", str(folder / "zh_CN.GBK")]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if not (folder / "zh_CN.GBK").exists():
        pytest.skip(f"localedef cannot make zh_CN.GBK (Debian: locales): {made.stderr.strip()}")
    return {"LOCPATH": str(folder), "LC_ALL": "zh_CN.GBK", "LANGUAGE": "", "PYTHONUTF8": "0"}


def test_a_chinese_file_name_of_another_encoding_than_the_locale_is_named_with_the_remedy(
    tmp_path: Path, in_gbk: dict[str, str]
) -> None:
    (tmp_path / CHINESE).write_text(ROWS)  # the name is UTF-8, as other machines write it

    done = checked(tmp_path, path=CHINESE, encoding="gbk", **in_gbk)
    assert done.returncode == 2
    assert f"no file matches '{CHINESE}'" in done.stderr  # in the terminal's encoding
    assert "takes file names for gbk: `export PYTHONUTF8=1` makes it UTF-8" in done.stderr

    mended = checked(tmp_path, path=CHINESE, **{**in_gbk, "PYTHONUTF8": "1"})
    assert mended.returncode == 0, mended.stderr


def test_a_chinese_file_name_in_the_encoding_of_the_locale_is_read(
    tmp_path: Path, in_gbk: dict[str, str]
) -> None:
    (tmp_path / os.fsdecode(CHINESE.encode("gbk"))).write_text(ROWS)

    done = checked(tmp_path, path=CHINESE, encoding="gbk", **in_gbk)
    assert done.returncode == 0, done.stderr


def test_too_few_open_files_are_named_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_out(_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("pipeline_lib.cli.experiments.check", run_out)
    monkeypatch.setattr(sys, "argv", ["pipeline_lib", "check", "my.yaml"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 74
    assert "ulimit -n 4096" in capsys.readouterr().err


def test_a_path_begins_with_the_home_folder_and_holds_no_variables(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "mine.jsonl").write_text(ROWS)
    assert checked(tmp_path, path="~/mine.jsonl", HOME=str(home)).returncode == 0
    done = checked(tmp_path, path="$HOME/mine.jsonl", HOME=str(home))
    assert done.returncode == 2
    assert "variables are not replaced here" in done.stderr


def test_a_pattern_that_leads_through_a_whole_disk_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Links that lead in circles, as those of /proc do, make a disk of any folder."""
    (tmp_path / "above").symlink_to(tmp_path)
    (tmp_path / "again").symlink_to(tmp_path)
    monkeypatch.setattr(content, "MOST_FOLDERS", 1000)
    with pytest.raises(DataError, match=r"leads through more than 1,000 folders"):
        data_files(f"{tmp_path}/**/*.jsonl")


def test_a_python_without_the_libraries_is_told_what_to_type() -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-m", "pipeline_lib", "check", "my.yaml"],
        cwd=Path(__file__).parents[1],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert "lacks the library" in line
    assert ". .venv/bin/activate" in line
