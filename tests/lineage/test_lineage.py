"""`trace` tells a model's origin, in the store and far from it, and names what was changed.

It names whatever is not as it was sealed.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline_lib.core.errors import DataError, IntegrityError
from pipeline_lib.core.files import json_text, read_json, sha256_file, sha256_text, write_json
from pipeline_lib.core.stage import open_sealed, run_stage
from pipeline_lib.core.store import MANIFEST_NAME, Ref, Store, read_manifest
from pipeline_lib.lineage.checks import DAMAGED, RECORDED, REMADE, SAME_SIZES, VERIFIED, Traced
from pipeline_lib.lineage.record import LINEAGE_NAME, chain
from pipeline_lib.lineage.show import problems_of
from pipeline_lib.lineage.trace import trace
from tests.lineage.lineages import COMMIT, HUB_MODEL, ROWS, experiment_from, seal_model, tell_origin
from tests.stages import ROOT

PARTS = ["merge", "train", "shard", "tokenize", "data.0", "model"]


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder in its store. Not to be changed."""
    return seal_model(Store(tmp_path_factory.mktemp("sealed") / "store"))


@pytest.fixture
def model(sealed: Path, tmp_path: Path) -> Path:
    """The same in a copy of the store, to be damaged."""
    store = sealed.parent.parent
    shutil.copytree(store, tmp_path / "store")
    return tmp_path / "store" / sealed.relative_to(store)


@pytest.fixture
def copy(sealed: Path, tmp_path: Path) -> Path:
    """The model folder alone, far from its store, to be changed."""
    return shutil.copytree(sealed, tmp_path / "copy")


def look(path: Path, sizes_only: bool = False) -> Traced:
    return trace(path, Store(Path("/nowhere/store")), sizes_only, lambda _: None)


def states(root: Traced) -> dict[str, str]:
    return {traced.part: traced.state for traced in root.walk()}


def run_trace(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pipeline_lib", "trace", *map(str, arguments)]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=180
    )


def folder_of(model: Path, part: str) -> Path:
    traced = next(traced for traced in look(model).walk() if traced.part == part)
    return model.parent.parent / traced.ref.stage / traced.ref.digest


def test_the_whole_chain_is_told_and_verified(sealed: Path) -> None:
    done = run_trace(sealed)

    assert (done.returncode, done.stderr) == (0, "")
    heads = re.findall(r"^[│├└─ ]*([a-z.0-9]+ [0-9a-f]{16}  .*)$", done.stdout, re.MULTILINE)
    assert [head.split()[0] for head in heads] == PARTS
    assert all(head.endswith("  verified") for head in heads)
    told = [
        *(
            f"modelscope Qwen/Qwen3-8B@{COMMIT}",
            f"chats.jsonl sha256:{sha256_text(ROWS)}",
            "lr: 0.003",
        ),
        *(
            "attempt 1  2 ranks by srun on n1, n2 in SLURM job 7, from the start: no room in "
            "checkpoints: stopped",
        ),
        *(
            "attempt 2  2 ranks by srun on n1, n3 in SLURM job 8, from step 50: done",
            "in SLURM job 7, 8",
            "python 3.",
        ),
        *(
            "block_tokens: 256",
            "6 links: 6 verified",
            f"sha256:{sha256_file(sealed / MANIFEST_NAME)}",
            "code  ",
        ),
    ]
    assert [text for text in told if text not in done.stdout] == []


def test_a_copy_tells_the_same_without_the_store(sealed: Path, tmp_path: Path) -> None:
    shutil.copytree(sealed, tmp_path / "copy" / "model")
    here, there = look(sealed), look(tmp_path / "copy" / "model")

    assert states(there) == {part: VERIFIED if part == "merge" else RECORDED for part in PARTS}
    assert [traced.link for traced in there.walk()] == [traced.link for traced in here.walk()]
    assert "known only from the model's own record" in there.inputs[0].notes[0]


def test_a_copy_finds_its_links_in_the_store_that_is_given(sealed: Path, tmp_path: Path) -> None:
    shutil.copytree(sealed, tmp_path / "model")
    root = trace(tmp_path / "model", Store(sealed.parent.parent), False, lambda _: None)
    assert set(states(root).values()) == {VERIFIED}


def test_a_link_and_the_adapters_folder_lead_to_the_model(model: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(model)
    assert set(states(look(tmp_path / "link")).values()) == {VERIFIED}
    (model / "adapter").mkdir()
    (model / "adapter" / "adapter_config.json").write_text("{}")
    root = look(model / "adapter")
    assert root.problems == [f"{model}/adapter/adapter_config.json: not in the manifest"]
    done = run_trace(model / "adapter")
    assert (done.returncode, root.problems[0] in done.stderr) == (66, True)
    assert re.search(r"^merge [0-9a-f]{16}  DAMAGED$", done.stdout, re.MULTILINE)


def test_nothing_in_it_names_people_and_places(sealed: Path) -> None:
    text = (sealed / LINEAGE_NAME).read_text() + (sealed / "README.md").read_text()
    assert "alice" not in text
    assert "secret-project" not in text
    assert "n1, n2 in SLURM job 7" in text


def test_the_host_of_a_workstation_stays_behind(tmp_path: Path) -> None:
    launched = {"event": "run.launched", "attempt": 1, "ranks": 2, "launcher": "spawn", "job": None}
    model = seal_model(Store(tmp_path / "store"), events=[{**launched, "nodes": ["alices-laptop"]}])
    assert "2 ranks by spawn" in (model / LINEAGE_NAME).read_text()
    assert "laptop" not in (model / LINEAGE_NAME).read_text() + (model / "README.md").read_text()


def test_json_is_for_machines(sealed: Path) -> None:
    done = run_trace(sealed, "--json")
    root = json.loads(done.stdout)
    assert [root["part"], root["state"], root["problems"]] == ["merge", VERIFIED, []]
    train = root["made_from"][0]
    assert (train["part"], train["restarts"], train["job"], len(train["attempts"])) == (
        "train",
        1,
        "7, 8",
        2,
    )


@pytest.mark.parametrize("part", PARTS)
def test_a_flipped_byte_is_named(model: Path, part: str) -> None:
    folder = model if part == "merge" else folder_of(model, part)
    name = next(iter(sorted(read_manifest(folder).files)))
    content = bytearray((folder / name).read_bytes())
    content[0] ^= 1
    (folder / name).write_bytes(content)

    root = look(model)
    assert problems_of(root)[0].startswith(f"{folder / name}: content differs from what was sealed")
    assert {each for each, state in states(root).items() if state == DAMAGED} == {part}
    assert SAME_SIZES in states(look(model, sizes_only=True)).values()
    assert problems_of(look(model, sizes_only=True)) == []


@pytest.mark.parametrize("part", [part for part in PARTS if part != "merge"])
@pytest.mark.parametrize(
    "edit", [{"started_at": "2001-01-01"}, {"versions": {"torch": "9"}}, {"counts": {"rows": 1}}]
)
def test_an_edited_manifest_in_the_store_is_named(
    model: Path, part: str, edit: dict[str, Any]
) -> None:
    path = folder_of(model, part) / MANIFEST_NAME
    write_json(path, {**read_json(path), **edit})
    root = look(model)
    assert states(root)[part] == DAMAGED
    assert problems_of(root) == [
        f"{path}: neither the manifest that was read nor the one that was sealed"
    ]


def test_an_edited_manifest_of_the_model_is_named(model: Path) -> None:
    path = model / MANIFEST_NAME
    write_json(path, {**read_json(path), "started_at": "2001-01-01"})
    assert problems_of(look(model)) == [f"{path}: not as it was sealed"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "damaged"),
        ("[" * 100_000, "damaged"),
        ('{"stage": 3}', r"damaged \(stage"),
        ('{"schema_version": 9}', "schema 9, this code reads 2"),
        ("null", "damaged"),
        (
            '{"stage": "merge", "digest": "0", "spec": {}, "files": {}, "duration_s": 1e999}',
            r"damaged \(duration_s",
        ),
    ],
)
def test_a_manifest_that_does_not_read_is_one_clear_error(
    model: Path, content: str, said: str
) -> None:
    (model / MANIFEST_NAME).write_text(content)
    with pytest.raises(IntegrityError, match=f"{model / MANIFEST_NAME}: {said}"):
        look(model)


def reseal(model: Path, change: Any) -> None:
    """What a forger does: edit lineage.json, and put its hash into the folder's manifest."""
    record = read_json(model / LINEAGE_NAME)
    change(record)
    write_json(model / LINEAGE_NAME, record)
    seal_lineage(model)


def seal_lineage(model: Path) -> None:
    manifest = read_json(model / MANIFEST_NAME)
    path = model / LINEAGE_NAME
    manifest["files"][LINEAGE_NAME] = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
    write_json(model / MANIFEST_NAME, manifest)


@pytest.mark.parametrize("part", PARTS[1:])
def test_an_edited_lineage_is_named_even_where_the_folder_was_sealed_anew(
    copy: Path, part: str
) -> None:
    reseal(copy, lambda record: record["links"][part]["manifest"]["versions"].update(torch="9.9"))
    root = look(copy)
    assert states(root)[part] == DAMAGED
    assert problems_of(root) == [
        f"{LINEAGE_NAME}: {part}: its sha256 differs from the recorded one"
    ]


def test_a_lineage_that_no_text_can_hold_is_named(copy: Path) -> None:
    for value in ("[" * 900 + "]" * 900, "NaN"):
        (copy / LINEAGE_NAME).write_text(
            f'{{"links": {{"train": {{"manifest": {{"counts": {value}}}}}}}}}'
        )
        seal_lineage(copy)
        assert LINEAGE_NAME in problems_of(look(copy))[0]


@pytest.mark.parametrize(
    "record", [{}, {"links": 3}, {"links": {"train": {"manifest": {}}}}, [], {"attempts": [{}]}]
)
def test_a_lineage_of_another_form_is_named(copy: Path, record: Any) -> None:
    (copy / LINEAGE_NAME).write_text(json_text(record))
    assert problems_of(look(copy))[0].startswith(f"{copy / LINEAGE_NAME}: ")
    reseal(copy, lambda _: None)
    assert any("damaged" in problem for problem in problems_of(look(copy))) == bool(
        record or record == []
    )


def test_names_that_lead_out_of_the_store_are_refused(copy: Path) -> None:
    manifest = read_json(copy / MANIFEST_NAME)
    manifest["inputs"]["train"] |= {"stage": "../..", "digest": "etc\x1b[31m"}
    write_json(copy / MANIFEST_NAME, manifest)
    done = run_trace(copy)
    assert done.returncode == 66
    assert "is not a stage instance" in done.stderr
    assert "\x1b" not in done.stdout + done.stderr


def test_a_spec_that_is_not_that_of_its_digest_is_named(copy: Path) -> None:
    manifest = read_json(copy / MANIFEST_NAME)
    manifest["spec"]["settings"]["dtype"] = "fp32"
    write_json(copy / MANIFEST_NAME, manifest)
    assert re.match(
        r"its spec belongs to merge [0-9a-f]{16}, not to merge", problems_of(look(copy))[0]
    )


def test_a_link_that_was_made_again_is_no_damage_and_is_told(model: Path) -> None:
    root = look(model)
    shard = next(traced for traced in root.walk() if traced.part == "shard")
    store = Store(model.parent.parent)
    shutil.rmtree(store.sealed(shard.ref))

    def make_again(job: Any) -> dict[str, Any]:
        (job.out / "other").write_text("made on another day")
        return {}

    run_stage(make_again, store.read_spec(store.spec_path(shard.ref.digest)), store, lambda _: None)
    found = look(model)
    assert states(found) == {part: REMADE if part == "shard" else VERIFIED for part in PARTS}
    assert problems_of(found) == []
    assert [each.link for each in found.walk()] == [each.link for each in root.walk()]


def test_what_the_store_no_longer_had_at_the_merge_is_left_out(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    model = seal_model(store)
    shutil.rmtree(folder_of(model, "tokenize"))
    shutil.rmtree(model)
    again = seal_model_without_tokens(store)
    root = look(again)
    unknown = next(traced for traced in root.walk() if traced.part == "tokenize")
    assert "the model folder" in unknown.notes[0]
    assert problems_of(root) == []


def seal_model_without_tokens(store: Store) -> Path:
    """Merge again, in a store where everything but the merge and the tokens is there."""
    spec = experiment_from(HUB_MODEL, {}).specs["merge"]

    def merge(job: Any) -> dict[str, Any]:
        tell_origin(job)
        return {}

    run_stage(merge, spec, store, lambda _: None)
    return store.sealed(spec.ref)


def test_a_model_tuned_further_tells_of_the_first_training(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    first = seal_model(store)
    hashes = {name: sha256_file(first / name) for name in ("config.json", "model.safetensors")}
    second = seal_model(store, {"source": "local", "path": str(first)}, hashes)
    third_hashes = {
        name: sha256_file(second / name) for name in ("config.json", "model.safetensors")
    }
    third = seal_model(store, {"source": "local", "path": str(second)}, third_hashes)

    assert [traced.part for traced in look(third).walk()] == PARTS * 3
    copy = shutil.copytree(third, tmp_path / "copy")
    root = look(copy)
    assert [traced.part for traced in root.walk()] == PARTS * 3
    assert list(root.walk())[-1].link.sources[0].endswith(COMMIT)  # type: ignore[union-attr]
    assert problems_of(root) == []
    assert "base_model: Qwen/Qwen3-8B\n" in (copy / "README.md").read_text()

    reseal(copy, lambda record: record["base"]["manifest"].update(started_at="2001-01-01"))
    # nothing records the sha256 of that manifest, only of what it lists
    assert problems_of(look(copy)) == []
    reseal(copy, lambda record: record["base"]["lineage"]["links"].clear())
    assert problems_of(look(copy)) == [
        f"{LINEAGE_NAME}: base: its lineage differs from the sealed one"
    ]


def test_a_base_is_known_by_its_files_though_the_spec_has_the_path_of_another_users_copy(
    tmp_path: Path,
) -> None:
    store = Store(tmp_path / "store")
    first = seal_model(store)
    names = ("config.json", "model.safetensors")
    (tmp_path / "copy").mkdir()
    for name in names:
        shutil.copyfile(first / name, tmp_path / "copy" / name)
    hashes = {name: sha256_file(first / name) for name in names}
    second = seal_model(store, {"source": "local", "path": str(tmp_path / "copy")}, hashes)

    assert [traced.part for traced in look(second).walk()] == PARTS * 2


def test_a_local_base_of_unknown_origin_says_so(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    hashes = {"config.json": sha256_text("{}")}
    root = look(
        seal_model(
            Store(tmp_path / "store"), {"source": "local", "path": str(tmp_path / "base")}, hashes
        )
    )
    assert root.inputs[-1].notes == ["the origin of this folder is unknown"]


def test_what_is_no_model_says_so(model: Path, tmp_path: Path) -> None:
    for path, said in (
        (tmp_path / "none", "no such folder"),
        (tmp_path, "not a model folder of this pipeline: it has no manifest.json"),
        (folder_of(model, "train"), "made by the train stage, so it is not a model folder"),
    ):
        with pytest.raises(DataError, match=f"{path}: {said}"):
            look(path)


def test_the_report_gets_the_same_links(model: Path) -> None:
    store = Store(model.parent.parent)
    traced = {each.part: each for each in look(model).walk()}
    inputs = {
        part: open_sealed(Ref(each.ref.stage, each.ref.digest), store)
        for part, each in traced.items()
    }
    links = chain(inputs)
    assert [link.part for link in links] == PARTS
    assert (links[1].restarts, links[1].job) == (1, "7, 8")
    assert links[0].made_from == [
        ("train", traced["train"].ref.digest),
        ("model", traced["model"].ref.digest),
    ]
    assert links[-1].machine
