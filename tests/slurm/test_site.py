"""The site file, and the variables that go before it."""

from pathlib import Path

import pytest

from pipeline_lib.core.errors import ConfigError
from pipeline_lib.slurm.site import VARIABLES, Site, site_file

FILE = """\
account: physics
partition: h100
cpu_partition: milan
qos: long
constraint: nvlink
setup: [module purge, "module load cuda/12.4"]
environment: {NCCL_IB_HCA: mlx5, NCCL_NVLS_ENABLE: 0}
scratch: /scratch/me
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "site.yaml"
    path.write_text(FILE)
    return path


def test_without_a_file_nothing_is_asked_for(tmp_path: Path) -> None:
    site = Site.load({"HOME": str(tmp_path)})
    assert site == Site()
    assert set(site.job_options(is_training=True).values()) == {None}
    assert site.shell_lines() == ""


def test_the_file_is_found_where_programs_keep_theirs(path: Path, tmp_path: Path) -> None:
    usual = tmp_path / "home" / ".config" / "qwen3-pipeline" / "site.yaml"
    usual.parent.mkdir(parents=True)
    usual.write_text("account: usual\n")
    home = {"HOME": str(tmp_path / "home")}
    assert site_file(home) == usual
    assert Site.load(home).account == "usual"
    assert Site.load({"XDG_CONFIG_HOME": str(tmp_path / "home" / ".config")}).account == "usual"
    assert Site.load({**home, "PIPELINE_SITE": str(path)}).account == "physics"


def test_stages_without_gpus_go_to_their_own_partition_and_need_no_special_nodes(path: Path) -> None:
    site = Site.load({"PIPELINE_SITE": str(path)})
    common = {"account": "physics", "qos": "long"}
    assert site.job_options(is_training=True) == {**common, "partition": "h100", "constraint": "nvlink"}
    assert site.job_options(is_training=False) == {**common, "partition": "milan", "constraint": None}
    alone = site.model_copy(update={"cpu_partition": None})
    assert alone.partition_of(is_training=False) == "h100"


def test_variables_go_before_the_file(path: Path) -> None:
    environ = {"PIPELINE_SITE": str(path), **{name: f"my-{key}" for key, name in VARIABLES.items()}}
    site = Site.load(environ)
    assert {key: getattr(site, key) for key in VARIABLES} == {key: f"my-{key}" for key in VARIABLES}
    assert site.setup == ("module purge", "module load cuda/12.4")


def test_a_job_begins_with_the_site_s_lines_and_has_its_variables(path: Path) -> None:
    site = Site.load({"PIPELINE_SITE": str(path)})
    assert site.shell_lines() == "module purge\nmodule load cuda/12.4\n"
    assert "export NCCL_IB_HCA=mlx5\n" in site.exports()
    assert site.variables() == {
        "NCCL_IB_HCA": "mlx5",
        "NCCL_NVLS_ENABLE": "0",
        "TMPDIR": "/scratch/me",
        "TRITON_CACHE_DIR": "/scratch/me/triton",
        "TORCHINDUCTOR_CACHE_DIR": "/scratch/me/inductor",
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("acount: x", "acount: unknown key; known keys: account, partition, "),
        ("account: 7", "account: Input should be a valid string"),
        ("setup: module load", "setup: "),
        ("account: [", "site.yaml"),
        ("environment: {A: [1]}", "environment.A: "),
        ("- account", "the file: "),
    ],
)
def test_what_is_wrong_is_named_with_the_file(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "site.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        Site.load({"PIPELINE_SITE": str(path)})
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_file_that_is_named_has_to_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        Site.load({"PIPELINE_SITE": str(tmp_path / "nowhere.yaml")})
