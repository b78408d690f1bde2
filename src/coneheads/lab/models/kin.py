"""The model of the task ``kin``: one attention layer over learned embeddings, and nothing else that could learn."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from coneheads.lab.commands import ModelOptions
from coneheads.lab.models.attention import QueryKey, scored
from coneheads.lab.models.start import resolve

# Members start close together, so that attention starts out even and a step moves a member far (docs/tuning.md).
EMBEDDING_SCALE = 0.1


class KinModel(nn.Module):
    """Attends from the query member to the members of the set; says the values in proportion to their weights.

    With weights w_i over the members and their values v_i, ``p(v) = sum of w_i where v_i = v``, averaged over
    the heads. All that is learned is where members lie and how they are compared.
    """

    def __init__(self, options: ModelOptions, members: int, values: int) -> None:
        super().__init__()
        self.values = values
        self.members = nn.Embedding(members, options.width)
        scale = EMBEDDING_SCALE if options.embedding_scale is None else options.embedding_scale
        nn.init.normal_(self.members.weight, std=scale)
        self.query_key = QueryKey(options, options.width)
        self.score = scored(options.score, options.heads, options.qk_dim, resolve(options))

    def forward(self, query: Tensor, members: Tensor, values: Tensor) -> Tensor:
        """query [B], members [B, N], values [B, N] -> log p [B, values]."""
        q, k = self.query_key(self.members(query.unsqueeze(1)), self.members(members))  # [B, H, 1, E], [B, H, N, E]
        carried = nn.functional.one_hot(values, self.values).to(k).unsqueeze(1)  # [B, 1, N, values]
        shares, _ = self.score(q, k, carried.expand(-1, k.shape[1], -1, -1))  # [B, H, 1, values]
        share = shares.squeeze(2).mean(1)
        # so that no answer is ever thought impossible: the loss of a wrong one stays below 14
        return torch.log(share + 1e-6)
