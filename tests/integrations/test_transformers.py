"""Cone attention inside tiny models of transformers, one of each family, with random weights."""

import pytest
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel, StaticCache

from coneheads import Umbral
from coneheads.integrations.conversion import convert, revert
from coneheads.integrations.transformers import inputs_for, register, restore
from coneheads.integrations.transformers_attention import attention
from coneheads.nn import ConeAttention
from coneheads.scores import BY_NAME
from tests.integrations.transformers_models import MODELS, REFUSED, VISION

DECODERS = ["LlamaForCausalLM", "GPT2LMHeadModel"]
KEY_PROJECTIONS = ("k_proj.weight", "key.weight", "k.weight", "c_attn.weight", "query_key_value.weight")
TRANSLATORS = ["MarianMTModel", "BartForConditionalGeneration", "T5ForConditionalGeneration"]


@pytest.fixture(autouse=True)
def _registered():
    register()


def tokens(length: int = 9) -> Tensor:
    return torch.randint(3, 50, (2, length))


def inputs(model: PreTrainedModel) -> dict[str, Tensor]:
    """Random ones of the kinds that the probe uses."""
    made = inputs_for(model)
    assert made is not None
    random = {"input_ids": tokens(9), "decoder_input_ids": tokens(7)}
    return {name: random[name] if name in random else torch.randn(2, *like.shape[1:]) for name, like in made.items()}


def logits(model: PreTrainedModel, **arguments: object) -> Tensor:
    out = model(**arguments)
    return out.logits if "logits" in out else out.logits_per_image


def built(name: str) -> PreTrainedModel:
    """The model; eager where its attention does something that SDPA refuses."""
    model = MODELS[name]()
    if name.startswith("Gemma2"):
        model.set_attn_implementation("eager")
    return model


def scaled_up(name: str, score: str) -> PreTrainedModel:
    """A converted model in which a wrong key shows, all matrices times 8; T5 starts large: in double precision."""
    model = MODELS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.dim() > 1 else 1)
    convert(model, score)
    return model.double() if name.startswith("T5") else model


def attention_weights(out: dict) -> list[Tensor]:
    """All attention weights in an output, those of models inside it too."""
    parts = [out[part] for part in ("text_model_output", "vision_model_output") if part in out] or [out]
    return [weights for part in parts for name in part if name.endswith("attentions") for weights in part[name]]


@pytest.mark.parametrize("name", MODELS)
def test_every_family_keeps_its_logits_with_the_dot_product_and_changes_them_with_cones(name):
    model = built(name)
    given = inputs(model)
    with torch.no_grad():
        before = logits(model, **given)
        report = convert(model, "dot")
        assert report.probed
        assert not report.skipped
        torch.testing.assert_close(logits(model, **given), before, atol=5e-6, rtol=1e-5)
    for score in ("penumbral", "umbral"):
        revert(model)
        report = convert(model, score, learn_gamma=True)
        after = logits(model, **given)
        assert (after - before).abs().max() > 1e-4
        model.zero_grad()
        after.pow(2).sum().backward()
        for layer in report.swapped:
            gradients = {part: parameter.grad for part, parameter in layer.module.named_parameters()}
            assert all(gradient.isfinite().all() for gradient in gradients.values() if gradient is not None)
            assert gradients["cone.log_gamma"].abs().max() > 0
            key = next(part for part in gradients if part.endswith(KEY_PROJECTIONS))
            assert gradients[key].abs().max() > 0
    assert len(revert(model)) == len(report)
    assert not any("cone" in key for key in model.state_dict())
    with torch.no_grad():
        assert torch.equal(logits(model, **given), before)


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_ignore_the_interface_are_refused_by_name(name):
    model = REFUSED[name]()
    with pytest.raises(ValueError, match=f"no attention layer of {name} can be converted.*ignores transformers"):
        convert(model)
    model.config._attn_implementation = "coneheads_umbral"
    with pytest.raises(ValueError, match=f"{name} ignores transformers' attention interface.*'coneheads_umbral'"):
        type(model)(model.config)


@pytest.mark.parametrize("score", BY_NAME)
def test_every_score_runs_by_name_without_conversion(score):
    model = MODELS["LlamaForCausalLM"]()
    given = tokens()
    model.set_attn_implementation(f"coneheads_{score}")
    by_name = model(given).logits
    model.set_attn_implementation("sdpa")
    convert(model, score)
    assert torch.equal(model(given).logits, by_name)
    model.set_attn_implementation(f"coneheads_{score}")
    with pytest.raises(ValueError, match="was converted and cannot run"):
        model(given)


def test_the_converted_implementation_refuses_layers_that_were_not_converted():
    model = MODELS["LlamaForCausalLM"]()
    model.set_attn_implementation("coneheads")
    with pytest.raises(ValueError, match="has no ConeAttention"):
        model(tokens())


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Gemma2ForCausalLM", "T5ForConditionalGeneration"])
def test_layers_that_where_leaves_out_keep_the_dot_product(name):
    model = built(name)
    given = inputs(model)
    before = logits(model, **given)
    report = convert(model, Umbral(gamma=2.0), where=lambda layer: ".1." in layer)
    assert 0 < len(report.swapped) < len(report.found)
    changed = logits(model, **given)
    assert (changed - before).abs().max() > 1e-4
    for layer in report.swapped:
        del layer.module.cone
        layer.module.cone = None  # as the layers that were left out
    torch.testing.assert_close(logits(model, **given), before, atol=5e-6, rtol=1e-5)
    assert all(weights.isfinite().all() for weights in attention_weights(model(**given, output_attentions=True)))


@pytest.mark.parametrize(
    ("name", "score"),
    [
        (name, score)
        for name in (*DECODERS, *TRANSLATORS, "T5 in single precision")
        for score in ("penumbral", "umbral")
    ],
)
@pytest.mark.parametrize("seed", [0, 2, 4])  # with 2 and 4, umbral scores of Marian reach 1e5
def test_cached_chunked_and_full_logits_agree(name, score, seed):
    """To 1e-4. T5 starts large: times 8, SDPA's own logits are up to 1e-3 off in single precision, so it is told in
    double; in single precision they agree to 1e-4 of their size.
    """
    torch.manual_seed(seed)
    single = name.endswith("single precision")
    model = scaled_up("T5ForConditionalGeneration", score).float() if single else scaled_up(name, score)
    target, fixed, own = tokens(12), {}, "input_ids"
    if model.config.is_encoder_decoder:
        mask = torch.ones(2, 10, dtype=torch.long)
        mask[0, 6:] = 0
        states = model.get_encoder()(tokens(10), attention_mask=mask).last_hidden_state
        fixed, own = {"encoder_outputs": (states.detach(),), "attention_mask": mask}, "decoder_input_ids"

    def cache(static: bool) -> object:
        made = [StaticCache(config=model.config, max_cache_len=n) if static else DynamicCache() for n in (16, 10)]
        return EncoderDecoderCache(*made) if model.config.is_encoder_decoder else made[0]

    with torch.no_grad():
        full = model(**{own: target}, **fixed, use_cache=False).logits
        tolerance = 1e-4 * full.abs().max().item() if single else 1e-4
        for pieces in ([1] * 12, [5, 4, 3], [7, 1, 1, 1, 1, 1]):
            for static in (False, True):
                past, got = cache(static), []
                for piece in target.split(pieces, dim=1):
                    got.append(model(**{own: piece}, **fixed, past_key_values=past, use_cache=True).logits)
                torch.testing.assert_close(torch.cat(got, 1), full, atol=tolerance, rtol=0)


@pytest.mark.parametrize("name", [*DECODERS, "OPTForCausalLM", "Gemma2ForCausalLM", *TRANSLATORS])
def test_later_tokens_change_no_earlier_logits(name):
    model = scaled_up(name, "umbral")
    given = inputs(model)
    own = "decoder_input_ids" if "decoder_input_ids" in given else "input_ids"
    before = logits(model, **given)
    given[own] = torch.cat([given[own][:, :4], tokens()[:, : given[own].shape[1] - 4]], 1)
    after = logits(model, **given)
    # Not bit for bit: positions may be relative to a mean of all queries, which moves their rounding.
    torch.testing.assert_close(after[:, :4], before[:, :4], atol=1e-4, rtol=0)
    assert not torch.equal(after[:, 4:], before[:, 4:])


@pytest.mark.parametrize("name", ["MistralForCausalLM", "Gemma2ForCausalLM"])
def test_a_token_outside_the_sliding_window_has_no_influence(name):
    model = MODELS[name]()
    convert(model, "umbral", where="*.0.*")
    layer = model.model.layers[0]  # one layer: information from outside the window would come from this one only
    heard = []
    layer.self_attn.register_forward_hook(lambda module, args, out: heard.append(out[0]))
    given = tokens(9)
    model(given)
    given[:, 0] = (given[:, 0] + 1) % 47 + 3
    model(given)
    unlike = (heard[0] != heard[1]).any(-1).any(0)
    assert unlike.tolist() == [True] * 4 + [False] * 5  # the window is 4 tokens


def test_a_sliding_window_that_is_in_no_mask_raises():
    model = MODELS["LlamaForCausalLM"]()
    convert(model)
    model(tokens(4), sliding_window=4)
    with pytest.raises(ValueError, match="sliding_window=4 without a mask that has it for 5 keys"):
        model(tokens(5), sliding_window=4)


@pytest.mark.parametrize("name", DECODERS)
def test_left_padding_changes_nothing(name):
    model = scaled_up(name, "penumbral")
    given = tokens()
    mask = torch.cat([torch.zeros(2, 3, dtype=torch.long), torch.ones_like(given)], 1)
    padded = torch.cat([torch.zeros_like(given[:, :3]), given], 1)
    position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
    got = model(padded, attention_mask=mask, position_ids=position_ids).logits[:, 3:]
    torch.testing.assert_close(got, model(given).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["BertForMaskedLM", "T5ForConditionalGeneration"])
def test_padding_of_an_encoder_changes_nothing(name):
    model = scaled_up(name, "umbral")
    given = inputs(model)
    alone = logits(model, **given)
    ids = given.pop("input_ids")
    mask = torch.cat([torch.ones_like(ids), torch.zeros(2, 3, dtype=torch.long)], 1)
    padded = logits(model, input_ids=torch.cat([ids, tokens(3)], 1), attention_mask=mask, **given)
    torch.testing.assert_close(padded[:, : alone.shape[1]], alone, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "T5ForConditionalGeneration"])
@pytest.mark.parametrize("how", [{}, {"do_sample": True}, {"num_beams": 3}], ids=["greedy", "sampling", "beam"])
def test_generation_with_a_cache_has_the_scores_of_generation_without(name, how):
    model = MODELS[name]()
    convert(model, "umbral")
    given = tokens()
    mask = torch.ones_like(given)
    mask[0, :3] = 0
    outputs = []
    for cache in ({"use_cache": True}, {"use_cache": False}, {"cache_implementation": "static"}):
        torch.manual_seed(1)
        rest = {"min_new_tokens": 6, "max_new_tokens": 6, "output_logits": True, "return_dict_in_generate": True}
        rest |= {"disable_compile": True}
        outputs.append(model.generate(given, attention_mask=mask, **how, **cache, **rest))
    for other in outputs[1:]:
        assert torch.equal(other.sequences, outputs[0].sequences)
        torch.testing.assert_close(torch.stack(other.logits), torch.stack(outputs[0].logits), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_output_attentions_returns_the_weights_of_every_layer(name):
    model = MODELS[name]()
    given = inputs(model)
    model.set_attn_implementation("eager")
    eager = attention_weights(model(**given, output_attentions=True))
    convert(model, "umbral")
    plain, out = logits(model, **given), model(**given, output_attentions=True)
    weights = attention_weights(out)
    assert [each.shape for each in weights] == [each.shape for each in eager] != []
    for each, other in zip(weights, eager, strict=True):
        torch.testing.assert_close(each.sum(-1), torch.ones_like(each[..., 0]))
        assert (each - other).abs().max() > 1e-4
    torch.testing.assert_close(logits(model, **given, output_attentions=True), plain, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("argument", ["s_aux", "cu_seq_lens_q", "max_length_k", "head_mask", "cache", "anything"])
def test_arguments_that_are_not_honoured_raise_by_name(argument):
    model = MODELS["LlamaForCausalLM"]()
    convert(model)
    q = torch.randn(1, 4, 3, 8)
    layer = model.model.layers[0].self_attn
    attention(None, layer, q, q, q, None, **{argument: None})
    with pytest.raises(ValueError, match=f"LlamaAttention was given {argument}, which cone attention does not honour"):
        attention(None, layer, q, q, q, None, **{argument: 1})


def test_attention_sinks_raise_through_the_model():
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "num_local_experts": 2}
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes, num_experts_per_tok=1))
    with pytest.raises(RuntimeError, match="s_aux"):
        convert(model)
    assert model.config._attn_implementation != "coneheads"
    assert not any(isinstance(module, ConeAttention) for module in model.modules())


def test_a_position_bias_and_a_mask_act_together():
    q, k, v = torch.randn(3, 2, 4, 5, 8).unbind(0)
    bias, mask = torch.randn(1, 4, 5, 5), torch.rand(2, 1, 5, 5) > 0.3
    mask[..., 0] = True
    module = torch.nn.Module()
    module.is_causal = True
    dot = ConeAttention("dot", 4, 8)
    added = bias.masked_fill(~mask, -torch.inf)
    expected = dot(q, k, v, added)[0].transpose(1, 2)
    torch.testing.assert_close(attention("dot", module, q, k, v, mask, position_bias=bias)[0], expected)
    torch.testing.assert_close(
        attention("dot", module, q, k, v, torch.zeros(1).masked_fill(~mask, -torch.inf), position_bias=bias)[0],
        expected,
    )
    causal = dot(q, k, v, bias.masked_fill(~torch.ones(5, 5).tril().bool(), -torch.inf))[0].transpose(1, 2)
    more = torch.cat([k, torch.randn(2, 4, 3, 8)], 2), torch.cat([v, torch.randn(2, 4, 3, 8)], 2)  # a static cache
    longer = torch.cat([bias, torch.randn(1, 4, 5, 3)], 3)
    torch.testing.assert_close(attention("dot", module, q, *more, None, position_bias=longer)[0], causal)


def test_a_query_that_the_layer_has_scaled_itself_counts_as_one_that_it_has_not():
    q, k, v = torch.randn(3, 2, 4, 5, 16).unbind(0)
    module = torch.nn.Module()
    module.scaling = 0.25
    expected = attention("umbral", module, q, k, v, scaling=0.25)[0]
    torch.testing.assert_close(attention("umbral", module, q * 0.25, k, v, scaling=1.0)[0], expected)


def test_gradient_checkpointing_gives_the_same_gradients():
    model = MODELS["LlamaForCausalLM"]()
    convert(model, "umbral", learn_gamma=True)
    model.train()
    given, gradients = tokens(), []
    for checkpointed in (False, True):
        if checkpointed:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model(given, labels=given, use_cache=False).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *gradients))


def test_a_converted_model_compiles_into_one_graph():
    model = MODELS["LlamaForCausalLM"]()
    convert(model, "penumbral", learn_gamma=True)
    given = tokens()
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(given).logits
        torch.testing.assert_close(compiled, model(given).logits)


def test_a_second_conversion_that_fails_takes_back_only_its_own_layers(monkeypatch):
    model = MODELS["LlamaForCausalLM"]()
    convert(model, "umbral", where="*.0.*")
    given = tokens()
    before = model(given).logits
    second = model.model.layers[1].self_attn
    monkeypatch.setattr(second, "forward", lambda hidden_states, **_: (hidden_states, None))
    with pytest.raises(ValueError, match=r"matches no attention layer|can be converted"):
        convert(model, "penumbral", where="*.1.*")
    monkeypatch.undo()
    assert torch.equal(model(given).logits, before)
    convert(model, "penumbral", where="*.1.*")
    assert [layer.self_attn.cone.base.name for layer in model.model.layers] == ["umbral", "penumbral"]
    assert restore(model, ["model.layers.1.self_attn"]) == ["model.layers.1.self_attn"]
    assert torch.equal(model(given).logits, before)
    assert revert(model) == ["model.layers.0.self_attn"]
    assert model.config._attn_implementation == "sdpa"


def test_a_layer_that_is_converted_already_says_so_and_keeps_its_score():
    model = MODELS["LlamaForCausalLM"]()
    convert(model, "umbral")
    with pytest.raises(ValueError, match="it has the score 'umbral' already: call revert first"):
        convert(model, "penumbral")
    assert model.model.layers[0].self_attn.cone.base.name == "umbral"


def test_a_model_whose_input_is_unknown_asks_for_a_probe():
    wrapped = torch.nn.Sequential(MODELS["LlamaForCausalLM"]())
    with pytest.raises(ValueError, match=r"no input is known for Sequential.*probe="):
        convert(wrapped)
    report = convert(wrapped, probe=tokens())
    assert [layer.name for layer in report.swapped] == [f"0.model.layers.{i}.self_attn" for i in (0, 1)]


def test_a_model_that_needs_more_than_tokens_and_images_asks_for_a_probe():
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "max_source_positions": 4, "max_target_positions": 8}
    sizes |= {"d_model": 32, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": 50, "num_mel_bins": 8}
    sizes |= {
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "pad_token_id": 0,
        "decoder_start_token_id": 1,
    }
    model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**sizes)).eval()
    with pytest.raises(RuntimeError, match=r"a forward of WhisperForConditionalGeneration failed .*probe="):
        convert(model)
    assert model.config._attn_implementation == "sdpa"
    assert len(convert(model, probe={"input_features": torch.randn(1, 8, 8), "decoder_input_ids": tokens(3)[:1]})) == 3

    eye = transformers.ViTConfig(**VISION)
    mouth = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=50, add_cross_attention=True)
    pair = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(eye, mouth)
    with pytest.raises(ValueError, match=r"no input is known for VisionEncoderDecoderModel.*probe="):
        convert(transformers.VisionEncoderDecoderModel(pair))


@pytest.mark.parametrize("version", ["4.57.1", "5.0.0", "5.3.0.dev0"])
def test_an_older_transformers_is_refused_with_the_reason(version, monkeypatch):
    monkeypatch.setattr(transformers, "__version__", version)
    with pytest.raises(ImportError, match=rf"needs transformers 5\.4 or later and this is {version}.*SDPA in silence"):
        register()
    with pytest.raises(ImportError, match="one attention interface"):
        convert(MODELS["LlamaForCausalLM"]())
