"""The adaLN embeddings' forward: per-token timesteps without per-token cost.

Image-to-video and conditioning pipelines send a timestep per token, of which few are distinct; the host embeds each, [B·S, 9·D]
in all (a gigabyte at 14,080 tokens), and every block reads and writes that much. Here distinct timesteps are embedded once, and
the blocks get those rows and an index. A matrix product of another height may sum in another order, so the smaller
embedding is used only where it was seen to equal the host's bit for bit, and the height that did is kept.
"""

import functools

import torch

from ltx2_fastpath.first_sight import is_capturing, remember, same_bits, same_layout
from ltx2_fastpath.ops.support import IndexedRows

from .host import transformer_ltx2
from .survey import Survey, why_watched

_MANY = 1024  # timesteps: fewer are not worth a synchronisation
_FEW = 64  # distinct ones
# Heights of the smaller matrix product, tried in this sequence: cuBLAS picks a kernel by height.
_HEIGHTS = (_FEW, 256, 1024, 4096)
_KINDS = 256  # kinds of call that an embedding knows the height for


class IndexedEmbedding:
    """Stands for the host's embedding [B·S, C] until the host views it as [B, S, C], which gives `IndexedRows`."""

    def __init__(self, rows: IndexedRows):
        self._rows = rows
        self.shape = (*rows.index.shape, rows.values.shape[1])

    def size(self, dim: int) -> int:
        return self.shape[dim]

    def view(self, batch: int, tokens: int, width: int) -> IndexedRows:
        return IndexedRows(self._rows.values, self._rows.index.view(batch, tokens))


class DistinctTimesteps:
    """What is known of one adaLN embedding: the heights that gave the host's bits.

    Attributes:
        site: its name in reports; fast: calls that embedded distinct timesteps; stock: the host's, `first` of them compared;
        left_out: whether all are the host's; notes: the heights.
    """

    def __init__(self, site: str):
        self.site = site
        self.fast = self.stock = self.first = 0
        self.left_out = False
        self._heights: dict[tuple, tuple] = {}  # {kind of call: (survey, state, height)}
        self._notes: dict[str, None] = {}

    @property
    def notes(self) -> list[str]:
        return list(self._notes)

    def embed(self, survey: Survey, timestep, hidden_dtype, embed):
        """(embedding, embedded timestep) of flat `timestep` by the host's `embed`; the first may be an IndexedEmbedding.

        `survey` is that of the embedding's module: a height was found with its weights, adapters and switches.
        """
        distinct, index = torch.unique(timestep, return_inverse=True)
        if len(distinct) > _FEW or self.left_out:
            self.stock += 1
            return embed(timestep)
        kind = timestep.shape, timestep.stride(), timestep.dtype, timestep.device, hidden_dtype
        found_with = survey, survey.state()
        *known, height = self._heights.get(kind, (None, None, None))
        if known != list(found_with):
            self.stock += 1
            self.first += 1
            expected = embed(timestep)
            height = self._judge(timestep, distinct, index, embed, expected)
            remember(self._heights, kind, (*found_with, height), _KINDS)
            return expected
        if height is None:
            self.stock += 1
            return embed(timestep)
        self.fast += 1
        temb, embedded = self._small(distinct, height, embed)
        return IndexedEmbedding(IndexedRows(temb, index.to(torch.int32))), embedded[index]

    @staticmethod
    def _small(distinct, height, embed):
        padded = distinct.repeat(-(-height // len(distinct)))[:height]
        return tuple(rows[: len(distinct)] for rows in embed(padded))

    def _judge(self, timestep, distinct, index, embed, expected) -> int | None:
        note, height = f"{timestep.numel()} timesteps: no smaller matrix product gives the host's bits", None
        for smaller in _HEIGHTS:
            if smaller < timestep.numel():
                small = self._small(distinct, smaller, embed)
                alike = same_layout(expected[1], small[1][index])
                if alike and all(_same_rows(full, rows, index) for full, rows in zip(expected, small)):
                    note, height = f"{timestep.numel()} timesteps embedded as {smaller}, bit-equal to the host's", smaller
                    break
        remember(self._notes, note, None, _KINDS)
        return height


def _same_rows(full, rows, index, step=1024) -> bool:
    """Whether full[i] equals rows[index[i]] for all i, compared in steps to keep memory low."""
    steps = range(0, len(full), step)
    return all(same_bits(full[i : i + step], rows[index[i : i + step]]) for i in steps)


def make_forward(parts, name):
    """The replacement forward for the adaLN embedding called `name`."""
    stock = transformer_ltx2.LTX2AdaLayerNormSingle.forward
    handle, site = parts.handle, parts.distinct[name]

    @functools.wraps(stock)
    def forward(self, timestep, added_cond_kwargs=None, batch_size=None, hidden_dtype=None):
        def embed(at):
            return stock(self, at, added_cond_kwargs, batch_size=batch_size, hidden_dtype=hidden_dtype)

        if timestep.numel() < _MANY or timestep.ndim != 1 or added_cond_kwargs or not parts.stack.takes_rows():
            return embed(timestep)
        reason = handle.why_not(timestep)
        if reason is None:
            reason = why_watched(self.modules())
        if reason is None and timestep.is_cuda and is_capturing():
            reason = "a CUDA graph is being captured"
        if reason is not None:
            handle.count_stock(name, reason)
            return embed(timestep)
        return site.embed(parts.stack.survey(self), timestep, hidden_dtype, embed)

    return forward
