"""The site file, and the variables that go before it."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline_lib.core.errors import ConfigError
from pipeline_lib.slurm.can_start import sbatch_options
from pipeline_lib.slurm.request import (
    JobRequest,
    given_options,
    stage_resources,
    training_resources,
)
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


def test_stages_without_gpus_go_to_their_own_partition_and_need_no_special_nodes(
    path: Path,
) -> None:
    site = Site.load({"PIPELINE_SITE": str(path)})
    common = {"account": "physics", "qos": "long", "reservation": None, "exclude": None}
    assert site.job_options(is_training=True) == {
        **common,
        "partition": "h100",
        "constraint": "nvlink",
    }
    assert site.job_options(is_training=False) == {
        **common,
        "partition": "milan",
        "constraint": None,
    }
    alone = site.model_copy(update={"cpu_partition": None})
    assert alone.partition_of(is_training=False) == "h100"


def test_options_are_of_all_jobs_or_of_those_with_or_without_gpus() -> None:
    site = Site(
        account="physics",
        cpu_account="students",
        qos="long",
        cpu_qos="short",
        gpu_type="h100",
        reservation="course",
        exclude="n[2-3]",
        sbatch=("--nice=7",),
        gpu_sbatch=("--mail-user=a b",),
        cpu_sbatch=("--exclusive",),
    )
    first, other = (site.job_options(is_training) for is_training in (True, False))
    assert (first["account"], other["account"]) == ("physics", "students")
    assert (first["qos"], other["qos"]) == ("long", "short")
    request = JobRequest(2, 4, 1, 4, 1000, 60, 90)
    training = training_resources(request, site, ("--exclude=n2",))
    own = "--open-mode=append --signal=USR1@90"
    assert training["slurm_extra"] == (
        f"--reservation=course '--exclude=n[2-3]' --nice=7 '--mail-user=a b' --exclude=n2 {own}"
    )
    assert training["gres"] == "gpu:h100:4"
    asked = sbatch_options(site, request, ("--exclude=n2",))
    assert {
        "--reservation=course",
        "--exclude=n[2-3]",
        "--nice=7",
        "--mail-user=a b",
        "--gres=gpu:h100:4",
    } < set(asked)
    assert asked[-1] == "--exclude=n2"
    stage = stage_resources(JobRequest(1, 1, 1, 0, 1000, 60, 0), site)
    assert stage["slurm_extra"] == "--reservation=course '--exclude=n[2-3]' --nice=7 --exclusive"
    assert (stage["slurm_account"], stage["qos"], stage["gres"]) == ("students", "short", None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sbatch: [--signal=USR1@5]", "the pipeline needs it as it sets it"),
        ("gpu_sbatch: [--gres=gpu:h100:2]", "use `gpu_type` in the site file"),
        ("cpu_sbatch: [--exclude=n2]", "it has a key of its own in the site file"),
        ("sbatch: [--mem=5]", "the plan, or a key of `cluster` in the config, sets it"),
        ("sbatch: ['-x n2']", "is no option of the form --name or --name=value"),
    ],
)
def test_an_option_that_is_not_the_site_s_to_set_is_refused_with_its_place(
    path: Path, text: str, said: str
) -> None:
    path.write_text(f"{text}\n")
    with pytest.raises(ConfigError, match=said):
        Site.load({"PIPELINE_SITE": str(path)})


def test_what_the_user_gives_to_snakemake_is_read_as_typed_and_takes_no_warning_away() -> None:
    def given(text: str) -> tuple[str, ...]:
        return given_options({"slurm_extra": SimpleNamespace(raw=text)}, "train_stage")

    assert (
        given("--exclude=n2 --nice 7")
        == given("'--exclude=n2 --nice 7'")
        == ("--exclude=n2", "--nice", "7")
    )
    assert given_options({}, "train_stage") == ()
    for text in ("--signal=USR1@5", "'--open-mode=truncate'", "--comment='a", "--comment=a\\"):
        with pytest.raises(ConfigError, match="slurm_extra of train_stage"):
            given(text)


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
