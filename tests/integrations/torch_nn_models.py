"""Small models of PyTorch's own that ``convert`` is tested on; the table in docs/integrations.md lists them."""

from collections.abc import Callable

from torch import nn

WIDTH = 32


def encoder_layer(**changes) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(WIDTH, 4, 48, **{"dropout": 0.0, "batch_first": True} | changes)


def decoder_layer(**changes) -> nn.TransformerDecoderLayer:
    return nn.TransformerDecoderLayer(WIDTH, 4, 48, **{"dropout": 0.0, "batch_first": True} | changes)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "nn.MultiheadAttention": lambda: nn.MultiheadAttention(WIDTH, 4, batch_first=True),
    "nn.MultiheadAttention(kdim, vdim)": lambda: nn.MultiheadAttention(WIDTH, 4, kdim=20, vdim=12),
    "nn.MultiheadAttention(add_bias_kv, add_zero_attn)": lambda: nn.MultiheadAttention(
        WIDTH, 4, add_bias_kv=True, add_zero_attn=True
    ),
    "nn.TransformerEncoderLayer": encoder_layer,
    "nn.TransformerEncoderLayer(norm_first)": lambda: encoder_layer(norm_first=True, activation="gelu"),
    "nn.TransformerEncoder": lambda: nn.TransformerEncoder(encoder_layer(), 2),
    "nn.TransformerEncoder(batch_first=False)": lambda: nn.TransformerEncoder(
        encoder_layer(batch_first=False), 2, enable_nested_tensor=False
    ),
    "nn.TransformerDecoderLayer": decoder_layer,
    "nn.TransformerDecoder": lambda: nn.TransformerDecoder(decoder_layer(), 2),
    "nn.Transformer": lambda: nn.Transformer(WIDTH, 4, 2, 2, 48, dropout=0.0, batch_first=True),
}
