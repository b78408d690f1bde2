"""timm's models with cone attention: built with ``attn_layer=``, and converted. Runs where timm is installed."""

import copy
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.integrations import timm_models, torchvision_schema

torchvision_schema.define()

import timm  # noqa: E402
import transformers  # noqa: E402
from timm.layers import Attention, AttentionRope, set_fused_attn  # noqa: E402
from timm.models import create_feature_extractor  # noqa: E402
from timm.models.eva import EvaAttention  # noqa: E402
from timm.utils import AttentionExtract  # noqa: E402

from coneheads import Umbral, attention_weights  # noqa: E402
from coneheads.integrations.conversion import convert, revert  # noqa: E402
from coneheads.integrations.timm import ConeVisionAttention, attention_layer, find, inputs_for  # noqa: E402
from coneheads.nn import ConeAttention  # noqa: E402

ROOT = Path(__file__).parents[2]
CONES = ("penumbral", "umbral")


def lively(model):
    """The model in eval mode with weights so large that a change of the attention is seen in the logits."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.ndim > 1 else 0.1) + (parameter.ndim == 1))
    return model.eval()


def small(name="vit_tiny_patch16_224", **others):
    return lively(timm_models.build(name, **(timm_models.SMALL | others)))


def image(count=2, channels=3):
    return torch.randn(count, channels, 32, 32)


def cones_of(model):
    return [module for module in model.modules() if isinstance(module, ConeAttention)]


def with_fused(model, fused):
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = fused
    return model


@pytest.fixture(params=timm_models.MODELS)
def model(request):
    torch.manual_seed(1)  # a draw in which no model magnifies roundings
    return lively(timm_models.MODELS[request.param]())


@pytest.mark.parametrize("fused", [True, False])
@torch.no_grad()
def test_dot_product_gives_the_logits_of_timm(model, fused):
    x = image()
    before = with_fused(model, fused)(x)
    report = convert(model, "dot")
    assert report.probed
    assert len(report) == len(cones_of(model)) >= 2
    assert not report.skipped
    torch.testing.assert_close(model(x), before, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("score", CONES)
def test_cones_change_the_logits_train_and_are_undone_exactly(model, score):
    x, before = image(), copy.deepcopy(model)
    weights = dict(model.named_parameters())
    with torch.no_grad():
        logits = model(x)
        convert(model, score)
        assert (model(x) - logits).abs().max() > 1e-2
        fused, plain = model(x), with_fused(model, False)(x)
        torch.testing.assert_close(plain, fused, atol=1e-4, rtol=1e-4)
    with_fused(model, True).train()
    model(x).square().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    reached = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert {name for name in weights if "attn" in name and "weight" in name} <= reached
    model.eval()
    revert(model)
    assert str(model) == str(before)
    assert all(parameter is weights[name] for name, parameter in model.named_parameters())
    with torch.no_grad():
        assert torch.equal(model(x), logits)


def test_state_dict_is_that_of_timm_both_ways(model):
    plain = copy.deepcopy(model)
    convert(model, "penumbral")
    assert list(model.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(lively(model).state_dict())
    convert(plain, "penumbral")
    with torch.no_grad():
        x = image()
        assert torch.equal(plain(x), model(x))


@pytest.mark.parametrize("name", timm_models.VISION)
@pytest.mark.parametrize("score", ["dot", *CONES])
def test_a_model_built_with_attn_layer_is_the_converted_one(name, score):
    converted = lively(timm_models.VISION[name]())
    built = timm_models.VISION[name](attn_layer=attention_layer(score)).eval()
    built.load_state_dict(converted.state_dict())
    assert len(cones_of(built)) == len(convert(converted, score))
    assert str(built) == str(converted)
    with torch.no_grad():
        x = image()
        assert torch.equal(built(x), converted(x))


def test_every_argument_of_the_layer_is_honoured():
    """Both ways of timm to build the layer: gate, heads of another size, another output, norms, no bias, dtype."""
    sizes = {"num_heads": 2, "attn_head_dim": 8, "dim_out": 12, "gated": True, "qk_norm": True, "scale_norm": True}
    kind = {"norm_layer": nn.LayerNorm, "qkv_bias": True, "proj_bias": False, "dtype": torch.float64}
    layer = Attention(20, **sizes, **kind)
    built = attention_layer("dot", learn_gamma=True)(20, **sizes, **kind)
    assert built.cone.log_gamma.dtype == torch.float64
    built.load_state_dict(lively(layer).state_dict(), strict=False)
    x = torch.randn(2, 7, 20, dtype=torch.float64)
    torch.testing.assert_close(built.eval()(x), layer(x))


@pytest.mark.parametrize("kind", [Attention, AttentionRope, EvaAttention])
@pytest.mark.parametrize("fused", [True, False])
def test_masks_gate_and_scale_are_those_of_timm(kind, fused):
    x, mask = torch.randn(2, 7, 32), torch.rand(2, 1, 7, 7) > 0.4
    mask[..., 0] = True
    calls = [{"is_causal": True}, {"attn_mask": mask}, {"attn_mask": torch.randn(7, 7)}]
    layer = lively(kind(32, num_heads=2, gated=True, scale_norm=False))
    with_fused(layer, fused).scale = 0.7
    expected = [layer(x, **call) for call in calls]
    convert(layer, "dot", probe=x)
    for call, wanted in zip(calls, expected, strict=True):
        torch.testing.assert_close(layer(x, **call), wanted, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="is_causal"):
        layer(x, attn_mask=mask, is_causal=True)


@pytest.mark.parametrize("separate", [True, False])
def test_biases_of_eva_are_added(separate):
    layer = lively(EvaAttention(32, num_heads=2, qkv_bias_separate=separate, scale_norm=False))
    x = torch.randn(2, 7, 32)
    expected = layer(x)
    convert(layer, "dot", probe=x)
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("fused", [True, False])
def test_attention_dropout_acts_in_training_only(fused):
    model = with_fused(small(attn_drop_rate=0.5), fused)
    convert(model, "penumbral")
    x = image()
    assert torch.equal(model(x), model(x))
    model.train()
    assert not torch.allclose(model(x), model(x))


def test_learned_numbers_are_in_the_state_dict_and_learn():
    model = small()
    convert(model, "umbral", learn_gamma=True, learn_radius=True)
    built = timm_models.build(
        "vit_tiny_patch16_224",
        **timm_models.SMALL,
        attn_layer=attention_layer("umbral", learn_gamma=True, learn_radius=True),
    )
    extra = [f"blocks.{i}.attn.cone.log_{name}" for i in range(2) for name in ("gamma", "radius")]
    assert [name for name in model.state_dict() if "cone" in name] == extra
    model(image()).square().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert all(gradients[name].shape == (2,) and (gradients[name] != 0).all() for name in extra)
    built.load_state_dict(model.state_dict())
    with torch.no_grad():
        model.blocks[1].attn.cone.log_gamma += 0.5
        x = image()
        assert not torch.allclose(built.eval()(x), model(x))


def test_where_chooses_layers_and_a_second_call_takes_others():
    model = small(depth=3)
    report = convert(model, "penumbral", where="blocks.[01].attn")
    assert [layer.name for layer in report.swapped] == ["blocks.0.attn", "blocks.1.attn"]
    assert [layer.name for layer in report.skipped] == ["blocks.2.attn"]
    assert type(model.blocks[2].attn) is Attention
    convert(model, Umbral(gamma=0.3), where=lambda name: name == "blocks.2.attn")
    assert [cone.base.name for cone in cones_of(model)] == ["penumbral", "penumbral", "umbral"]
    with pytest.raises(ValueError, match=r"'blocks\.2\.attn' .* it has the score 'umbral' already: call revert"):
        convert(model)
    assert revert(model) == [f"blocks.{i}.attn" for i in range(3)]
    assert not cones_of(model)
    with pytest.raises(ValueError, match=r"matches no attention layer .*'blocks\.2\.attn'"):
        convert(model, where="layers.*")


def test_a_failed_second_call_leaves_the_layers_of_the_first():
    model = small()
    convert(model, "penumbral", where="blocks.0.*")
    with pytest.raises(RuntimeError, match="probe"):
        convert(model, "umbral", probe=image(channels=5))
    assert [cone.base.name for cone in cones_of(model)] == ["penumbral"]


@pytest.mark.parametrize("name", timm_models.REFUSED)
def test_models_with_scores_of_their_own_are_refused_by_name(name):
    model = timm_models.REFUSED[name]().eval()
    before, x = str(model), image(1)
    with torch.no_grad():
        logits = model(x)
        with pytest.raises(ValueError, match=r"can be converted: .* of timm's, convert knows timm"):
            convert(model)
        assert str(model) == before
        assert torch.equal(model(x), logits)


def test_a_block_around_attention_is_no_layer_unless_it_computes_the_scores():
    names = {name: [layer.name for layer in find(build(), None)] for name, build in timm_models.REFUSED.items()}
    assert names["cait_xxs24_224"] == ["blocks.0.attn", "blocks_token_only.0.attn", "blocks_token_only.1.attn"]
    assert names["xcit_nano_12_p16_224"] == ["blocks.0.attn", "cls_attn_blocks.0.attn", "cls_attn_blocks.1.attn"]
    assert names["vit_base_patch16_xp_224"] == ["blocks.0", "blocks.1"]


def test_swin_ignores_attn_layer_and_is_refused_then():
    model = timm_models.REFUSED["swin_tiny_patch4_window7_224"](attn_layer=attention_layer())
    assert not cones_of(model)
    with pytest.raises(ValueError, match="WindowAttention"):
        convert(model)


def test_attention_that_is_left_beside_converted_layers_is_reported():
    model = small("vit_base_patch16_siglip_224")
    report = convert(model)
    assert len(report) == 2
    assert [layer.name for layer in report.skipped] == ["attn_pool"]
    assert "AttentionPoolLatent" in report.skipped[0].kind


def test_a_subclass_with_code_of_its_own_is_left():
    class Own(Attention):
        pass

    model = small(attn_layer=Own)
    assert all(layer.why_not for layer in find(model, None))


def test_a_forward_that_hides_the_layer_is_seen_by_the_probe():
    model = small()
    layer = model.blocks[1].attn
    layer.forward = Attention.forward.__get__(layer)
    with pytest.raises(RuntimeError, match=r"did not call the new attention in 'blocks.1.attn'"):
        convert(model)
    assert not cones_of(model)


@pytest.mark.parametrize("sizes", [{"in_chans": 1}, {"img_size": (32, 16)}, {"dynamic_img_size": True}])
def test_the_probe_fits_the_model(sizes):
    model = small(**sizes)
    assert convert(model).probed
    (x,) = inputs_for(model)[""]
    assert x.shape == (1, sizes.get("in_chans", 3), *timm.layers.to_2tuple(sizes.get("img_size", 32)))


def test_a_part_of_a_model_of_ones_own_converts_without_a_probe():
    whole = nn.Sequential(nn.Identity(), small())
    report = convert(whole)
    assert [layer.name for layer in report.swapped] == ["1.blocks.0.attn", "1.blocks.1.attn"]
    assert not report.probed
    revert(whole)
    assert convert(whole, probe=image()).probed


def test_unknown_arguments_raise():
    with pytest.raises(TypeError, match="temperature"):
        attention_layer("penumbral", temperature=2.0)
    with pytest.raises(TypeError, match="depth"):
        attention_layer()(32, num_heads=2, depth=3)
    with pytest.raises(ValueError, match="penumbra"):
        small(attn_layer=attention_layer("penumbra"))
    with pytest.raises(ValueError, match="learn_radius"):
        small(attn_layer=attention_layer("dot", learn_radius=True))
    with pytest.raises(TypeError, match="rope"):
        small(attn_layer=attention_layer()).blocks[0].attn(torch.randn(1, 5, 32), rope=torch.randn(4, 16))


def test_torchscript_is_refused_with_a_sentence():
    with pytest.raises(ValueError, match="scriptable=True: cone attention cannot become TorchScript"):
        small(attn_layer=attention_layer(), scriptable=True)
    model = small(scriptable=True)
    convert(model)
    # torch.jit announces its own end; that is not what is tested here
    with pytest.warns(DeprecationWarning, match=r"torch\.jit"), pytest.raises(TypeError, match="become TorchScript"):
        torch.jit.script(model)


def test_features_work_in_all_of_timms_ways():
    x = image()
    model = small(attn_layer=attention_layer("umbral"))
    layers = small(features_only=True, out_indices=(0, 1))
    assert convert(layers, "umbral").probed
    layers.model.load_state_dict(model.state_dict(), strict=False)
    with torch.no_grad():
        _, wanted = model.forward_intermediates(x)
        for feature, expected in zip(layers(x), wanted, strict=True):
            assert torch.equal(feature, expected)
        nodes = create_feature_extractor(model, ["blocks.1.attn.proj", "head"])(x)
        assert torch.equal(nodes["head"], model(x))
        assert torch.equal(model.forward_head(model.forward_features(x)), model(x))


def test_timm_extracts_the_weights_of_the_cones():
    set_fused_attn(False)  # what timm tells to do before attention maps are extracted
    try:
        model = small(attn_layer=attention_layer("umbral"))
    finally:
        set_fused_attn(True)
    maps = AttentionExtract(model, method="hook")
    seen = []
    handle = model.blocks[0].attn.cone.register_forward_pre_hook(lambda _, args: seen.append(args[:2]))
    with torch.no_grad():
        weights = maps(image())
    handle.remove()
    assert list(weights) == ["blocks.0.attn.attn_drop", "blocks.1.attn.attn_drop"]
    expected = attention_weights(*seen[0], score=model.blocks[0].attn.cone.score())
    torch.testing.assert_close(weights["blocks.0.attn.attn_drop"], expected)


def test_compiled_whole_it_gives_the_same():
    model = small()
    convert(model, "penumbral", learn_gamma=True)
    x = image()
    expected = model(x)
    gradients = torch.autograd.grad(expected.square().sum(), list(model.parameters()))
    # Without inductor, which takes half a minute: the operator itself is compiled in tests/test_compile.py.
    logits = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)
    compiled = torch.autograd.grad(logits.square().sum(), list(model.parameters()))
    torch.testing.assert_close(compiled, gradients, atol=1e-3, rtol=1e-3)


def test_copies_are_independent():
    model = small(attn_layer=attention_layer("penumbral", learn_gamma=True))
    assert {type(block.attn) for block in model.blocks} == {ConeVisionAttention}
    twin, x = copy.deepcopy(model), image()
    assert torch.equal(twin(x), model(x))
    revert(twin)
    assert len(cones_of(model)) == 2


def run(code, *arguments):
    """Runs Python code in a process of its own, where torchvision can be imported."""
    first = "from tests.integrations.torchvision_schema import define; define()\n"
    first += (
        f"import torch; torch.set_num_threads({torch.get_num_threads()})\n"  # which decides how products are rounded
    )
    command = [sys.executable, "-c", first + code, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@torch.no_grad()
def test_saved_whole_it_gives_identical_outputs_in_a_new_process(tmp_path):
    x = image()
    models = [
        small(attn_layer=attention_layer("umbral", learn_gamma=True)),
        lively(timm_models.MODELS["eva02_tiny_patch14_224"]()),
        lively(timm_models.MODELS["vit_base_patch16_sapiens2"]()),
    ]
    for model in models[1:]:
        convert(model, "penumbral", learn_gamma=True, learn_radius=True)
    torch.save((models, x), tmp_path / "models.pt")
    code = """
import sys, torch
models, x = torch.load(sys.argv[1], weights_only=False)
torch.save([model(x) for model in models], sys.argv[2])
"""
    run(code, tmp_path / "models.pt", tmp_path / "logits.pt")
    for model, logits in zip(models, torch.load(tmp_path / "logits.pt"), strict=True):
        assert torch.equal(model(x), logits)


def test_the_lines_in_the_docs_run():
    text = (ROOT / "docs/integrations.md").read_text()
    (block,) = [
        block for block in re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.M) if "import timm" in block
    ]
    run(block + "\nassert isinstance(other.blocks[0].attn, coneheads.integrations.timm.ConeVisionAttention)")


def test_the_example_learns():
    lines = run("import runpy; runpy.run_path('examples/vit.py', run_name='__main__')").splitlines()
    shares = [[int(word[:-1]) for word in line.split() if word.endswith("%")] for line in lines]
    assert len(shares) == 3
    assert all(after > 75 and after > before + 20 for before, after in shares)


def transformers_weights(weights, prefix):
    """The state dict of transformers' ViT or DeiT, from that of timm's."""
    places = {
        "cls_token": f"{prefix}.embeddings.cls_token",
        "dist_token": f"{prefix}.embeddings.distillation_token",
        "pos_embed": f"{prefix}.embeddings.position_embeddings",
        "patch_embed.proj": f"{prefix}.embeddings.patch_embeddings.projection",
        "blocks": f"{prefix}.layers",
        "norm": f"{prefix}.layernorm",
        "head": "classifier" if prefix == "vit" else "cls_classifier",
        "head_dist": "distillation_classifier",
    }
    parts = {"norm1": "layernorm_before", "norm2": "layernorm_after", "attn.proj": "attention.o_proj"}
    renamed = {}
    for name, value in weights.items():
        home = max((place for place in places if f"{name}.".startswith(f"{place}.")), key=len)
        name = places[home] + name.removeprefix(home)
        for old, new in parts.items():
            name = name.replace(f".{old}.", f".{new}.")
        if ".attn.qkv." in name:
            for letter, part in zip("qkv", value.chunk(3), strict=True):
                renamed[name.replace("attn.qkv", f"attention.{letter}_proj")] = part
        else:
            renamed[name] = value
    return renamed


@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"])
@torch.no_grad()
def test_deit_of_timm_and_of_transformers_agree(name):
    """DeiT-Ti in full size. transformers calls the plain one ViT, and DeiT the one with a token for distillation."""
    ours = timm.create_model(name)
    for parameter in ours.parameters():
        parameter += 0.05 * torch.randn_like(parameter)
    ours.eval()
    sizes = {"hidden_size": 192, "num_hidden_layers": 12, "num_attention_heads": 3, "intermediate_size": 768}
    if "distilled" in name:
        config = transformers.DeiTConfig(**sizes, layer_norm_eps=1e-6, num_labels=1000)
        theirs = transformers.DeiTForImageClassificationWithTeacher(config).eval()
    else:
        config = transformers.ViTConfig(**sizes, layer_norm_eps=1e-6, num_labels=1000)
        theirs = transformers.ViTForImageClassification(config).eval()
    theirs.load_state_dict(transformers_weights(ours.state_dict(), theirs.base_model_prefix))
    x = torch.randn(2, 3, 224, 224)
    dot = ours(x)
    torch.testing.assert_close(theirs(x).logits, dot, atol=1e-4, rtol=0)
    for score in CONES:
        assert len(convert(ours, score)) == len(convert(theirs, score)) == 12
        logits = ours(x)
        assert (logits - dot).abs().max() > 0.1
        torch.testing.assert_close(theirs(x).logits, logits, atol=1e-4, rtol=0)
        revert(ours)
        revert(theirs)


def test_a_model_of_timm_wrapped_by_transformers_survives_its_saving(tmp_path):
    sizes = {name: size for name, size in timm_models.SMALL.items() if name != "num_classes"}
    config = transformers.TimmWrapperConfig(architecture="vit_tiny_patch16_224", model_args=sizes, num_labels=3)
    model = transformers.TimmWrapperForImageClassification(config).eval()
    x = image()
    convert(model, "umbral", learn_gamma=True, probe=x)
    model.save_pretrained(tmp_path)
    loaded = transformers.TimmWrapperForImageClassification.from_pretrained(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(loaded(x).logits, model(x).logits, rtol=0, atol=1e-6)
    assert len(revert(loaded)) == 2
    loaded.save_pretrained(tmp_path)
    assert "coneheads" not in (tmp_path / "config.json").read_text()


def test_a_layer_without_a_known_size_of_its_heads_is_refused():
    (thin,) = find(Attention(4, num_heads=4), None)
    assert thin.why_not == "its heads have 1 feature, or timm is older than 1.0.26"
    old = EvaAttention(32, num_heads=2, scale_norm=False, norm_layer=nn.LayerNorm)
    del old.head_dim  # as before 1.0.26
    with pytest.raises(ValueError, match="timm is older than"):
        convert(old)


def test_a_part_of_a_model_takes_no_image():
    block = small().blocks[0]
    assert inputs_for(block) is None
    assert not convert(block).probed
    assert convert(small("eva02_tiny_patch14_224").blocks[0].attn, probe=torch.randn(1, 3, 32)).probed
