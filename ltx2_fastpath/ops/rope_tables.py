"""Compact RoPE tables: the cos and sin of every token as rows of a small table that fits in L2, instead of [B, H, S, r] in fp32.

Each channel of a rotary embedding depends on one coordinate axis only, so tokens that share a coordinate share those channels.
For video the pairs (frame, row) and the columns repeat: a token takes a row of the one table and, in every third channel, a row
of the other. The rows are computed by the host's own embedding, on one token per distinct coordinate, and compared bit for bit
with its full tables before they are used.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

_FEW_ROWS = 1024  # a table of up to so many rows is small whether or not coordinates repeat


class CompactTables(NamedTuple):
    """The tables of one batch of tokens with H heads of 2r elements.

    cos, sin: fp32 [R, H·r]. rows: int32 [1, B, S], each token's row; or [2, B, S] with its row of `columns` as well. heads: H.
    columns: fp32 [C, H·r / 4, 4], the channels of the last of three axes. Of four channels those are one or two
    (`_quads_by_place`): the cos of the first and of the second, then their sin.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    rows: torch.Tensor
    heads: int
    columns: torch.Tensor | None = None

    def full(self) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin as the host lays them out: fp32 [B, H, S, r], views of [B, S, H, r]."""
        _, batch, tokens = self.rows.shape
        cos, sin = self.cos[self.rows[0]], self.sin[self.rows[0]]
        if self.columns is not None:
            columns = self.columns[self.rows[1]].unflatten(3, (2, 2))
            for table, column in zip((cos, sin), columns.unbind(3)):
                _put_columns(table, column)
        return cos.view(batch, tokens, self.heads, -1).transpose(1, 2), sin.view(batch, tokens, self.heads, -1).transpose(1, 2)


class Rope:
    """A rotary embedding in compact form that still unpacks, ``cos, sin = rope``, into the host's full tables.

    The full tables are made when somebody asks, and live as long as this object: one forward. Whoever asks on another CUDA stream
    waits until they are there.
    """

    def __init__(self, compact: CompactTables):
        self.compact = compact
        self._full: tuple[torch.Tensor, torch.Tensor] | None = None
        self._made: torch.cuda.Event | None = None

    def __iter__(self):
        if torch.compiler.is_compiling():  # what a graph makes cannot be kept from one of its runs to the next
            return iter(self.compact.full())
        stream = torch.cuda.current_stream(self.compact.cos.device) if self.compact.cos.is_cuda else None
        if self._full is None:
            self._full = self.compact.full()
            self._made = stream and stream.record_event()
        elif stream is not None:
            stream.wait_event(self._made)
        return iter(self._full)

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index):
        return tuple(self)[index]


def _quads_by_place(channels: int):
    """For each place 0, 1, 2 that the first channel of the last axis can have among four: (those quads, place).

    The host interleaves the three axes after a padding of `channels` modulo 3. At place 0 the fourth is of that axis too.
    """
    for place in range(3):
        yield slice((2 + channels % 3 - place) % 3, None, 3), place


def _pick_columns(table: torch.Tensor) -> torch.Tensor:
    """The channels of the last axis, [R, channels] -> [R, channels / 4, 2]. The second one means nothing where there is none."""
    quads = table.unflatten(1, (-1, 4))
    columns = quads[:, :, 2:].clone()
    for those, place in _quads_by_place(table.shape[1]):
        columns[:, those, 0] = quads[:, those, place]
    return columns


def _put_columns(table: torch.Tensor, columns: torch.Tensor) -> None:
    """Write `columns` [B, S, channels / 4, 2] back into `table` [B, S, channels]."""
    quads = table.unflatten(2, (-1, 4))
    for those, place in _quads_by_place(table.shape[2]):
        quads[:, :, those, place] = columns[:, :, those, 0]
        if place == 0:
            quads[:, :, those, 3] = columns[:, :, those, 1]


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
    distinct, rows = [], []
    for group in groups:
        values, inverse = torch.unique(by_token[:, group], dim=0, return_inverse=True)
        representative = torch.zeros((len(values), *by_token.shape[1:]), dtype=coords.dtype, device=coords.device)
        representative[:, group] = values
        distinct.append(representative)
        rows.append(inverse.view(batch, tokens))
    counts = [len(values) for values in distinct]
    if sum(counts) > max(batch * tokens // 2, _FEW_ROWS):
        return None

    cos, sin = embed(torch.cat(distinct).movedim(0, 1).reshape(1, axes, sum(counts), *coords.shape[3:]))
    _, heads, _, half = cos.shape
    if heads * half % 4:
        return None
    (cos, *cos_columns), (sin, *sin_columns) = (
        table.transpose(1, 2).reshape(sum(counts), heads * half).split(counts) for table in (cos, sin)
    )
    columns = None
    if cos_columns:
        columns = torch.cat((_pick_columns(cos_columns[0]), _pick_columns(sin_columns[0])), dim=2)
    compact = CompactTables(cos.clone(), sin.clone(), torch.stack(rows).to(torch.int32), heads, columns)
    for mine, host in zip(compact.full(), embed(coords)):
        if not torch.equal(mine.view(torch.int32), host.view(torch.int32)):
            return None
    return compact
