"""`qwen3 plan`, as people type it: nothing sealed, no network, no GPU."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pipeline_lib.cli.main import main
from pipeline_lib.core.errors import ConfigError, HubOutOfReach
from pipeline_lib.core.store import Store
from pipeline_lib.hub.snapshot import Revisions
from pipeline_lib.plan.command import FindingsOf, show_plan
from pipeline_lib.workflow.findings import findings_of

ROOT = Path(__file__).parents[2]
BIG = """\
experiment: big
model: {source: modelscope, name: Qwen/Qwen3-8B}
data: {train: [{source: huggingface, name: owner/rows}]}
tokenize: {max_tokens: 4096}
shard: {block_tokens: 4096}
cluster: {gpus_per_node: 8, gpu: h200, memory_gb: 1000}
train: {strategy: auto, global_batch_tokens: 262144}
"""
# Anything that opens a connection, or loads what is not needed, ends the process.
GUARD = """\
import socket, sys
def refuse(*_, **__): raise SystemExit("a network was asked for")
socket.socket.connect = socket.getaddrinfo = refuse
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "transformers", "datasets"): raise SystemExit(f"{name} was loaded")
sys.meta_path.insert(0, Refuse())
from pipeline_lib.cli.main import main
main()
"""


class Done(NamedTuple):
    """What the command came to."""

    returncode: int
    stdout: str
    stderr: str


class Plan:
    """The command in `folder`, where the config lies."""

    def __init__(
        self, folder: Path, patch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[str]
    ) -> None:
        """Take the place of a process that stands in `folder`."""
        self._folder, self._patch, self._capture = folder, patch, capture

    def __call__(self, *arguments: str, config: str = BIG, command: str = "plan") -> Done:
        """Run it here: a new interpreter takes seconds."""
        self._write(config)
        self._patch.chdir(self._folder)
        self._patch.setenv("PIPELINE_STORE", str(self._folder / "store"))
        self._patch.setattr(sys, "argv", ["pipeline_lib", command, *arguments])
        self._patch.setattr(
            socket.socket, "connect", lambda *_: pytest.fail("a network was asked for")
        )
        with pytest.raises(SystemExit) as raised:
            main()
        written = self._capture.readouterr()
        return Done(int(raised.value.code or 0), written.out, written.err)

    def guarded(self, *arguments: str, config: str = BIG, command: str = "plan") -> Done:
        """Run it in a process that nothing heavy can be loaded into, without network."""
        self._write(config)
        done = subprocess.run(
            [sys.executable, "-c", GUARD, command, *arguments],
            cwd=self._folder,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "PIPELINE_STORE": str(self._folder / "store"),
            },
            capture_output=True,
            text=True,
            check=False,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    def _write(self, config: str) -> None:
        (self._folder / "config").mkdir(exist_ok=True)
        (self._folder / "config" / "config.yaml").write_text(config)


def found_in(folder: Path) -> FindingsOf:
    """All findings, as far as the store in `folder` knows; no machine is asked."""
    return lambda configs: findings_of(configs, Store(folder / "store"), lambda _: [])


@pytest.fixture
def plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Plan:
    return Plan(tmp_path, monkeypatch, capsys)


def test_it_needs_nothing_but_the_config_and_writes_nothing(plan: Plan, tmp_path: Path) -> None:
    done = plan.guarded()
    assert (done.returncode, done.stderr) == (0, "")
    assert "plan of big" in done.stdout
    assert "ASSUMED  documents of 1,024 tokens, 50% supervised in blocks 98% full" in done.stdout
    assert "all figures and formulas: --details" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["config"]
    assert (
        plan.guarded(config=BIG.replace("gpu: h200", "gpu: h2000"), command="check").returncode == 2
    )


def test_what_if_shows_both_and_keeps_nothing(plan: Plan, tmp_path: Path) -> None:
    changes = ["cluster.gpus_per_node=4", "train.micro_batch_blocks=1"]
    done = plan(
        "config/config.yaml", *(text for change in changes for text in ("--what-if", change))
    )
    assert done.returncode == 0, done.stderr
    ranks = next(line for line in done.stdout.splitlines() if line.startswith("ranks "))
    assert re.search(r"8 ranks on H200 of .*4 ranks on H200 of ", ranks)
    assert not (tmp_path / "results").exists()


def test_a_model_that_others_train_is_planned_with_a_word_on_it(plan: Plan, tmp_path: Path) -> None:
    sizes = {
        "vocab_size": 32000,
        "hidden_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
    }
    (tmp_path / "base").mkdir()
    (tmp_path / "base/config.json").write_text(
        json.dumps({"model_type": "llama", "intermediate_size": 1024, **sizes})
    )
    config = BIG.replace("{source: modelscope, name: Qwen/Qwen3-8B}", "{source: local, path: base}")
    done = plan(config=config.replace("4096}", "2048}"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("plan of big: 43,258,368 parameters")
    assert (
        "\nthe training would be refused: model.path: models of type llama and mistral are planned "
        "here, and only qwen2, " in (done.stdout)
    )


def test_the_length_of_documents_may_be_told_before_there_is_data(
    plan: Plan, tmp_path: Path
) -> None:
    """Of whole blocks attention takes longer; other keys may be changed with it."""
    done = plan("--what-if", "workload.document_tokens=2048", "train.seed=1")
    assert done.returncode == 0, done.stderr
    times = next(line for line in done.stdout.splitlines() if line.startswith("TIME"))
    first, second = (float(text) for text in re.findall(r"([0-9.]+) s a step \(", times))
    assert second > first
    assert "documents of 1,024 tokens" in done.stdout
    assert "documents of 2,048 tokens" not in done.stdout  # nobody assumes it
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("--what-if", "cluster.gpus_per_node=4", "train.micro_batch_blocks=2", "other.yaml"),
        (
            "--what-if",
            "cluster.gpus_per_node=4",
            "--what-if",
            "train.micro_batch_blocks=2",
            "other.yaml",
        ),
        ("other.yaml", "--what-if", "cluster.gpus_per_node=4", "train.micro_batch_blocks=2"),
    ],
)
def test_the_config_may_stand_before_what_if_and_behind_it(
    plan: Plan, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    (tmp_path / "other.yaml").write_text(BIG.replace("experiment: big", "experiment: other"))
    done = plan(*arguments)
    assert done.returncode == 0, done.stderr
    assert "plan of other" in done.stdout
    assert "what if cluster.gpus_per_node=4," in done.stdout
    assert "train.micro_batch_blocks=2\n" in done.stdout
    two = plan("config/config.yaml", "--what-if", "cluster.gpus_per_node=4", "other.yaml")
    assert two.returncode == 2
    assert "--what-if other.yaml: not of the form KEY=VALUE" in two.stderr


def test_what_cannot_be_is_refused_below_the_table_with_a_code_for_scripts(plan: Plan) -> None:
    done = plan("--what-if", "cluster.gpu=a10", "--what-if", "train.strategy=ddp")
    assert done.returncode == 2
    assert re.search(r"MEMORY +FITS: .* TOO LARGE: ", done.stdout)
    assert "train.strategy: ddp needs " in done.stderr
    assert "this would fit: train.strategy: fsdp" in done.stderr
    assert "Traceback" not in done.stderr
    done = plan(config=BIG.replace("h200", "a10").replace("8, ", "1, ").replace("1000", "100"))
    assert done.returncode == 2
    assert re.search(r"^TOO LARGE  ", done.stdout, re.MULTILINE)
    assert "needs the least memory, a node lacks " in " ".join(done.stdout.split())
    assert re.search(r"^NEXT +1\. ", done.stdout, re.MULTILINE)
    assert "the smallest cluster that would do: cluster." in done.stderr


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        (
            "train.strateg=ddp",
            2,
            "--what-if train.strateg=ddp: train.strateg: unknown key; did you mean 'strategy'?",
        ),
        ("cluster.nodes=2", 2, "cluster.internode_gbit_s: missing, but cluster.nodes is 2"),
        ("cluster.gpu=h2000", 2, "cluster.gpu: 'h2000' is not known"),
        ("workload.document_tokens=all", 2, "'all' is not a number from 1 to"),
        ("workload.document_tokens=1e9", 2, "'1e9' is not a number from 1 to"),
        ("workload.blocks=1", 2, "workload: unknown key"),
        ("model.name=owner/model", 65, "the sizes of owner/model are not known here"),
        (
            "train.freeze=[nothing]",
            65,
            "train.freeze: 'nothing' matches no parameter of this model",
        ),
    ],
)
def test_mistakes_are_one_message(plan: Plan, change: str, code: int, said: str) -> None:
    done = plan("--what-if", change)
    assert done.returncode == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("host", "said"),
    [
        (", memory_gb: 900", "train.offload: optimizer+params  ("),
        ("", "train.offload: optimizer+params and cluster.memory_gb: "),
    ],
)
def test_of_a_strategy_that_cannot_train_the_model_another_is_the_way_out(
    plan: Plan, host: str, said: str
) -> None:
    big = BIG.replace(
        "{gpus_per_node: 8, gpu: h200, memory_gb: 1000}", f"{{gpus_per_node: 1, gpu: 4090{host}}}"
    )
    big = big.replace("strategy: auto", "strategy: ddp").replace("Qwen3-8B", "Qwen3-32B")

    refused = plan(
        config=big.replace("{source: huggingface, name: owner/rows}", "{source: pydoc}"),
        command="check",
    )

    assert refused.returncode == 2
    assert "train.strategy: ddp needs" in refused.stderr
    assert said in refused.stderr
    assert "lower shard.block_tokens" not in refused.stderr


def test_a_missing_model_folder_is_named_with_all_else(plan: Plan) -> None:
    wrong = BIG.replace(
        "{source: modelscope, name: Qwen/Qwen3-8B}", "{source: local, path: no/such/folder}"
    )
    wrong = wrong.replace(
        "{source: huggingface, name: owner/rows}", "{source: file, path: nowhere.jsonl}"
    )

    refused = plan(config=wrong, command="check")

    assert refused.returncode == 2
    assert "model.path: 'no/such/folder' is not a folder here" in refused.stderr
    assert "data.train[0].path: no file matches 'nowhere.jsonl' here" in refused.stderr


def test_what_is_offloaded_competes_and_the_host_memory_that_is_assumed_is_said(plan: Plan) -> None:
    lora = BIG.replace("gpus_per_node: 8, gpu: h200, memory_gb: 1000", "gpus_per_node: 1, gpu: a10")
    lora = lora.replace("strategy: auto", "strategy: auto, method: lora").replace(
        ": 4096", ": 1024"
    )

    assumed = plan(config=lora)
    given = plan(config=lora.replace("gpu: a10", "gpu: a10, memory_gb: 64"))

    assert "192 GB (assumed: set cluster.memory_gb)" in assumed.stdout
    assert "192 GB of host memory" in " ".join(assumed.stdout.split())
    assert "host memory" not in given.stdout
    for done in (assumed, given):
        assert re.search(
            r"^WAY .*offloaded",
            " ".join(done.stdout.partition("WAY")[1:]).partition("ASSUMED")[0],
            re.DOTALL,
        )


def test_more_host_memory_than_is_assumed_is_refused_and_the_key_that_says_otherwise_is_named(
    plan: Plan,
) -> None:
    """All weights of 235B on one A100 want terabytes."""
    huge = BIG.replace(
        "gpus_per_node: 8, gpu: h200, memory_gb: 1000", "gpus_per_node: 1, gpu: a100 80gb"
    )
    huge = huge.replace("Qwen3-8B", "Qwen3-235B-A22B")

    done = plan(config=huge)

    assert done.returncode == 2
    said = " ".join(done.stderr.split())
    assert re.search(
        r"and 192.00 GB are assumed, as cluster.memory_gb is not set; set cluster.memory_gb: \d{4}",
        said,
    )


def test_details_stand_below_the_answers_and_end_with_the_formulas(plan: Plan) -> None:
    short, done = plan(), plan("--details")
    assert done.returncode == 0, done.stderr
    answers = short.stdout.partition("\nall figures and formulas")[0]
    assert done.stdout.startswith(answers)
    more = done.stdout.removeprefix(answers)
    places = [
        more.index(text)
        for text in ("\nwhy ", "█", "what each stage needs", "memory of a rank", "\nthe step\n")
    ]
    assert places == sorted(places)
    assert not [
        text for text in ("█", "what each stage needs", "memory of a rank") if text in short.stdout
    ]


def test_the_cluster_can_be_of_more_nodes_than_training_can_use_yet(plan: Plan) -> None:
    done = plan("--what-if", "cluster.nodes=2", "cluster.internode_gbit_s=100")
    assert done.returncode == 0, done.stderr
    assert "sent by each node in a step, at 100 Gbit/s" in " ".join(done.stdout.split())


def test_blocks_that_the_model_cannot_reach_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        BIG.replace("block_tokens: 4096", "block_tokens: 65536").replace("262144", "524288")
    )
    with pytest.raises(
        ConfigError, match="65536 tokens are more than the model's 40960 positions; lower it"
    ):
        show_plan(path, [], False, Store(tmp_path / "store"), found_in(tmp_path), lambda text: None)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "block_tokens: 4096",
            "block_tokens: 65536",
            "shard.block_tokens: 65536 tokens are more than the model's",
        ),
        (
            "8, gpu: h200, memory_gb: 1000",
            "1, gpu: a10, memory_gb: 8",
            "train.strategy: auto finds no way that fits",
        ),
    ],
)
def test_check_says_what_is_wrong_before_it_asks_a_hub(
    plan: Plan, old: str, new: str, said: str
) -> None:
    config = BIG.replace(old, new)
    if "65536" in new:
        config = config.replace("262144", "524288")
    done = plan(config=config, command="check")
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert "network" not in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["plan", "check"])
def test_answers_that_would_take_hours_on_cpus_are_bounded_and_that_is_said(
    plan: Plan, command: str
) -> None:
    small = """\
experiment: small
model: {source: tiny, hidden_size: 1024, layers: 16, heads: 16}
data: {train: [{source: pydoc}]}
evaluate: {generations: 500, max_new_tokens: 1024}
"""
    done = plan(config=small, command=command)
    assert (done.returncode, done.stderr) == (0, "")
    assert (
        "warning: evaluate: gives 4 answers of up to 1024 tokens from each model on CPUs "
        "instead of 500 of up to 1024: there is no GPU, and CPUs read all weights for each token"
    ) in done.stdout


def test_the_plan_as_json_is_what_the_stage_would_seal(plan: Plan) -> None:
    found = json.loads(plan("--json").stdout)
    assert (found["schema"], found["experiment"], found["workload"]["is_assumed"]) == (
        3,
        "big",
        True,
    )
    assert found["chosen"]["strategy"] != "auto"
    refused = plan(
        "--json", config=BIG.replace("8, gpu: h200, memory_gb: 1000", "1, gpu: a10, memory_gb: 8")
    )
    assert refused.returncode == 2
    assert json.loads(refused.stdout)["summary"]["verdict"] == "too large"
    assert plan("--json", "--what-if", "cluster.gpus_per_node=4").returncode == 2


def test_a_disk_that_is_too_small_is_said_and_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 10**10

    monkeypatch.setattr("pipeline_lib.plan.preflight.disk_usage", lambda path: Usage)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "config.yaml"
    path.write_text(BIG)
    said: list[str] = []
    show_plan(path, [], False, Store(tmp_path / "store"), found_in(tmp_path), said.append)
    begins = (
        "\nthe training would be refused: train.keep_last: the checkpoints kept and the one "
        "being written need 294"
    )
    assert [text for text in said if text.startswith(begins)]
    said.clear()
    show_plan(
        path,
        ["train.method=lora"],
        False,
        Store(tmp_path / "store"),
        found_in(tmp_path),
        said.append,
    )
    begins = (
        "\nthe training would be refused: the run writes 34.51 GB (base model 16.38 GB, "
        "checkpoints 1.57 GB"
    )
    assert [text for text in said if text.startswith(begins)], (
        "the checkpoints of adapters are small"
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cluster.measured: 'cluster.json' does not read ("),
        ('{"schema": 1, "x": NaN}', "cluster.measured: 'cluster.json': x: nan is no finite number"),
        (
            '{"schema": 1, "rates": {"launch_s": 1}, "parts": []}',
            "'cluster.json': rates.launch_s: 1 is no mapping",
        ),
    ],
)
def test_measurements_that_cannot_be_used_are_named_with_both_files(
    plan: Plan, tmp_path: Path, content: str | None, said: str
) -> None:
    if content is not None:
        (tmp_path / "cluster.json").write_text(content)
    config = BIG.replace("gpu: h200", "measured: cluster.json")
    done = plan(config=config)
    assert done.returncode == 2
    assert said in done.stderr
    assert "error: config/config.yaml: 1 problem\n" in done.stderr
    assert said in plan(config=config, command="check").stderr


def test_check_says_what_it_can_where_the_hub_is_out_of_reach(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Revisions, "commit_of", unreachable)
    (tmp_path / "rows.jsonl").write_text(
        '{"prompt": "What is this?", "completion": "A row of a few words."}\n' * 200
    )
    local = BIG.replace(
        "{source: huggingface, name: owner/rows}", "{source: file, path: rows.jsonl}"
    )
    done = plan(
        config=local.replace("strategy: auto", "strategy: auto, method: lora"), command="check"
    )
    assert done.returncode == 0, done.stderr
    assert (
        "config.yaml: note: 1 optimizer step, estimated from the first rows of the files\n"
        in done.stdout
    )
    assert "note: the hub could not be asked; the download will check the rest" in done.stdout
    assert "no problems that can be seen without the hub" in done.stdout


def unreachable(*_: Any) -> str:
    raise HubOutOfReach("no route to the hub")


ON_CPUS = """\
experiment: small
model: {source: tiny}
data: {train: [{source: pydoc}]}
tokenize: {max_tokens: 256}
shard: {block_tokens: 256}
cluster: {gpus_per_node: 0, cpu_ranks: 2, memory_gb: 1}
train: {strategy: ddp, method: lora, precision: fp32, global_batch_tokens: 4096}
"""


def test_too_little_memory_on_cpus_is_warned_of(plan: Plan) -> None:
    """A machine may have more than a job asks for, so it is not refused."""
    done = plan("config/config.yaml", config=ON_CPUS)
    assert done.returncode == 0
    assert "TOO LARGE" in done.stdout
    assert re.search(r"NEXT +1. cluster.memory_gb: 2, if the nodes have as much", done.stdout)
    checked = plan("config/config.yaml", config=ON_CPUS, command="check")
    assert checked.returncode == 0
    assert (
        "warning: train.strategy: ddp needs 1.60 GB of host memory on each node" in checked.stdout
    )
    enough = ON_CPUS.replace("memory_gb: 1", "memory_gb: 2")
    assert "warning" not in plan("config/config.yaml", config=enough, command="check").stdout
    assert "FITS" in plan("config/config.yaml", config=enough).stdout


def test_a_config_that_is_not_there_is_all_that_is_said(plan: Plan) -> None:
    """The line with the exit code is for the logs of rules."""
    refused = plan("nowhere.yaml")

    assert refused.returncode == 2
    assert refused.stderr.splitlines() == [
        "error: nowhere.yaml: 1 problem",
        "  - cannot be read: No such file or directory",
    ]
