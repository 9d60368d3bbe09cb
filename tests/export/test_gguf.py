"""A GGUF file is the merged model, by its proof and by other programs, or it is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from pipeline_lib.core.errors import DataError, TrainingError
from pipeline_lib.core.spans import Spans
from pipeline_lib.data.blocks import Block
from pipeline_lib.data.encode import load_tokenizer
from pipeline_lib.export.gguf_file import file_name, plan_file, stop_tokens
from pipeline_lib.export.gguf_proof import LOGIT_TOLERANCES, prove
from pipeline_lib.export.modelfile import modelfile
from pipeline_lib.export.proof import judge
from pipeline_lib.export.quantizer import plan_source, quantize
from pipeline_lib.model.probe import save_probe
from pipeline_lib.model.streaming import StreamedModel
from pipeline_lib.records.export import ExportParity
from tests.data.chats import TEMPLATES, set_template

CPU = torch.device("cpu")
TEXT = (
    "<|im_start|>user\nWhat is number 3?<|im_end|>\n<|im_start|>assistant\nIt is 3.<|im_end|>\n"
    "<|im_start|>user\nAnd 4?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nIt is 4."
)
SIZES: dict[str, Any] = {
    **{"vocab_size": 576, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256},
    **{"rms_norm_eps": 1e-5, "rope_theta": 50_000.0},
}
# Q4_K and Q6_K have blocks of 256
WIDE: dict[str, Any] = {**SIZES, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
# transformers takes these for granted where it reads GGUF
READ_BY_ALL: dict[str, Any] = {"head_dim": 128, "moe_intermediate_size": 768}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=128)),
    "qwen3-moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **READ_BY_ALL, **EXPERTS)),
}


class Exported:
    """A model in a folder, with a probe as the training leaves it, and its file."""

    def __init__(self, root: Path, tiny: Path, model: PreTrainedModel) -> None:
        """Write the model in bf16, with the demo's tokenizer and Qwen3's template."""
        self.root = root
        self.merged = root / "merged"
        shutil.copytree(tiny, self.merged)
        model.bfloat16().save_pretrained(self.merged)
        set_template(self.merged, TEMPLATES["hybrid"])
        tokenizer = load_tokenizer(self.merged)
        stops = {"eos_token_id": [tokenizer.token_to_id("<|im_end|>")], "temperature": 0.7}
        (self.merged / "generation_config.json").write_text(json.dumps(stops))
        ids = tokenizer.encode(TEXT).ids
        count = len(ids)
        self.block = Block(
            tokens=np.array(ids, dtype=np.int32),
            supervised=np.ones(count, dtype=np.bool_),
            documents=np.zeros(count, dtype=np.int32),
        )
        (self.logits,) = StreamedModel(self.merged, torch.float32, CPU).probe_logits(self.block)
        save_probe(root, self.block, self.logits)

    def write(self, kind: str, folder: Path | None = None) -> Path:
        """Write the export `kind` of the model in `folder`, by default the merged one."""
        path = self.root / kind / file_name(kind)
        path.parent.mkdir(exist_ok=True)
        plan_file(folder or self.merged, kind).write(path, "a model")
        return path

    def proven(self, path: Path, kind: str) -> ExportParity:
        """Prove that the file at `path` is the merged model."""
        return prove(path, kind, self.merged, self.root, CPU, lambda _: None, Spans())

    def altered(self) -> Path:
        """Return a copy of the merged model that may be changed."""
        return Path(shutil.copytree(self.merged, self.root / "altered", dirs_exist_ok=True))


@pytest.fixture(scope="module", params=MODELS)
def exported(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny: Path
) -> Exported:
    torch.manual_seed(0)
    return Exported(tmp_path_factory.mktemp(request.param), tiny, MODELS[request.param]())


@pytest.fixture
def qwen3(tmp_path: Path, tiny: Path) -> Exported:
    torch.manual_seed(0)
    return Exported(tmp_path, tiny, MODELS["qwen3"]())


@pytest.mark.parametrize("kind", ["gguf-f16", "gguf-q8_0"])
def test_a_file_is_proven_and_its_bytes_are_the_same_each_time(
    exported: Exported, kind: str
) -> None:
    path = exported.write(kind)
    content = path.read_bytes()
    parity = exported.proven(path, kind)
    assert parity.value_difference == 0.0
    assert parity.relative_difference < (1e-5 if kind == "gguf-f16" else 2e-2)
    assert parity.trained_difference < 5e-2  # routers that chose other experts count here
    assert parity.compared_tokens > 100
    assert {"F32", kind.removeprefix("gguf-").upper()} == set(parity.tensors)
    assert exported.write(kind).read_bytes() == content


def test_transformers_loads_the_same_model(exported: Exported) -> None:
    path = exported.write("gguf-f16")
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    with torch.no_grad():
        found = model(torch.tensor([exported.block.tokens.tolist()])).logits[0]
    positions = np.linspace(0, len(found) - 1, len(exported.logits)).round().astype(int)
    assert torch.allclose(found[positions], exported.logits, atol=1e-4)


@pytest.mark.parametrize("kind", ["gguf-f16", "gguf-q8_0"])
def test_llama_cpp_computes_the_same_and_stops_where_the_model_does(
    exported: Exported, kind: str
) -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason="the extra llamacpp is not installed")
    path = exported.write(kind)
    model = llama_cpp.Llama(str(path), n_ctx=256, n_threads=1, logits_all=True, verbose=False)
    ids = exported.block.tokens.tolist()
    assert model.tokenize(TEXT.encode(), add_bos=False, special=True) == ids
    model.eval(ids)
    found = torch.from_numpy(model.scores[: len(ids)].copy())
    (exact,) = StreamedModel(exported.merged, torch.float32, CPU).probe_logits(
        exported.block, positions=torch.arange(len(ids))
    )
    judge(found, exact, LOGIT_TOLERANCES["gguf-q8_0"], has_experts="moe" in str(exported.root))
    likeliest = exact.topk(2).values
    is_clear = likeliest[:, 0] - likeliest[:, 1] > 0.1 * exact.std()
    assert is_clear.any()
    assert found.argmax(-1)[is_clear].equal(exact.argmax(-1)[is_clear])
    (stop,) = stop_tokens(exported.merged)
    assert model.token_eos() == stop
    vocab = llama_cpp.llama_model_get_vocab(model.model)
    assert llama_cpp.llama_vocab_is_eog(vocab, stop)
    assert model.metadata["tokenizer.chat_template"] == TEMPLATES["hybrid"]
    model.close()


def quantized(model: Exported, folder: Path | None = None) -> Path:
    """Write q4_k_m of the model in `folder` by llama.cpp's quantizer."""
    pytest.importorskip("llama_cpp", reason="the extra llamacpp is not installed")
    path = model.root / "q4" / file_name("gguf-q4_k_m")
    path.parent.mkdir(exist_ok=True)
    source = path.with_suffix(".source")
    plan_source(folder or model.merged).write(source, "a model")
    quantize(source, path)
    return path


@pytest.mark.parametrize("sizes", [SIZES, WIDE])
def test_four_bits_of_llama_cpp_are_proven_and_compute_the_same_there(
    tmp_path: Path, tiny: Path, sizes: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    model = Exported(tmp_path, tiny, Qwen3ForCausalLM(Qwen3Config(**{"head_dim": 128, **sizes})))
    path = quantized(model)
    parity = model.proven(path, "gguf-q4_k_m")
    assert parity.value_difference == 0.0
    assert 0.0 < parity.relative_difference < LOGIT_TOLERANCES["gguf-q4_k_m"] / 2
    assert ("Q6_K" in parity.tensors) == (sizes is WIDE)
    content = path.read_bytes()
    assert quantized(model).read_bytes() == content

    import llama_cpp

    server = llama_cpp.Llama(str(path), n_ctx=256, n_threads=1, logits_all=True, verbose=False)
    ids = model.block.tokens.tolist()
    server.eval(ids)
    found = torch.from_numpy(server.scores[: len(ids)].copy())
    (exact,) = StreamedModel(model.merged, torch.float32, CPU).probe_logits(
        model.block, positions=torch.arange(len(ids))
    )
    figures = judge(found, exact, LOGIT_TOLERANCES["gguf-q4_k_m"], has_experts=False)
    assert figures["relative_difference"] == pytest.approx(parity.relative_difference, rel=0.3)
    server.close()


def test_four_bits_of_another_model_are_refused(tmp_path: Path, tiny: Path) -> None:
    model = Exported(tmp_path, tiny, Qwen3ForCausalLM(Qwen3Config(**WIDE)))
    folder = model.altered()
    for alter in (swap_two_linears, scale_a_linear, scale_a_norm):
        shutil.rmtree(folder)
        alter(model.altered())
        with pytest.raises(TrainingError, match="is not the merged model"):
            model.proven(quantized(model, folder), "gguf-q4_k_m")


def test_what_the_file_tells_a_server(qwen3: Exported) -> None:
    lines = modelfile(qwen3.merged, "model-f16.gguf").splitlines()
    assert lines == [
        "FROM ./model-f16.gguf",
        'PARAMETER stop "<|im_end|>"',
        "PARAMETER temperature 0.7",
    ]


def scale_a_norm(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.self_attn.k_norm.weight"] *= 1.01
    save_file(tensors, path, {"format": "pt"})


def scale_a_linear(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.self_attn.v_proj.weight"] *= 1.05
    save_file(tensors, path, {"format": "pt"})


def swap_two_linears(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    gate, up = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"
    tensors[gate], tensors[up] = tensors[up], tensors[gate]
    save_file(tensors, path, {"format": "pt"})


def change_theta(folder: Path) -> None:
    edit(folder / "config.json", lambda config: config["rope_parameters"].update(rope_theta=4e4))


def change_eps(folder: Path) -> None:
    edit(folder / "config.json", lambda config: config.update(rms_norm_eps=1e-6))


def tie_the_head(folder: Path) -> None:
    edit(folder / "config.json", lambda config: config.update(tie_word_embeddings=True))


def drop_a_merge(folder: Path) -> None:
    edit(folder / "tokenizer.json", lambda tokenizer: tokenizer["model"]["merges"].pop(0))


def lose_the_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()


def edit(path: Path, change: Callable[[Any], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("alter", "message"),
    [
        (scale_a_norm, "model.layers.1.self_attn.k_norm.weight differs"),
        (swap_two_linears, "model.layers.0.mlp.gate_proj.weight differs"),
        (change_theta, "its rope_parameters is"),
        (change_eps, "its rms_norm_eps is"),
        (tie_the_head, "its tie_word_embeddings is True"),
        (drop_a_merge, "its tokenizer gives other ids"),
        (lose_the_template, "another chat template"),
    ],
)
def test_a_file_of_another_model_is_refused(
    qwen3: Exported, alter: Callable[[Path], None], message: str
) -> None:
    folder = qwen3.altered()
    alter(folder)
    path = qwen3.write("gguf-q8_0", folder)  # which rounds the most
    with pytest.raises(TrainingError, match=message):
        qwen3.proven(path, "gguf-q8_0")


def test_what_f16_cannot_hold_is_refused_by_name(qwen3: Exported) -> None:
    path = qwen3.merged / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.mlp.down_proj.weight"][3, 5] = 7e4
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(DataError, match=r"blk\.0\.ffn_down\.weight has values beyond 65504"):
        qwen3.write("gguf-f16")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "'linear'"),
        ({"model_type": "llama"}, "model_type 'llama'"),
    ],
)
def test_what_gguf_has_no_names_for_is_refused(
    qwen3: Exported, change: dict[str, Any], message: str
) -> None:
    edit(qwen3.merged / "config.json", lambda config: config.update(change))
    with pytest.raises(DataError, match=message):
        plan_file(qwen3.merged, "gguf-f16")


def test_another_split_of_texts_is_refused(qwen3: Exported) -> None:
    edit(qwen3.merged / "tokenizer.json", lambda tokenizer: tokenizer.update(pre_tokenizer=None))
    with pytest.raises(DataError, match="splits texts in another way"):
        qwen3.write("gguf-f16")


def test_stretched_rotary_embeddings_are_in_the_file(tmp_path: Path, tiny: Path) -> None:
    torch.manual_seed(0)
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    sizes = {key: value for key, value in SIZES.items() if key != "rope_theta"}
    config = Qwen3Config(**sizes, head_dim=16, rope_parameters={"rope_theta": 1e4, **rope})
    exported = Exported(tmp_path, tiny, Qwen3ForCausalLM(config))
    path = exported.write("gguf-f16")
    assert exported.proven(path, "gguf-f16").relative_difference < 1e-5
    folder = exported.altered()
    edit(folder / "config.json", lambda content: content["rope_parameters"].update(factor=2.0))
    with pytest.raises(TrainingError, match="its max_position_embeddings is 128, and not 256"):
        exported.proven(exported.write("gguf-f16", folder), "gguf-f16")
