"""Compact RoPE tables: the cos and sin of every token as rows of a small table that fits in L2, instead of [B, H, S, r] in fp32.

Each channel of a rotary embedding depends on one coordinate axis only, so tokens that share a coordinate share those channels.
For video the axes (frame, row) together and (column) alone repeat; a token's cos is the union of one table row of each group, in
which the other group's channels are zero bits. The rows are computed by the host's own embedding, on one token per distinct
coordinate, and compared bit for bit with its full tables before they are used.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

_FEW_ROWS = 1024  # a table of up to so many rows is small whether or not coordinates repeat


class CompactTables(NamedTuple):
    """cos, sin: fp32 [R, H·r]. rows: int32 [1 or 2, B, S], the table rows whose union is a token's. heads: H."""

    cos: torch.Tensor
    sin: torch.Tensor
    rows: torch.Tensor
    heads: int

    def full(self) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin as the host lays them out: fp32 [B, H, S, r], views of [B, S, H, r]."""
        _, batch, tokens = self.rows.shape
        return tuple(
            _union(table, self.rows).view(batch, tokens, self.heads, -1).transpose(1, 2) for table in (self.cos, self.sin)
        )


class Rope:
    """A rotary embedding in compact form that still unpacks, ``cos, sin = rope``, into the host's full tables.

    The full tables are made when somebody asks, and live as long as this object: one forward.
    """

    def __init__(self, compact: CompactTables):
        self.compact = compact
        self._full: tuple[torch.Tensor, torch.Tensor] | None = None

    def __iter__(self):
        if self._full is None:
            self._full = self.compact.full()
        return iter(self._full)

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index):
        return tuple(self)[index]


def _union(table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    bits = table.view(torch.int32)
    united = bits[rows[0].flatten()]
    for more in rows[1:]:
        united = united | bits[more.flatten()]
    return united.view(torch.float32)


def compact_tables(
    coords: torch.Tensor, embed: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
) -> CompactTables | None:
    """Compact tables for `coords`, or None where too few coordinates repeat or the bits would differ.

    Args:
        coords: [B, A, S] or [B, A, S, 2] (bounds of each token) with A = 1 or 3 axes.
        embed: the host's embedding, from coordinates to (cos, sin), fp32 [B, H, S, r] each.
    """
    batch, axes, tokens = coords.shape[:3]
    groups = {1: [[0]], 3: [[0, 1], [2]]}.get(axes)
    if groups is None or coords.numel() == 0:
        return None
    by_token = coords.movedim(2, 1).reshape(batch * tokens, axes, -1)
    distinct, rows, count = [], [], 0
    for group in groups:
        values, inverse = torch.unique(by_token[:, group], dim=0, return_inverse=True)
        representative = torch.zeros((len(values), *by_token.shape[1:]), dtype=coords.dtype, device=coords.device)
        representative[:, group] = values
        distinct.append(representative)
        rows.append(inverse.view(batch, tokens) + count)
        count += len(values)
    if count > max(batch * tokens // 2, _FEW_ROWS):
        return None

    cos, sin = embed(torch.cat(distinct).movedim(0, 1).reshape(1, axes, count, *coords.shape[3:]))
    _, heads, _, half = cos.shape
    channels = heads * half
    # The host interleaves the axes after a padding of ones and zeros, which we count to the first group.
    axis = (torch.arange(channels, device=coords.device) - channels % axes) % axes
    axis[: channels % axes] = 0
    foreign = torch.cat(
        [~torch.isin(axis, torch.tensor(g, device=axis.device)).expand(len(d), -1) for g, d in zip(groups, distinct)]
    )
    cos, sin = (table.transpose(1, 2).reshape(count, channels).masked_fill(foreign, 0.0) for table in (cos, sin))
    compact = CompactTables(cos, sin, torch.stack(rows).to(torch.int32), heads)
    for mine, host in zip(compact.full(), embed(coords)):
        if not torch.equal(mine.view(torch.int32), host.view(torch.int32)):
            return None
    return compact
