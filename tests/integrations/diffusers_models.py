"""Tiny models of diffusers with random weights, by the name of their class."""

import diffusers

IMAGE = {"in_channels": 3, "out_channels": 3}
LEVELS = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
HEADS = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4}


def dit(**changes):
    settings = HEADS | {"num_layers": 2, "sample_size": 8, "num_embeds_ada_norm": 10} | changes
    return diffusers.DiTTransformer2DModel(**settings)


def conditional_unet(**changes):
    down, up = ("DownBlock2D", "CrossAttnDownBlock2D"), ("CrossAttnUpBlock2D", "UpBlock2D")
    settings = {"down_block_types": down, "up_block_types": up, "cross_attention_dim": 12, "attention_head_dim": 2}
    return diffusers.UNet2DConditionModel(**IMAGE, **LEVELS, **(settings | changes))


def unet():
    down, up = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
    return diffusers.UNet2DModel(**IMAGE, **LEVELS, down_block_types=down, up_block_types=up, attention_head_dim=4)


def vae():
    down, up = ["DownEncoderBlock2D"] * 2, ["UpDecoderBlock2D"] * 2
    return diffusers.AutoencoderKL(**IMAGE, **LEVELS, down_block_types=down, up_block_types=up)


def transformer():
    return diffusers.Transformer2DModel(**HEADS, norm_num_groups=2, cross_attention_dim=12)


def pixart(**changes):
    settings = {"num_layers": 2, "sample_size": 8, "cross_attention_dim": 16, "caption_channels": 12}
    return diffusers.PixArtTransformer2DModel(**(HEADS | settings | changes))


def flux():
    settings = {"num_layers": 1, "num_single_layers": 1, "joint_attention_dim": 12, "pooled_projection_dim": 8}
    return diffusers.FluxTransformer2DModel(**HEADS, **settings, axes_dims_rope=(2, 2, 4))


def sd3():
    settings = {"num_layers": 1, "sample_size": 8, "joint_attention_dim": 12, "caption_projection_dim": 16}
    return diffusers.SD3Transformer2DModel(**HEADS, **settings, pooled_projection_dim=8)


#: models that convert takes
MODELS = {
    "AutoencoderKL": vae,
    "DiTTransformer2DModel": dit,
    "PixArtTransformer2DModel": pixart,
    "Transformer2DModel": transformer,
    "UNet2DConditionModel": conditional_unet,
    "UNet2DModel": unet,
}
#: models that convert refuses, as all their attention joins several streams or has positions of its own
REFUSED = {"FluxTransformer2DModel": flux, "SD3Transformer2DModel": sd3}
