"""Experiments that go on from another: which parent is meant, what reruns, and what is refused."""

from pathlib import Path

import pytest

from pipeline_lib.config import strict_yaml
from pipeline_lib.config.compile import Experiment, open_experiment, open_experiments
from pipeline_lib.config.dag import Dag
from pipeline_lib.config.load import Overrides, load_configs, load_sweep
from pipeline_lib.core.errors import ConfigError
from pipeline_lib.core.store import Store

CHAIN = """\
model: {source: tiny}
data: {train: [{source: pydoc, max_rows: 60}]}
train: {lr: 1.0e-3, epochs: 1}
experiments:
  text: {}
  sft:
    model: {source: experiment, name: text}
    train: {lr: 2.0e-3}
  more:
    model: {source: experiment, name: sft}
    data: {train: [{source: pydoc, max_rows: 80}]}
"""
CHILD = "model: {source: experiment, name: text}\n"
DATA = "data: {train: [{source: pydoc}]}\n"


def written(folder: Path, text: str, name: str = "chain.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def problems_of(path: Path) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_configs(path)
    return caught.value.problems


def opened(folder: Path, text: str = CHAIN) -> dict[str, Experiment]:
    found = open_experiments(written(folder, text), Store(folder / "store"))
    return {one.name: one for one in found}


def changed(one: Experiment, other: Experiment) -> set[str]:
    return {part for part in one.specs if one.specs[part].digest != other.specs[part].digest}


def test_an_entry_has_its_own_keys_in_place_of_the_files(tmp_path: Path) -> None:
    text, sft, more = load_configs(written(tmp_path, CHAIN))

    assert [text.experiment, sft.experiment, more.experiment] == ["text", "sft", "more"]
    assert (text.train.lr, sft.train.lr, more.train.lr) == (1e-3, 2e-3, 1e-3)
    assert (sft.parent, more.parent) == (text, sft)
    assert more.chain == (text, sft, more)
    assert more.root is not more
    assert more.root.model.source == "tiny"


def test_a_model_is_made_of_the_merge_of_the_experiment_before(tmp_path: Path) -> None:
    found = opened(tmp_path)

    model = found["sft"].specs["model"]
    assert model.inputs == {"merge": found["text"].ref("merge")}
    assert found["more"].specs["model"].inputs == {"merge": found["sft"].ref("merge")}
    assert found["sft"].specs["train"].inputs["model"] == model.ref


def test_data_and_plan_need_only_the_first_model(tmp_path: Path) -> None:
    found = opened(tmp_path)

    first = found["text"].ref("model")
    for name in ("sft", "more"):
        specs = found[name].specs
        assert specs["root"].ref == first
        for part in ("tokenize", "plan"):
            assert specs[part].inputs["model"] == first
    assert "root" not in found["text"].specs
    assert found["text"].ref("shard") == found["sft"].ref("shard"), "the same data has one set"


def test_what_is_downloaded_in_advance_needs_no_training(tmp_path: Path) -> None:
    dag = Dag.open(written(tmp_path, CHAIN), Store(tmp_path / "store"))

    text, _, more = dag.experiments
    refs = [text.ref("model"), text.ref("data.0"), more.ref("data.0")]
    assert dag.pointers("download") == [str(dag.store.pointer(ref)) for ref in refs]


def test_a_change_reruns_what_follows_and_nothing_before(tmp_path: Path) -> None:
    before = opened(tmp_path)
    after = opened(tmp_path, CHAIN.replace("2.0e-3", "3.0e-3"))

    assert changed(before["text"], after["text"]) == set()
    training = {"plan", "train", "merge", "evaluate", "report"}
    assert changed(before["sft"], after["sft"]) == training
    assert changed(before["more"], after["more"]) == {*training, "model", "baseline"}


def test_the_name_of_a_parent_changes_nothing_after_it(tmp_path: Path) -> None:
    before = opened(tmp_path)
    renamed = opened(tmp_path, CHAIN.replace("name: text", "name: raw").replace("text: {}", "raw:"))

    assert changed(before["text"], renamed["raw"]) == {"plan", "report"}
    assert changed(before["sft"], renamed["sft"]) == set()


def test_the_plan_of_a_child_is_stretched_as_its_parent_is(tmp_path: Path) -> None:
    rope = "{type: yarn, factor: 2.0}"
    found = opened(tmp_path, CHAIN.replace("source: tiny", f"source: tiny, rope: {rope}"))

    specs = found["more"].specs
    assert specs["plan"].settings["inherited_rope"] == {"type": "yarn", "factor": 2.0}
    assert "rope" not in specs["plan"].settings
    assert "rope" not in specs["train"].settings
    twice = CHAIN.replace("source: tiny", f"source: tiny, rope: {rope}")
    twice = twice.replace("name: sft}", f"name: sft, rope: {rope}}}")
    [problem] = problems_of(written(tmp_path, twice))
    assert problem.startswith("line 10: model.rope: experiment 'sft'")


def test_the_graph_has_parents_of_other_files_before_their_children(tmp_path: Path) -> None:
    parent = written(tmp_path, f"experiment: text\nmodel: {{source: tiny}}\n{DATA}", "text.yaml")
    model = f"model: {{source: experiment, config: {parent}}}\n"
    path = written(tmp_path, f"experiment: sft\n{model}{DATA}")
    store = Store(tmp_path / "store")

    dag = Dag.open(path, store)
    assert [one.name for one in dag.experiments] == ["text", "sft"]
    assert open_experiment(path, store) == dag.experiments[1]
    assert open_experiment(parent, store) == dag.experiments[0]

    thawed = Dag.thaw(dag.freeze(), store)
    assert [one.config for one in thawed.experiments] == [one.config for one in dag.experiments]
    assert [one.specs for one in thawed.experiments] == [one.specs for one in dag.experiments]
    model_digest = dag.experiments[1].ref("model").digest
    assert thawed.pointers_read_by(model_digest) == [
        str(store.pointer(dag.experiments[0].ref("merge")))
    ]
    assert thawed.title(model_digest) == "sft: download (model)"


def test_a_sweep_may_be_over_a_chain_over_its_end_and_over_its_beginnings(tmp_path: Path) -> None:
    whole = load_configs(written(tmp_path, CHAIN + "sweep: {train.seed: [1, 2]}\n"))
    assert {one.experiment: one.parent.experiment for one in whole if one.parent} == {
        "sft-seed=1": "text-seed=1",
        "sft-seed=2": "text-seed=2",
        "more-seed=1": "sft-seed=1",
        "more-seed=2": "sft-seed=2",
    }
    end = load_configs(written(tmp_path, CHAIN + "    sweep: {train.seed: [1, 2]}\n"))
    assert [one.parent.experiment for one in end if one.parent] == ["text", "sft", "sft"]
    beginnings = CHAIN + "    sweep: {model.name: [text, sft]}\n"
    begun = load_configs(written(tmp_path, beginnings))
    assert [one.experiment for one in begun][-2:] == ["more-name=text", "more-name=sft"]
    assert [one.parent for one in begun][-2:] == [begun[0], begun[1]]


def test_an_override_holds_for_each_experiment_and_parents_are_found_by_their_names(
    tmp_path: Path,
) -> None:
    overrides = Overrides(["train.seed=3"], flag="", in_names=True)
    loaded = load_sweep(written(tmp_path, CHAIN), overrides)

    assert [one.experiment for one in loaded.configs] == [
        "text-seed=3",
        "sft-seed=3",
        "more-seed=3",
    ]
    assert {one.train.seed for one in loaded.configs} == {3}
    assert loaded.configs[2].parent == loaded.configs[1]


ADAPTERS = """\
model: {source: tiny}
data: {train: [{source: pydoc, max_rows: 60}]}
train: {method: lora, lora: {rank: 8}, epochs: 1}
experiments:
  sft: {}
  on:
    model: {source: experiment, name: sft, adapter: continue}
    train: {lr: 1.0e-5}
"""


def test_adapters_are_trained_on_beside_the_model_that_had_them(tmp_path: Path) -> None:
    found = opened(tmp_path, ADAPTERS)

    sft, on = found["sft"].specs, found["on"].specs
    assert on["model"] == sft["model"]
    assert on["adapter"].inputs == on["parent"].inputs == {"merge": sft["merge"].ref}
    assert on["train"].inputs == {
        "model": sft["model"].ref,
        "adapter": on["adapter"].ref,
        "shard": sft["shard"].ref,
    }
    for part in ("baseline", "evaluate"):  # it is compared with what its parent merged
        assert on[part].inputs["model"] == on["parent"].ref
    dag = Dag.open(tmp_path / "chain.yaml", Store(tmp_path / "store"))
    thawed = Dag.thaw(dag.freeze(), dag.store)
    assert [one.specs for one in thawed.experiments] == [one.specs for one in dag.experiments]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("{lr: 1.0e-5}", "{lora: {rank: 4}}", "line 8: train.lora.rank: the adapters of "),
        ("{lr: 1.0e-5}", "{lora: {alpha: 4}}", "line 8: train.lora.alpha: the adapters of "),
        ("{lr: 1.0e-5}", "{method: full}", "line 7: model.adapter: continue needs train.method"),
        ("sft: {}", "sft: {train: {method: full}}", "line 7: model.adapter: experiment 'sft'"),
        (
            "sft: {}",
            "sft: {model: {source: tiny, rope: {type: yarn, factor: 2}}}",
            "line 7: model.adapter: continue does not work with the model.rope",
        ),
    ],
)
def test_adapters_of_another_kind_are_refused(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    text = ADAPTERS.replace("lora: {rank: 8}, ", "") if "full" in new else ADAPTERS
    [problem] = problems_of(written(tmp_path, text.replace(old, new)))
    assert problem.startswith(said)


WRONG = {
    "unknown": (
        CHAIN.replace("name: text", "name: txet"),
        ["line 7: model.name: no experiment is called 'txet'; did you mean 'text'?"],
    ),
    "itself": (
        CHAIN.replace("name: text", "name: sft"),
        ["line 7: model.name: a cycle, sft from sft"],
    ),
    "cycle": (
        CHAIN.replace("text: {}", "text: {model: {source: experiment, name: more}}"),
        ["line 7: model.name: a cycle, text from more from sft from text"],
    ),
    "neither name nor file": (
        CHAIN.replace("{source: experiment, name: sft}", "{source: experiment}"),
        ["line 10: model: needs `name`"],
    ),
    "two, each with its line": (
        CHAIN.replace("name: text", "name: a").replace("name: sft", "name: b"),
        ["line 7: model.name: no experiment is called 'a'", "line 10: model.name: no experiment"],
    ),
    "a sweep": (
        CHAIN.replace("text: {}", "text: {sweep: {train.seed: [1, 2]}}"),
        ["line 7: model.name: 'text' is a sweep of 2 experiments: name one, text-seed=1, text-"],
    ),
    "halving": (
        CHAIN + "    sweep: {train.seed: [1, 2], halving: {first_step: 2, keep: 0.5}}\n",
        ["line 12: sweep: halving: stops experiments of a file, and experiments.more is one of"],
    ),
    "a name for the file": (
        "experiment: all\n" + CHAIN,
        ["line 1: experiment: the names stand in `experiments`; remove this one"],
    ),
    "a value for keys": (
        CHAIN.replace("text: {}", "text: tiny"),
        ["line 5: experiments.text: is not keys with values", "line 7: model.name: no experiment"],
    ),
    "none": (
        "model: {source: tiny}\ndata: {train: [{source: pydoc}]}\nexperiments: {}\n",
        ["line 3: experiments: holds no experiments"],
    ),
    "no such file": (
        CHAIN.replace("name: text", "config: there.yaml"),
        ["line 7: model.config: there.yaml: cannot be read"],
    ),
    "the parent's own": (
        CHAIN.replace("text: {}", "text: {train: {epoch: 1}}"),
        ["line 5: train.epoch: unknown key"],
    ),
    "written out": (
        CHAIN.replace("name: text", "name: text, parent: {}"),
        ["line 7: model.parent: unknown key"],
    ),
}


@pytest.mark.parametrize(("text", "said"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_said_with_its_line(tmp_path: Path, text: str, said: list[str]) -> None:
    problems = problems_of(written(tmp_path, text))

    assert len(problems) == len(said), problems
    for problem, beginning in zip(problems, said, strict=True):
        assert problem.startswith(beginning), problem


def test_files_that_go_on_from_one_another_are_a_cycle(tmp_path: Path) -> None:
    one, two = tmp_path / "one.yaml", tmp_path / "two.yaml"
    one.write_text(f"experiment: one\nmodel: {{source: experiment, config: {two}}}\n{DATA}")
    two.write_text(f"experiment: two\nmodel: {{source: experiment, config: {one}}}\n{DATA}")

    [problem] = problems_of(one)
    assert f"a cycle, {one} from {two} from {one}" in problem


def test_of_a_file_that_halves_no_model_is_sure(tmp_path: Path) -> None:
    halving = "sweep: {train.seed: [1, 2], halving: {first_step: 2, keep: 0.5}}\n"
    base = f"experiment: base\nmodel: {{source: tiny}}\n{DATA}{halving}"
    train = "train: {validate_every_steps: 1}\n"
    parent = written(tmp_path, base + train, "base.yaml")
    model = f"model: {{source: experiment, config: {parent}, name: base-seed=1}}\n"

    [problem] = problems_of(written(tmp_path, f"experiment: sft\n{model}{DATA}"))
    assert problem.startswith(f"line 2: model.config: {parent}: its sweep has `halving`")


def test_halving_is_of_the_sweep_and_not_of_what_it_goes_on_from(tmp_path: Path) -> None:
    parent = written(tmp_path, f"experiment: text\nmodel: {{source: tiny}}\n{DATA}", "base.yaml")
    model = f"model: {{source: experiment, config: {parent}}}\n"
    train = "train: {validate_every_steps: 2}\n"
    halving = "sweep: {train.seed: [1, 2], halving: {first_step: 2, keep: 0.5}}\n"
    path = written(tmp_path, f"experiment: sft\n{model}{DATA}{train}{halving}")

    dag = Dag.open(path, Store(tmp_path / "store"))
    assert [one.name for one in dag.experiments] == ["text", "sft-seed=1", "sft-seed=2"]
    assert list(dag.rungs[0].trainings) == [one.ref("train").digest for one in dag.last]
    assert [one.name for one in dag.last] == ["sft-seed=1", "sft-seed=2"]


def test_a_workflow_that_uses_this_one_as_a_module_may_give_a_chain(tmp_path: Path) -> None:
    keys = strict_yaml.parse(CHAIN, "").value

    dag = Dag.of_mapping(keys, Store(tmp_path / "store"))
    assert [one.name for one in dag.experiments] == ["text", "sft", "more"]
    assert dag.name == "more"
    assert Dag.open(written(tmp_path, CHAIN), dag.store).name == "chain"


def test_two_experiments_of_one_name_are_refused(tmp_path: Path) -> None:
    parent = written(tmp_path, f"experiment: sft\nmodel: {{source: tiny}}\n{DATA}", "base.yaml")
    model = f"model: {{source: experiment, config: {parent}}}\n"
    path = written(tmp_path, f"experiment: sft\n{model}{DATA}")

    with pytest.raises(ConfigError, match="'sft' is the name of two experiments"):
        Dag.open(path, Store(tmp_path / "store"))
