"""Certificates of real servers on loopback: right ones, and ones that are wrong on purpose."""

import argparse
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from pipeline_lib.certify.certificate import Certificate, certify
from pipeline_lib.certify.checks import (
    CheckVerdict,
    Served,
    check_answers,
    check_base,
    first_other_token,
)
from pipeline_lib.certify.questions import (
    BUILT_IN,
    ServerQuestion,
    evaluated_prompts,
    questions_of,
)
from pipeline_lib.certify.reference import BaseReference, Expected
from pipeline_lib.certify.server import KEY_VARIABLE, ChatAnswer, Server
from pipeline_lib.certify.tolerances import TOLERANCES
from pipeline_lib.cli.certify import add_to
from pipeline_lib.config.dag import Dag
from pipeline_lib.core.errors import ConfigError, DataError, ServedDiffers, ServerError
from pipeline_lib.core.files import write_jsonl
from pipeline_lib.core.stage import Job, run_stage
from pipeline_lib.core.store import Store
from pipeline_lib.data.encode import load_tokenizer
from pipeline_lib.records.evaluation import GENERATIONS_NAME
from tests.certify.servers import BARE, LLAMA, NOTHING, VLLM, TinyServer, serving
from tests.lineage.lineages import HUB_MODEL, experiment_from, seal_model

ROOT = Path(__file__).parents[2]
PROMPTS = 1
MAX_NEW_TOKENS = 24
TRAINED_BOTH = {"prompts": {"thinking_off": 9, "thinking_on": 4}, "thinking_default": "on"}
SYSTEM = "Be brief."
PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
)
SECRET = "sk-this-is-the-key-of-a-server"
DEADLINE_S = 120.0


@dataclass(frozen=True)
class World:
    """A store with a model that has learned answers which end, and its base."""

    store: Store
    folder: Path
    base: Path


@pytest.fixture(scope="module")
def world(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    """Never to be changed."""
    root = tmp_path_factory.mktemp("certify")
    tuned = root / "tuned"
    shutil.copytree(tiny, tuned)
    store = Store(root / "store")
    tokenize = {"system": SYSTEM}
    folders = {"model": tiny, "merge": tuned}
    untrained = seal_model(
        Store(root / "first"), prompts=TRAINED_BOTH, tokenize=tokenize, folders=folders
    )
    learn(tuned, questions_of(untrained, Store(root / "first"), PROMPTS))
    folder = seal_model(store, prompts=TRAINED_BOTH, tokenize=tokenize, folders=folders)
    return World(store, folder, tiny)


def learn(folder: Path, questions: list[ServerQuestion]) -> None:
    """Train the model in `folder` to give each question a short answer of its own, which ends."""
    tokenizer = load_tokenizer(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    batches = []
    for number, question in enumerate(questions):
        prompt = tokenizer.encode(question.prompt, add_special_tokens=False).ids
        text = f"{'Yes, of course, that is' if number % 2 else 'No, never'} {number}.<|im_end|>"
        answer = tokenizer.encode(text, add_special_tokens=False).ids
        labels = [-100] * len(prompt) + answer
        batches.append((torch.tensor([prompt + answer]), torch.tensor([labels])))
    for _ in range(60):
        for tokens, targets in batches:
            loss = model(tokens, labels=targets).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)


def certificate(
    world: World, endpoint: str, model: str | None = None, weights: str = "bf16"
) -> Certificate:
    server = Server(endpoint, model)
    return certify(
        world.folder,
        world.store,
        server,
        weights=weights,
        prompts=PROMPTS,
        max_new_tokens=MAX_NEW_TOKENS,
        say=lambda _: None,
    )


def certified(world: World, **changes: Any) -> Certificate:
    served = TinyServer(world.folder, **changes)
    with serving(served) as endpoint:
        return certificate(world, endpoint, served.names[-1])


def verdicts(found: Certificate) -> dict[str, str]:
    return {check.name: check.verdict.value for check in found.checks}


def cause_of(found: Certificate, name: str) -> str:
    [check] = [check for check in found.checks if check.name == name]
    assert check.verdict is CheckVerdict.DIFFERS, check
    return check.cause


ALL = [
    "tokenizer",
    "template, one turn",
    "template, several turns",
    "template, tools",
    "greedy answers",
    "log-probabilities of its answers",
    "log-probabilities of given answers",
    "end of the turn",
    "not the base model",
]
OF_A_BARE_SERVER = dict.fromkeys(ALL, "same") | dict.fromkeys(
    ["tokenizer", "log-probabilities of its answers", "log-probabilities of given answers"],
    "not checked",
)


def test_a_right_server_that_offers_everything_passes_every_check(world: World) -> None:
    found = certified(world)

    assert verdicts(found) == dict.fromkeys(ALL, "same")
    assert {check.by for check in found.checks if "template" in check.name} == {"/tokenize"}
    found.raise_unless_same()


def test_both_thinking_modes_and_the_trained_system_prompt_are_asked(world: World) -> None:
    served = TinyServer(world.folder)
    with serving(served) as endpoint:
        certificate(world, endpoint)

    asked = [body for path, body in served.asked if path == "/v1/chat/completions"]
    modes = [body["chat_template_kwargs"]["enable_thinking"] for body in asked]
    assert sorted(modes) == [False] * (PROMPTS + 2) + [True] * (PROMPTS + 2)
    assert all(body["messages"][0] == {"role": "system", "content": SYSTEM} for body in asked)
    assert all(body["temperature"] == 0 for body in asked)
    assert len([body for body in asked if body.get("tools")]) == 2


def test_a_server_as_llama_cpp_has_its_template_checked_by_its_text(world: World) -> None:
    found = certified(world, offers=LLAMA)

    expected = dict.fromkeys(ALL, "same")
    expected["log-probabilities of given answers"] = "not checked"
    assert verdicts(found) == expected
    assert {check.by for check in found.checks if "template" in check.name} == {"/apply-template"}


def test_the_probabilities_of_the_prompt_are_read_from_vllms_own_option_too(world: World) -> None:
    found = certified(world, offers=frozenset({"given"}))

    assert verdicts(found)["log-probabilities of given answers"] == "same"


def test_what_a_bare_server_does_not_offer_is_not_checked(world: World) -> None:
    found = certified(world, offers=BARE, refuses_unknown=True)

    assert verdicts(found) == OF_A_BARE_SERVER
    by = {check.by for check in found.checks if "template" in check.name}
    assert by == {"usage.prompt_tokens, only the number of tokens"}


def test_without_any_means_the_template_is_not_checked(world: World) -> None:
    found = certified(world, offers=NOTHING)

    assert [verdicts(found)[name] for name in ALL[:4]] == ["not checked"] * 4
    assert verdicts(found)["greedy answers"] == "same"
    found.raise_unless_same()


@pytest.mark.parametrize("offers", [VLLM, BARE])
def test_the_base_in_place_of_the_tuned_model_is_named(
    world: World, offers: frozenset[str]
) -> None:
    found = certified(world, offers=offers, weights=world.base)

    assert verdicts(found)["template, one turn"] == "same"
    assert verdicts(found)["end of the turn"] == "not checked"
    assert "base model is served" in cause_of(found, "not the base model")
    assert "base model is served" in cause_of(found, "greedy answers")
    with pytest.raises(ServedDiffers, match="base model is served"):
        found.raise_unless_same()


def test_an_adapter_that_is_ignored_is_the_base_under_another_name(world: World) -> None:
    found = certified(world, weights=world.base, names=("base", "adapter"))

    assert found.model == "adapter"
    assert "an adapter is not applied" in cause_of(found, "log-probabilities of given answers")
    assert found.difference == "this is another model"


@pytest.mark.parametrize(
    ("offers", "by"),
    [
        (VLLM, "/tokenize"),
        (LLAMA, "/apply-template"),
        (BARE, "usage.prompt_tokens, only the number of tokens"),
    ],
)
def test_a_lost_template_is_named_and_is_the_cause_of_other_answers(
    world: World, offers: frozenset[str], by: str
) -> None:
    found = certified(world, offers=offers, template=PLAIN_TEMPLATE)

    checks = {check.name: check for check in found.checks}
    for name in ALL[1:4]:
        assert checks[name].verdict is CheckVerdict.DIFFERS
        assert checks[name].by == by
        assert "another chat template" in checks[name].cause
    assert "another prompt" in cause_of(found, "greedy answers")
    if offers is VLLM:  # the weights are the right ones, and it is seen
        assert verdicts(found)["log-probabilities of given answers"] == "same"
        assert verdicts(found)["not the base model"] == "same"
        assert found.difference.startswith("the weights are the model's")
    else:
        assert found.difference.endswith("its weights were not told")


def test_a_server_that_drops_the_thinking_switch_is_told_from_a_lost_template(world: World) -> None:
    found = certified(world, passes_variables=False)

    assert "chat_template_kwargs" in cause_of(found, "template, one turn")


def test_a_server_that_does_not_stop_is_named_and_its_answers_are_the_same(world: World) -> None:
    found = certified(world, stops=False)

    assert verdicts(found) == {**dict.fromkeys(ALL, "same"), "end of the turn": "differs"}
    assert "no stop token" in cause_of(found, "end of the turn")
    assert found.difference.startswith("this is the model")


@pytest.mark.parametrize("weights", ["bf16", "fp8"])
def test_weights_of_fewer_bits_are_within_their_tolerance(world: World, weights: str) -> None:
    rounded = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}[weights]
    with serving(TinyServer(world.folder, rounded=rounded)) as endpoint:
        found = certificate(world, endpoint, weights=weights)

    assert verdicts(found) == dict.fromkeys(ALL, "same")


def test_special_tokens_in_an_answer_are_found(world: World) -> None:
    found = certified(world, keeps_special=True)

    assert "special tokens" in cause_of(found, "end of the turn")


def test_without_the_base_in_the_store_that_check_alone_is_not_made(
    world: World, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(world.folder, folder)
    elsewhere = World(Store(tmp_path / "store"), folder, world.base)

    found = certified(elsewhere)

    assert verdicts(found) == {**dict.fromkeys(ALL, "same"), "not the base model": "not checked"}


def test_the_questions_are_built_in_ones_without_an_evaluation(world: World) -> None:
    questions = questions_of(world.folder, world.store, 1)

    asked = {question.messages[1]["content"] for question in questions[:1]}
    assert asked == {BUILT_IN[0]}
    assert len({question.prompt for question in questions}) == len(questions) == 6


def test_the_questions_of_the_evaluation_come_first(world: World, tmp_path: Path) -> None:
    shutil.copytree(world.store.root, tmp_path / "store")
    store = Store(tmp_path / "store")
    folder = store.root / world.folder.relative_to(world.store.root)
    experiment = experiment_from(HUB_MODEL, {}, tokenize={"system": SYSTEM})
    Dag((experiment,), store, name=experiment.name).freeze()
    row = {"prompt": "Who wrote it?", "reference": None, "base": "?", "tuned": "No."}

    def write(job: Job) -> dict[str, Any]:
        write_jsonl(job.out / GENERATIONS_NAME, [row])
        return {}

    base = experiment.specs["baseline"]
    run_stage(lambda _: {}, base, store, lambda _: None)
    run_stage(write, experiment.specs["evaluate"], store, lambda _: None)

    assert evaluated_prompts(folder, store) == ["Who wrote it?"]
    first = questions_of(folder, store, 2)[:2]
    asked = [question.messages[1]["content"] for question in first]
    assert asked == ["Who wrote it?", BUILT_IN[0]]


def test_a_folder_without_a_template_is_refused(world: World, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(world.folder, folder)
    (folder / "chat_template.jinja").unlink()

    with pytest.raises(DataError, match="no chat template"):
        questions_of(folder, world.store, 1)


def test_a_key_is_sent_and_never_shown(world: World) -> None:
    served = TinyServer(world.folder, key=SECRET)
    with serving(served) as endpoint:
        with pytest.raises(ServerError, match=KEY_VARIABLE):
            certificate(world, endpoint)
        Server(endpoint, key=SECRET).choose_model()
        served.status = 500
        with pytest.raises(ConfigError) as refused:
            Server(endpoint, key=SECRET).choose_model()
    assert SECRET not in str(refused.value)


def test_a_redirect_is_not_followed(world: World) -> None:
    with (
        serving(TinyServer(world.folder, status=307)) as endpoint,
        pytest.raises(ServerError, match="not followed"),
    ):
        Server(endpoint, key=SECRET).choose_model()


def test_a_server_that_has_no_such_model_offers_nothing_that_can_be_checked(world: World) -> None:
    with serving(TinyServer(world.folder)) as endpoint:
        found = certificate(world, endpoint, "another")

    assert verdicts(found) == dict.fromkeys(ALL, "not checked")
    with pytest.raises(ServerError, match="no such model"):
        found.raise_unless_same()


def test_of_several_models_one_has_to_be_named(world: World) -> None:
    with (
        serving(TinyServer(world.folder, names=("base", "adapter"))) as endpoint,
        pytest.raises(ConfigError, match="base, adapter"),
    ):
        Server(endpoint).choose_model()


def test_an_endpoint_that_is_no_address_is_refused() -> None:
    with pytest.raises(ConfigError, match="no address"):
        Server("localhost:8000")


def expected_answer(tiny: Path, text: str, leads: float = 9.0) -> tuple[Expected, Tokenizer]:
    """An answer that the reference gives to a question, as likely as `leads` nats everywhere."""
    tokenizer = load_tokenizer(tiny)
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    question = ServerQuestion("one turn", [{"role": "user", "content": "?"}], None, {}, "?")
    sizes = [1.0] * len(tokens)
    return Expected(question, [1], tokens, sizes, [leads] * len(tokens), False), tokenizer


def chat_answer(content: str, reasoning: str | None = None, has_calls: bool = False) -> ChatAnswer:
    return ChatAnswer(content, reasoning, has_calls, "stop", None, ())


def test_an_answer_that_a_reasoning_parser_took_apart_is_compared_whole(tiny: Path) -> None:
    expected, tokenizer = expected_answer(tiny, "<think>\nThe sum.\n</think>\n\nIt is 4.")

    same = chat_answer("It is 4.", reasoning="The sum.")
    other = chat_answer("It is 5.", reasoning="The sum.")

    assert first_other_token(expected, same, tokenizer) is None
    place = first_other_token(expected, other, tokenizer)
    assert place is not None
    assert "4" in tokenizer.decode([expected.answer[place]])


def test_calls_that_a_tool_parser_took_out_are_not_compared(tiny: Path) -> None:
    expected, tokenizer = expected_answer(tiny, "<tool_call>")
    served = [Served(expected, chat_answer("", has_calls=True))]

    assert check_answers(served, tokenizer, TOLERANCES["bf16"]).verdict is CheckVerdict.NOT_CHECKED


@pytest.mark.parametrize(("lead", "verdict"), [(0.1, "same"), (0.3, "differs")])
def test_another_token_is_the_same_only_where_the_reference_is_nearly_tied(
    tiny: Path, lead: float, verdict: str
) -> None:
    expected, tokenizer = expected_answer(tiny, "red green blue", lead)
    served = [Served(expected, chat_answer("red green grey"))]

    assert check_answers(served, tokenizer, TOLERANCES["bf16"]).verdict.value == verdict


@pytest.mark.parametrize(
    ("given", "verdict"), [(-1.05, "same"), (-1.95, "differs"), (-1.5, "not checked")]
)
def test_the_base_is_named_where_the_server_is_clearly_nearer_to_it(
    tiny: Path, given: float, verdict: str
) -> None:
    expected, tokenizer = expected_answer(tiny, "red")
    expected = replace(expected, nats=[-1.0] * len(expected.answer))
    base = BaseReference([expected], [[-2.0] * len(expected.answer)])
    found = check_base(
        base,
        [Served(expected, None)],
        [[given] * len(expected.answer)],
        tokenizer,
    )

    assert found.verdict.value == verdict


def test_every_kind_of_weights_has_its_tolerance() -> None:
    parser = argparse.ArgumentParser()
    add_to(parser.add_subparsers())
    asked = ["certify", "a", "--endpoint", "http://localhost"]
    taken = [
        parser.parse_args([*asked, "--weights", weights]).weights
        for weights in ("bf16", "fp8", "4bit")
    ]
    assert set(taken) == set(TOLERANCES)
    assert parser.parse_args(asked).weights in TOLERANCES


def test_the_page_has_the_tolerances_of_the_code() -> None:
    page = (ROOT / "docs" / "serve.md").read_text()
    found = {
        weights: (float(mean), float(tie))
        for weights, mean, tie in re.findall(r"^\| `(\w+)` \| ([\d.]+) \| ([\d.]+) \|", page, re.M)
    }

    assert found == {weights: (one.mean_nats, one.tie_nats) for weights, one in TOLERANCES.items()}


def command(world: World, endpoint: str, *options: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [
            *(sys.executable, "-m", "pipeline_lib", "certify", str(world.folder)),
            *("--endpoint", endpoint, "--prompts", "1", "--max-new-tokens", "24", *options),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PIPELINE_STORE": str(world.store.root)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_command_tells_by_its_exit_code_whether_it_is_the_model(world: World) -> None:
    with serving(TinyServer(world.folder)) as endpoint:
        same = command(world, endpoint, "--json")
    with serving(TinyServer(world.folder, weights=world.base)) as endpoint:
        other = command(world, endpoint)
    gone = command(world, endpoint)

    assert same.returncode == 0, same.stderr
    assert json.loads(same.stdout)["verdict"] == "same"
    assert other.returncode == ServedDiffers.exit_code
    assert "this is another model" in other.stdout
    assert "base model is served" in other.stderr
    assert gone.returncode == ServerError.exit_code
    assert "cannot be reached" in gone.stderr


@contextmanager
def transformers_serve(folder: Path, tmp_path: Path) -> Iterator[str]:
    """The endpoint of `transformers serve`, offline on the CPU."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = Path(sys.executable).parent / "transformers"
    options = ("--host", "127.0.0.1", "--port", str(port), "--device", "cpu")
    log = (tmp_path / "serve.log").open("w")
    process = subprocess.Popen(
        [program, "serve", folder, *options],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        stdout=log,
        stderr=log,
    )
    try:
        deadline_s = time.monotonic() + DEADLINE_S
        while True:
            try:
                httpx2.get(f"http://127.0.0.1:{port}/health", trust_env=False)
                break
            except httpx2.HTTPError:
                assert process.poll() is None, (tmp_path / "serve.log").read_text()
                assert time.monotonic() < deadline_s
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait()
        log.close()


@pytest.mark.skipif(
    importlib.util.find_spec("openai") is None, reason="needs transformers[serving]: openai"
)
def test_transformers_own_server(world: World, tmp_path: Path) -> None:
    with transformers_serve(world.folder, tmp_path) as endpoint:
        found = certificate(world, endpoint, str(world.folder))

    assert verdicts(found) == OF_A_BARE_SERVER
