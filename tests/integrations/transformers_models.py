"""Tiny models of transformers with random weights: those that cone attention is tested in, and those it refuses."""

from collections.abc import Callable
from typing import Any

import transformers
from transformers import PreTrainedModel

TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4} | TOKENS
GATED = DECODER | {"intermediate_size": 48, "max_position_embeddings": 64}
ENCODER = GATED | {"type_vocab_size": 2}
TRANSLATION = {"vocab_size": 50, "d_model": 32, "max_position_embeddings": 64, "decoder_start_token_id": 1} | TOKENS
TRANSLATION |= {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 2), ("ffn_dim", 48))}
TRANSLATION |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "forced_eos_token_id": None}
VISION = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
VISION |= {"image_size": 16, "patch_size": 4}


def tiny(model: str, config: str, **settings: Any) -> Callable[[], PreTrainedModel]:
    """What builds this model, in eval mode, from a config with these settings."""
    return lambda: getattr(transformers, model)(getattr(transformers, config)(**settings)).eval()


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "LlamaForCausalLM": tiny("LlamaForCausalLM", "LlamaConfig", **GATED, num_key_value_heads=2),
    "MistralForCausalLM": tiny("MistralForCausalLM", "MistralConfig", **GATED, num_key_value_heads=2, sliding_window=4),
    "Qwen3ForCausalLM": tiny("Qwen3ForCausalLM", "Qwen3Config", **GATED, num_key_value_heads=2, head_dim=8),
    "Gemma2ForCausalLM": tiny(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        **GATED,
        num_key_value_heads=2,
        head_dim=8,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=2.0,
        sliding_window=4,
    ),
    "GPT2LMHeadModel": tiny("GPT2LMHeadModel", "GPT2Config", n_embd=32, n_layer=2, n_head=4, vocab_size=50, **TOKENS),
    "GPTNeoXForCausalLM": tiny("GPTNeoXForCausalLM", "GPTNeoXConfig", **GATED),
    "OPTForCausalLM": tiny("OPTForCausalLM", "OPTConfig", **DECODER, ffn_dim=48, word_embed_proj_dim=32),
    "BertForMaskedLM": tiny("BertForMaskedLM", "BertConfig", **ENCODER),
    "RobertaForMaskedLM": tiny("RobertaForMaskedLM", "RobertaConfig", **ENCODER),
    "ViTForImageClassification": tiny("ViTForImageClassification", "ViTConfig", **VISION),
    "DeiTForImageClassification": tiny("DeiTForImageClassification", "DeiTConfig", **VISION),
    "Dinov2ForImageClassification": tiny("Dinov2ForImageClassification", "Dinov2Config", **VISION),
    "CLIPModel": tiny("CLIPModel", "CLIPConfig", text_config=GATED, vision_config=VISION, projection_dim=16),
    "MarianMTModel": tiny("MarianMTModel", "MarianConfig", **TRANSLATION),
    "BartForConditionalGeneration": tiny("BartForConditionalGeneration", "BartConfig", **TRANSLATION),
    "M2M100ForConditionalGeneration": tiny("M2M100ForConditionalGeneration", "M2M100Config", **TRANSLATION),
    "T5ForConditionalGeneration": tiny(
        "T5ForConditionalGeneration",
        "T5Config",
        vocab_size=50,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=2,
    ),
    "SwinForImageClassification": tiny(
        "SwinForImageClassification",
        "SwinConfig",
        image_size=32,
        patch_size=2,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
    ),
}

#: models that do not ask the interface: convert refuses them by name
REFUSED: dict[str, Callable[[], PreTrainedModel]] = {
    "DebertaV2Model": tiny("DebertaV2Model", "DebertaV2Config", **ENCODER),
    "FSMTModel": tiny(
        "FSMTModel", "FSMTConfig", langs=["de", "en"], src_vocab_size=50, tgt_vocab_size=50, **TRANSLATION
    ),
}
