"""Cone attention in diffusers: it computes what the standard processor does, and saving keeps it."""

import copy
import json
import runpy
import subprocess
import sys
from pathlib import Path

import diffusers
import pytest
import torch
from diffusers.models.attention_processor import (
    Attention,
    AttnProcessor,
    AttnProcessor2_0,
    FusedAttnProcessor2_0,
    IPAdapterAttnProcessor2_0,
)
from torch import nn

import coneheads
from coneheads.integrations import diffusers as integration
from coneheads.integrations.diffusers import ConeAttnProcessor
from tests.integrations.diffusers_models import MODELS, REFUSED, conditional_unet, dit, pixart

ROOT = Path(__file__).parents[2]


class Mine(coneheads.Umbral):
    name = "mine"


every_model = pytest.mark.parametrize("name", sorted(MODELS))


def inputs_of(model):
    """The probe's inputs with random numbers, for a batch of two."""

    def filled(value):
        if isinstance(value, dict):
            return {name: filled(inner) for name, inner in value.items()}
        if not isinstance(value, torch.Tensor):
            return value
        value = value.expand(2, *value.shape[1:])
        return torch.randn_like(value) if value.is_floating_point() else value

    return filled(integration.inputs_for(model))


def converted(build, *arguments, **keywords):
    model = build().eval()
    coneheads.convert(model, *arguments, **keywords)
    return model


@every_model
def test_the_dot_product_gives_what_the_model_gave(name):
    model = MODELS[name]().eval()
    assert type(model).__name__ == name
    inputs = inputs_of(model)
    before, keys = model(**inputs)[0], model.state_dict().keys()
    done = coneheads.convert(model, "dot")
    assert done.probed
    assert len(done) == len([module for module in model.modules() if isinstance(module, Attention)])
    assert model.state_dict().keys() == keys
    torch.testing.assert_close(model(**inputs)[0], before, rtol=1e-5, atol=2e-6)


@every_model
@pytest.mark.parametrize("score", ["penumbral", "umbral"])
def test_cones_change_the_output_train_and_can_be_reverted(name, score):
    model = MODELS[name]().eval()
    inputs, config = inputs_of(model), dict(model.config)
    before = model(**inputs)[0]
    coneheads.convert(model, score, learn_gamma=True, learn_radius=True)
    after = model(**inputs)[0]
    assert (after - before).abs().max() > 1e-3
    after.square().mean().backward()
    learned = {name: p.grad for name, p in model.named_parameters() if ".processor.cone.log_" in name}
    assert len(learned) == 2 * len([module for module in model.modules() if isinstance(module, Attention)])
    assert all(gradient.isfinite().all() for gradient in learned.values())
    assert max(gradient.abs().max() for gradient in learned.values()) > 0
    coneheads.revert(model)
    assert torch.equal(model(**inputs)[0], before)
    assert dict(model.config) == config
    assert not any(".cone." in name for name in model.state_dict())
    assert all(isinstance(m.processor, AttnProcessor2_0) for m in model.modules() if isinstance(m, Attention))
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_models_with_attention_of_their_own_are_refused_by_name(name):
    with pytest.raises(ValueError, match=rf"no attention layer of {name} can be converted: .*attn"):
        coneheads.convert(REFUSED[name]())


@pytest.mark.parametrize(
    ("settings", "inputs"),
    [
        ({"scale_qk": False, "upcast_attention": True, "upcast_softmax": True}, {}),
        ({"qk_norm": "rms_norm", "bias": True, "out_bias": False}, {}),
        ({"norm_num_groups": 4, "residual_connection": True, "rescale_output_factor": 2.0}, {"image": True}),
        ({"spatial_norm_dim": 4, "residual_connection": True}, {"image": True, "temb": True}),
        ({"cross_attention_dim": 12, "cross_attention_norm": "layer_norm"}, {"encoder": True, "mask": True}),
        (
            {"cross_attention_dim": 12, "cross_attention_norm": "group_norm", "cross_attention_norm_num_groups": 4},
            {"encoder": True, "mask": True},
        ),
        ({"scale_qk": False, "cross_attention_dim": 12}, {"encoder": True, "mask": True}),
    ],
    ids=lambda value: "-".join(value) or "plain",
)
def test_all_that_stands_around_attention_is_kept(settings, inputs):
    layer = nn.Sequential(Attention(32, heads=2, dim_head=8, **settings))
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    x = torch.randn(2, 32, 4, 4) if inputs.get("image") else torch.randn(2, 6, 32)
    keywords = {}
    if inputs.get("encoder"):
        keywords["encoder_hidden_states"] = torch.randn(2, 5, 12)
    if inputs.get("mask"):
        keywords["attention_mask"] = torch.randn(2, 1, 5)
    if inputs.get("temb"):
        keywords["temb"] = torch.randn(2, 4, 2, 2)
    before = layer[0](x, **keywords)
    assert len(coneheads.convert(layer, "dot")) == 1
    torch.testing.assert_close(layer[0](x, **keywords), before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"processor": FusedAttnProcessor2_0()}, "FusedAttnProcessor2_0 is not one of the standard ones"),
        ({"added_kv_proj_dim": 8}, "added_kv_proj_dim would be ignored"),
        ({"kv_heads": 1}, "kv_heads would be ignored"),
        ({"is_causal": True}, "is_causal would be ignored"),
        ({"pre_only": True}, "pre_only would be ignored"),
        ({"qk_norm": "l2", "processor": AttnProcessor()}, "qk_norm would be ignored by its processor AttnProcessor"),
        ({"scale_qk": False, "processor": AttnProcessor2_0()}, "scale_qk=False would be ignored"),
    ],
)
def test_a_layer_that_cannot_be_converted_says_why(settings, reason):
    layer = nn.Sequential(Attention(16, heads=2, dim_head=8, **settings))
    with pytest.raises(ValueError, match=reason):
        coneheads.convert(layer)


@pytest.mark.parametrize("build", [conditional_unet, pixart])
def test_a_masked_token_of_the_text_has_no_influence(build):
    model = converted(build, "penumbral")
    inputs = inputs_of(model)
    mask = torch.tensor([[1, 0], [1, 1]])
    changed = inputs | {"encoder_hidden_states": inputs["encoder_hidden_states"] + mask.logical_not()[..., None] * 5.0}
    assert not torch.equal(model(**changed)[0], model(**inputs)[0])
    masked = [model(**given, encoder_attention_mask=mask)[0] for given in (inputs, changed)]
    assert torch.equal(*masked)
    assert not torch.equal(masked[0][0], model(**inputs)[0][0])


@pytest.mark.parametrize(
    ("replace", "name"),
    [
        (lambda model: model.set_attention_slice("max"), "SlicedAttnProcessor"),
        (lambda model: model.fuse_qkv_projections(), "FusedAttnProcessor2_0"),
        (lambda model: model.set_attn_processor(AttnProcessor()), "AttnProcessor"),
        (lambda model: model.set_attn_processor(IPAdapterAttnProcessor2_0(16, 12)), "IPAdapterAttnProcessor2_0"),
    ],
)
def test_a_processor_that_is_replaced_afterwards_is_an_error_until_revert(replace, name):
    model = converted(conditional_unet, "umbral")
    inputs = inputs_of(model)
    replace(model)
    with pytest.raises(RuntimeError, match=rf"replaced by {name} .*coneheads\.revert\(model\)"):
        model(**inputs)
    coneheads.revert(model)
    assert {type(m.processor).__name__ for m in model.modules() if isinstance(m, Attention)} == {name}
    assert integration.ENTRY not in model.config
    if name != "IPAdapterAttnProcessor2_0":
        model(**inputs)


def test_fused_projections_undone_give_the_cones_back():
    model = converted(conditional_unet, "umbral")
    inputs = inputs_of(model)
    before = model(**inputs)[0]
    model.fuse_qkv_projections()
    model.unfuse_qkv_projections()
    assert torch.equal(model(**inputs)[0], before)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"ip_adapter_masks": [torch.ones(1)]}, "does not honour ip_adapter_masks"),
        ({"strength": 0.5, "ip_hidden_states": 1}, "does not honour strength, ip_hidden_states"),
    ],
)
def test_cross_attention_kwargs_that_would_be_dropped_are_errors(given, text):
    model = converted(conditional_unet, "umbral")
    with pytest.raises(TypeError, match=text):
        model(**inputs_of(model), cross_attention_kwargs=given)
    model(**inputs_of(model), cross_attention_kwargs={"strength": None})


def test_converting_twice_names_revert_and_a_part_can_have_another_score():
    model = converted(dit, "umbral", where="*.0.*")
    coneheads.convert(model, "laplacian", where="*.1.*")
    assert [entry["score"] for entry in model.config[integration.ENTRY].values()] == ["umbral", "laplacian"]
    with pytest.raises(ValueError, match="revert"):
        coneheads.convert(model)


def test_gradient_checkpointing_gives_the_same_gradients():
    model = converted(dit, "penumbral", learn_gamma=True).train()
    inputs = inputs_of(model)
    gradients = []
    for _ in range(2):
        model.zero_grad()
        torch.manual_seed(0)  # a DiT drops labels while it trains
        model(**inputs)[0].square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
        model.enable_gradient_checkpointing()
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*gradients, strict=True))


def test_a_converted_dit_compiles_as_a_whole():
    model = converted(lambda: dit(num_layers=1), "penumbral", learn_gamma=True)
    inputs = inputs_of(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**inputs)[0], model(**inputs)[0])


def test_a_copy_is_converted_and_reverts_alone():
    model = converted(dit, "umbral")
    twin, inputs = copy.deepcopy(model), inputs_of(model)
    coneheads.revert(twin)
    assert not torch.equal(twin(**inputs)[0], model(**inputs)[0])
    assert isinstance(model.transformer_blocks[0].attn1.processor, ConeAttnProcessor)


def test_half_precision_runs():
    model = converted(lambda: dit().to(torch.bfloat16), "umbral", learn_gamma=True)
    out = model(**inputs_of(model))[0]
    assert out.dtype == torch.bfloat16
    assert out.isfinite().all()


# ---- saving

LOADED_ELSEWHERE = """
import sys, torch, diffusers
folder, loaded = sys.argv[1], {}
def load():
    for kind, name in ((diffusers.DiTTransformer2DModel, "dit"), (diffusers.DiTPipeline, "pipeline")):
        try:
            loaded[name] = kind.from_pretrained(folder + "/" + name)
        except ValueError as error:
            print(error)
load()
assert not loaded and "coneheads" not in sys.modules
from coneheads.integrations.diffusers import register
register()
register()
load()
diffusers.DiTPipeline.from_pretrained(folder + "/plain")
saved = torch.load(folder + "/expected.pt")
drawn = loaded["pipeline"]([1], generator=torch.manual_seed(0), **saved["call"]).images
print(torch.equal(loaded["dit"](**saved["inputs"])[0], saved["dit"]))
print(torch.equal(torch.from_numpy(drawn), saved["drawn"]))
"""
# guidance would add the class 1000, which only the ImageNet model has
CALL = {"num_inference_steps": 2, "guidance_scale": 1.0, "output_type": "np"}


def pipeline_of(model):
    pipeline = diffusers.DiTPipeline(model.eval(), MODELS["AutoencoderKL"]().eval(), diffusers.DDIMScheduler())
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A trained model on its own and a converted one in a pipeline, and what they give."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("saved")
    model = converted(dit, "umbral", where="*.1.*", learn_gamma=True, learn_radius=True)
    inputs = inputs_of(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(**inputs)[0].square().mean().backward()
        optimizer.step()
    model.save_pretrained(folder / "dit")
    pipeline = pipeline_of(dit(out_channels=8))
    pipeline.save_pretrained(folder / "plain")
    coneheads.convert(pipeline.transformer, "penumbral")
    coneheads.convert(pipeline.vae, "laplacian")
    pipeline.save_pretrained(folder / "pipeline")
    drawn = torch.from_numpy(pipeline([1], generator=torch.manual_seed(0), **CALL).images)
    expected = {"inputs": inputs, "dit": model(**inputs)[0].detach(), "call": CALL, "drawn": drawn}
    torch.save(expected, folder / "expected.pt")
    return folder, model, inputs


def test_a_new_process_is_told_what_to_do_and_then_gives_the_same_bits(saved):
    threads = (
        f"import torch\ntorch.set_num_threads({torch.get_num_threads()})\n"  # they decide how products are rounded
    )
    program = [sys.executable, "-c", threads + LOADED_ELSEWHERE, str(saved[0])]
    run = subprocess.run(program, capture_output=True, text=True, cwd=ROOT)
    refused_model, refused_pipeline, *identical = run.stdout.splitlines()
    for text in (refused_model, refused_pipeline):
        assert "this model has cone attention; install coneheads and run" in text
        assert "from coneheads.integrations.diffusers import register; register()" in text
    assert identical == ["True", "True"], run.stdout + run.stderr
    assert "ignored" not in run.stderr


def test_what_was_learned_is_loaded_and_can_be_reverted(saved):
    folder, model, inputs = saved
    loaded = diffusers.DiTTransformer2DModel.from_pretrained(folder / "dit")
    learned = loaded.transformer_blocks[1].attn1.processor.cone
    start = converted(dit, "umbral", learn_gamma=True).transformer_blocks[1].attn1.processor.cone
    assert not torch.allclose(learned.log_gamma, start.log_gamma)
    assert torch.equal(loaded(**inputs)[0], model(**inputs)[0])
    assert "quantization_config" not in loaded.config
    assert not getattr(loaded, "is_quantized", False)
    assert coneheads.revert(loaded) == ["transformer_blocks.1.attn1"]
    assert not set(loaded.state_dict()) - set(dit().state_dict())
    assert integration.ENTRY not in loaded.config


class Own(diffusers.ModelMixin, diffusers.ConfigMixin):
    """A user's model around PyTorch's encoder, saved by diffusers."""

    @diffusers.configuration_utils.register_to_config
    def __init__(self, width=16):
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x, padding=None):
        return self.encoder(x, src_key_padding_mask=padding)


def test_multihead_attention_inside_a_model_of_diffusers_survives_saving(tmp_path):
    model, x = Own().eval(), torch.randn(2, 4, 16)
    coneheads.convert(model, "umbral", where="*.1.*", learn_gamma=True, probe=x)
    model.save_pretrained(tmp_path)
    assert "this model has cone attention" in (tmp_path / "config.json").read_text()
    loaded, padding = Own.from_pretrained(tmp_path), torch.arange(4).expand(2, -1) > 2
    with torch.no_grad():
        torch.testing.assert_close(loaded(x, padding), model(x, padding), rtol=0, atol=1e-6)
    assert coneheads.revert(loaded) == ["encoder.layers.1.self_attn"]
    assert integration.ENTRY not in loaded.config
    loaded.save_pretrained(tmp_path)
    assert "cone" not in (tmp_path / "config.json").read_text()


@pytest.mark.parametrize("how", [{"low_cpu_mem_usage": False}, {"torch_dtype": torch.bfloat16}])
def test_options_of_loading_work(saved, how):
    loaded = diffusers.DiTTransformer2DModel.from_pretrained(saved[0] / "dit", **how).float()
    torch.testing.assert_close(loaded(**saved[2])[0], saved[1](**saved[2])[0], atol=0.05, rtol=0.05)


def test_saving_again_and_after_revert_writes_what_is_there(saved, tmp_path):
    loaded = diffusers.DiTTransformer2DModel.from_pretrained(saved[0] / "dit")
    loaded.save_pretrained(tmp_path / "again", max_shard_size="10KB")
    sharded = diffusers.DiTTransformer2DModel.from_pretrained(tmp_path / "again")
    assert torch.equal(sharded(**saved[2])[0], saved[1](**saved[2])[0])
    again = json.loads((tmp_path / "again/config.json").read_text())
    once = json.loads((saved[0] / "dit/config.json").read_text())
    assert again["quantization_config"] == once["quantization_config"] == integration.GUARD
    assert again[integration.ENTRY] == once[integration.ENTRY]
    coneheads.revert(loaded)
    loaded.save_pretrained(tmp_path / "reverted")
    reverted = json.loads((tmp_path / "reverted/config.json").read_text())
    assert not {integration.ENTRY, "quantization_config"} & set(reverted)


def test_a_config_in_memory_builds_the_same_attention():
    model = converted(conditional_unet, "umbral", learn_gamma=True)
    twin = type(model).from_config(model.config).eval()
    twin.load_state_dict(model.state_dict())
    inputs = inputs_of(model)
    assert torch.equal(twin(**inputs)[0], model(**inputs)[0])


def test_the_path_of_a_config_builds_the_same_attention(saved):
    with pytest.warns(FutureWarning, match="from_config"):  # deprecated in diffusers, but it works
        built = diffusers.DiTTransformer2DModel.from_config(saved[0] / "dit")
    assert isinstance(built.transformer_blocks[1].attn1.processor, ConeAttnProcessor)


def test_a_model_of_which_only_a_part_was_given_to_convert_is_saved_with_it(tmp_path):
    model = conditional_unet().eval()
    coneheads.convert(model.mid_block, "umbral")
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    inputs = inputs_of(model)
    assert torch.equal(loaded(**inputs)[0], model(**inputs)[0])
    assert list(loaded.config[integration.ENTRY]) == [
        f"mid_block.attentions.0.transformer_blocks.0.attn{n}" for n in (1, 2)
    ]


def test_a_score_of_the_users_own_runs_but_is_not_saved(tmp_path):
    model = converted(dit, Mine())
    model(**inputs_of(model))
    with pytest.raises(ValueError, match="Mine is not one of coneheads' own"):
        model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="Mine"):
        type(model).from_config(model.config)


def test_a_quantized_model_is_refused_as_it_could_not_be_saved():
    model = dit()
    model.register_to_config(quantization_config={"quant_method": "quanto"})
    with pytest.raises(ValueError, match="the model is quantized"):
        coneheads.convert(model)


@pytest.mark.parametrize(
    "model",
    [lambda: conditional_unet(num_class_embeds=3), lambda: conditional_unet(attention_type="gated")],
    ids=["classes", "gated"],
)
def test_a_model_that_wants_more_inputs_is_converted_without_a_probe(model):
    assert not coneheads.convert(model(), "umbral").probed


def test_pixart_for_large_images_is_probed_with_their_size():
    assert coneheads.convert(pixart(sample_size=128, attention_head_dim=12, cross_attention_dim=24), "umbral").probed


def test_the_example_runs(capsys):
    runpy.run_path(str(ROOT / "examples/dit.py"), run_name="__main__")
    printed = capsys.readouterr().out
    losses = [float(line.split()[-1]) for line in printed.splitlines() if line.startswith("step")]
    assert losses[-1] < 0.3 * losses[0]
    assert len((ROOT / "examples/dit.py").read_text().splitlines()) < 60
