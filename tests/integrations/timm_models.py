"""Small models of timm, by the name of the architecture: those that convert knows, and those that it refuses.

timm is imported when one of them is built, so that the names can be read where it is not installed.
"""

from functools import partial
from typing import Any

from torch import nn

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}


def build(name: str, **sizes: Any) -> nn.Module:
    import timm

    return timm.create_model(name, **sizes)


def _small(name: str, **others: Any) -> tuple[str, partial[nn.Module]]:
    return name, partial(build, name, **(SMALL | others))


#: layers of the class Attention: these take attn_layer= too
VISION = dict(
    (
        _small("vit_tiny_patch16_224", attn_drop_rate=0.2, qk_norm=True),
        _small("vit_small_patch16_18x2_224", init_values=None),  # two attentions side by side in a block
        _small("vit_base_patch16_clip_224"),
        _small("vit_wee_patch16_reg1_gap_256", init_values=None, scale_attn_norm=True),  # a register, no class token
        _small("flexivit_small"),
        _small("deit_tiny_patch16_224"),
        _small("deit_tiny_distilled_patch16_224"),
        _small("deit3_small_patch16_224", init_values=None),
    )
)
#: layers of the classes AttentionRope and EvaAttention: rotary positions, grouped heads, keys without bias
ROTARY = dict(
    (
        _small("eva02_tiny_patch14_224", num_heads=4),
        _small("vit_tiny_patch16_dinov3_qkvb", init_values=None),
        _small("vit_small_patch16_rope_224", init_values=None),
        _small("vit_small_patch16_rope_mixed_224", init_values=None),
        _small("vit_base_patch16_sapiens2", num_heads=4, num_kv_heads=2, init_values=None),
    )
)
MODELS = VISION | ROTARY

REFUSED = {
    "swin_tiny_patch4_window7_224": partial(
        build, "swin_tiny_patch4_window7_224", img_size=32, window_size=4, embed_dim=16, depths=(1, 1), num_heads=(1, 2)
    ),
    "cait_xxs24_224": partial(build, "cait_xxs24_224", img_size=32, embed_dim=32, depth=1, num_heads=2),
    "xcit_nano_12_p16_224": partial(build, "xcit_nano_12_p16_224", img_size=32, embed_dim=32, depth=1, num_heads=2),
}
REFUSED |= dict(
    (
        _small("beit_base_patch16_224"),
        _small("vit_relpos_small_patch16_224"),
        _small("vit_dwee_patch16_reg1_gap_256"),  # the difference of two attentions
        _small("vit_base_patch16_xp_224"),  # attention and perceptron in one block
    )
)
