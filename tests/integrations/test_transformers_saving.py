"""Saving and loading models of transformers with cone attention: the same numbers, or an error that says what to do."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    CLIPModel,
    CLIPTextModel,
    LlamaForCausalLM,
    LlamaModel,
    PreTrainedConfig,
    PreTrainedModel,
    SiglipVisionConfig,
    SiglipVisionModel,
    Trainer,
    TrainingArguments,
)

from coneheads import Umbral
from coneheads.integrations.conversion import convert, revert
from coneheads.integrations.transformers import ADVICE, inputs_for, register
from coneheads.nn import ConeAttention, ConeMultiheadAttention
from tests.integrations.transformers_models import MODELS

SAVED = ["LlamaForCausalLM", "CLIPModel", "T5ForConditionalGeneration", "MarianMTModel", "SwinForImageClassification"]
TOKENS = torch.tensor([[3, 14, 15, 9, 26, 5, 35], [8, 9, 7, 9, 3, 23, 8]])


@pytest.fixture(autouse=True)
def _registered():
    register()


def learned(name: str, score: object = "umbral", **how: object) -> PreTrainedModel:
    """A converted model with a gamma of its own in every head of every layer."""
    model = MODELS[name]()
    convert(model, score, learn_gamma=True, **how)
    with torch.no_grad():
        for cone in (module for module in model.modules() if isinstance(module, ConeAttention)):
            cone.log_gamma.copy_(torch.linspace(-1, 1, cone.heads) + torch.rand(()))
    return model


def aligned(model: PreTrainedModel) -> PreTrainedModel:
    """The model with its weights copied: those of a file lie wherever it has them, which changes how torch rounds."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def same(first: PreTrainedModel, second: PreTrainedModel) -> bool:
    given = inputs_for(first)
    with torch.no_grad():
        one, other = aligned(first)(**given), aligned(second)(**given)
    return torch.equal(one[0], other[0]) and all(map(torch.equal, first.parameters(), second.parameters()))


@pytest.mark.parametrize("name", SAVED)
def test_a_converted_model_survives_saving_twice(name, tmp_path):
    model = learned(name)
    model.save_pretrained(tmp_path / "once")
    once = getattr(transformers, name).from_pretrained(tmp_path / "once")
    once.save_pretrained(tmp_path / "twice")
    twice = getattr(transformers, name).from_pretrained(tmp_path / "twice")
    assert same(model, once)
    assert same(model, twice)
    assert once.config._attn_implementation == "coneheads"
    before = MODELS[name]()
    before.load_state_dict({key: value for key, value in model.state_dict().items() if ".cone." not in key})
    assert len(revert(twice)) == sum(isinstance(module, ConeAttention) for module in model.modules())
    assert same(twice, before)
    twice.save_pretrained(tmp_path / "plain")
    assert "coneheads" not in (tmp_path / "plain" / "config.json").read_text()


def test_a_new_process_gives_identical_outputs_and_without_register_an_error_that_says_what_to_do(tmp_path):
    names = ["LlamaForCausalLM", "T5ForConditionalGeneration", "CLIPModel"]
    for name in names:
        model = learned(name, "penumbral")
        model.save_pretrained(tmp_path / name)
        with torch.no_grad():
            torch.save(model(**inputs_for(model))[0], tmp_path / f"{name}.pt")
    program = f"""
import torch, transformers
torch.set_num_threads({torch.get_num_threads()})  # which decides how products are rounded
for name in {names}:
    for loader in (getattr(transformers, name), transformers.AutoModel):
        try:
            loader.from_pretrained(rf"{tmp_path}/{{name}}")
        except ValueError as error:
            assert {ADVICE!r} in str(error), error
        else:
            raise AssertionError("loaded without coneheads")
from coneheads.integrations.transformers import register, inputs_for
register()
for name in {names}:
    model = getattr(transformers, name).from_pretrained(rf"{tmp_path}/{{name}}")
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    with torch.no_grad():
        assert torch.equal(model(**inputs_for(model))[0], torch.load(rf"{tmp_path}/{{name}}.pt")), name
print("the same")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.endswith("the same\n"), done.stderr


def test_the_learned_gamma_is_an_ordinary_weight_and_the_config_is_readable(tmp_path):
    model = learned("LlamaForCausalLM", Umbral(radius=0.3), where="*.1.*")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["attn_implementation"] == "coneheads" + ADVICE
    layers = config["coneheads"]["layers"]
    assert layers["model.layers.0.self_attn"] is None
    assert layers["model.layers.1.self_attn"]["config"]["radius"] == 0.3
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert same(model, loaded)
    assert [key for key in loaded.state_dict() if "cone" in key] == ["model.layers.1.self_attn.cone.log_gamma"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_base_model_comes_out_of_a_checkpoint_with_a_head_and_back(dtype, tmp_path):
    learned("LlamaForCausalLM").save_pretrained(tmp_path / "first")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "first", dtype=dtype)
    model.save_pretrained(tmp_path / "head")
    base = LlamaModel.from_pretrained(tmp_path / "head", dtype=dtype)
    assert same(model.model, base)
    assert base.layers[0].self_attn.cone.log_gamma.dtype == dtype
    base.save_pretrained(tmp_path / "base")
    head = LlamaForCausalLM.from_pretrained(tmp_path / "base", dtype=dtype)
    assert same(base, head.model)
    head.save_pretrained(tmp_path / "again")
    assert same(head, LlamaForCausalLM.from_pretrained(tmp_path / "again", dtype=dtype))


def test_another_head_on_the_same_body(tmp_path):
    model = learned("BertForMaskedLM")
    model.save_pretrained(tmp_path)
    classifier = BertForSequenceClassification.from_pretrained(tmp_path)
    assert torch.equal(classifier.bert(TOKENS)[0], model.bert(TOKENS)[0])
    assert torch.equal(BertModel.from_pretrained(tmp_path, add_pooling_layer=False)(TOKENS)[0], model.bert(TOKENS)[0])


def test_a_part_of_a_composite_model_alone_raises_instead_of_running_another_attention(tmp_path):
    learned("CLIPModel").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="CLIPAttention runs 'coneheads' but has no ConeAttention"):
        CLIPTextModel.from_pretrained(tmp_path)(TOKENS)


@pytest.mark.parametrize("set_late", [False, True])
def test_an_implementation_by_name_survives_saving(set_late, tmp_path):
    model = MODELS["LlamaForCausalLM"]()
    model.save_pretrained(tmp_path / "plain")
    assert "coneheads" not in (tmp_path / "plain" / "config.json").read_text()
    if set_late:
        model.set_attn_implementation("coneheads_laplacian")
    else:
        model = LlamaForCausalLM.from_pretrained(tmp_path / "plain", attn_implementation="coneheads_laplacian")
    model.save_pretrained(tmp_path / "cone")
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "cone")
    assert loaded.config._attn_implementation == "coneheads_laplacian"
    assert same(model, loaded)
    assert not torch.equal(LlamaForCausalLM.from_pretrained(tmp_path / "plain")(TOKENS)[0], model(TOKENS)[0])


def test_an_implementation_of_one_part_survives_saving(tmp_path):
    model = MODELS["CLIPModel"]()
    model.set_attn_implementation({"text_config": "coneheads_umbral", "vision_config": "sdpa"})
    model.save_pretrained(tmp_path)
    loaded = CLIPModel.from_pretrained(tmp_path)
    assert loaded.config.text_config._attn_implementation == "coneheads_umbral"
    assert loaded.config.vision_config._attn_implementation == "sdpa"
    assert same(model, loaded)


def test_who_asks_for_sdpa_gets_it(tmp_path):
    model = learned("BertForMaskedLM")
    model.save_pretrained(tmp_path)
    loaded = BertForMaskedLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    revert(model)
    assert same(model, loaded)
    loaded.save_pretrained(tmp_path / "again")
    assert "coneheads" not in (tmp_path / "again" / "config.json").read_text()


class OwnConfig(PreTrainedConfig):
    model_type = "own"


class Own(PreTrainedModel):
    """A user's model around PyTorch's encoder; its class does not ask transformers' interface for attention."""

    config_class = OwnConfig
    _can_set_attn_implementation_cached_value = False

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        layer = nn.TransformerEncoderLayer(16, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.built = ConeMultiheadAttention(16, 2, batch_first=True, qk_dim=3)
        self.post_init()

    def forward(self, inputs_embeds: torch.Tensor, padding: torch.Tensor | None = None) -> tuple[torch.Tensor]:
        x = self.encoder(inputs_embeds, src_key_padding_mask=padding)
        return (self.built(x, x, x)[0],)


@pytest.mark.parametrize("converted", [False, True])
def test_layers_of_torch_in_a_model_of_ones_own_survive_saving(converted, tmp_path):
    model = Own(OwnConfig()).eval()
    given = {"inputs_embeds": torch.randn(2, 4, 16)}
    if converted:
        convert(model, "umbral", learn_gamma=True, where="*.1.*", probe=dict(given))
        given["padding"] = torch.arange(4).expand(2, -1) > 2
    model.save_pretrained(tmp_path)
    loaded = Own.from_pretrained(tmp_path)
    assert not loaded.training
    with torch.no_grad():
        torch.testing.assert_close(loaded(**given)[0], model(**given)[0], rtol=0, atol=1e-6)
    assert all(map(torch.equal, model.parameters(), loaded.parameters()))
    text = (tmp_path / "config.json").read_text()
    assert ("coneheads beside sdpa" + ADVICE in text or "coneheads beside eager" + ADVICE in text) == converted
    assert loaded.config._attn_implementation == model.config._attn_implementation != "coneheads"
    if converted:
        assert revert(loaded) == ["encoder.layers.1.self_attn"]
        loaded.save_pretrained(tmp_path)
        assert "coneheads" not in (tmp_path / "config.json").read_text()
        assert type(loaded.built) is ConeMultiheadAttention


@pytest.mark.parametrize("where", [None, "head.*", "encoder.*"])
def test_the_multihead_attention_inside_a_model_of_transformers_survives_saving(where, tmp_path):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32}
    model = SiglipVisionModel(SiglipVisionConfig(**sizes, image_size=8, patch_size=4)).eval()
    report = convert(model, "umbral", where, learn_gamma=True)
    assert len(report.found) == 2
    image = torch.randn(2, 3, 8, 8)
    model.save_pretrained(tmp_path)
    loaded = SiglipVisionModel.from_pretrained(tmp_path)
    want, got = (aligned(each)(image).pooler_output for each in (model, loaded))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)
    learned = {key for key in loaded.state_dict() if "cone" in key}
    assert learned == {f"{layer.name}.cone.log_gamma" for layer in report.swapped}
    if where is not None:  # the other one can be converted later
        assert len(convert(loaded, "penumbral")) == 1
        assert len(loaded.config.coneheads["layers"]) == len(loaded.config.coneheads["others"]) == 1
    assert len(revert(loaded)) == 2
    assert not hasattr(loaded.config, "coneheads")
    assert loaded.config._attn_implementation == "sdpa"


def test_trainer_learns_gamma_and_its_checkpoint_loads(tmp_path: Path):
    model = MODELS["LlamaForCausalLM"]()
    convert(model, "umbral", learn_gamma=True)
    before = model.model.layers[0].self_attn.cone.log_gamma.clone()
    data = [{"input_ids": row, "labels": row} for row in TOKENS.repeat(4, 1)]
    steps = {"max_steps": 4, "save_steps": 2, "logging_steps": 1, "per_device_train_batch_size": 2}
    quiet = {"report_to": [], "disable_tqdm": True, "dataloader_pin_memory": False}
    how = TrainingArguments(tmp_path, learning_rate=1e-2, use_cpu=True, **steps, **quiet)
    trainer = Trainer(model, how, train_dataset=data)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert (model.model.layers[0].self_attn.cone.log_gamma != before).all()
    assert same(model.eval(), LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-4"))
