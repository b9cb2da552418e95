"""The adaLN embeddings' forward: per-token timesteps without per-token cost.

Image-to-video and conditioning pipelines send a timestep per token, of which few are distinct; the host embeds each, [B·S, 9·D]
in all (a gigabyte at 14,080 tokens), and every block reads and writes that much. Here distinct timesteps are embedded once, and
the blocks get those rows and an index. A matrix product of another height may sum in another order, so the smaller
embedding is used only where it was seen to equal the host's bit for bit, and the height that did is kept.
"""

import functools
import logging

import torch

from ltx2_fastpath.first_sight import same_bits
from ltx2_fastpath.ops.numerics import IndexedRows

from .host import transformer_ltx2
from .survey import why_watched

ADA_EMBEDDINGS = (
    "time_embed",
    "audio_time_embed",
    "prompt_adaln",
    "audio_prompt_adaln",
    "av_cross_attn_video_scale_shift",
    "av_cross_attn_video_a2v_gate",
    "av_cross_attn_audio_scale_shift",
    "av_cross_attn_audio_v2a_gate",
)
_MANY = 1024  # timesteps: fewer are not worth a synchronisation
_FEW = 64  # distinct ones
# Heights of the smaller matrix product, tried in this sequence: cuBLAS picks a kernel by height.
_HEIGHTS = (_FEW, 256, 1024, 4096)

logger = logging.getLogger("ltx2_fastpath")


class HostRows(IndexedRows):
    """`IndexedRows` that the host's blocks understand too, by what they read: after `disable` in the middle of a forward."""

    __slots__ = ()

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.index.shape, self.values.shape[1]))

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    def reshape(self, *shape: int) -> torch.Tensor:
        return self.full().reshape(*shape)


class IndexedEmbedding:
    """Stands for the host's embedding [B·S, C] until the host views it as [B, S, C], which gives `HostRows`."""

    def __init__(self, rows: IndexedRows):
        self._rows = rows
        self.shape = (*rows.index.shape, rows.values.shape[1])

    def size(self, dim: int) -> int:
        return self.shape[dim]

    def view(self, batch: int, tokens: int, width: int) -> HostRows:
        return HostRows(self._rows.values, self._rows.index.view(batch, tokens))


class DistinctTimesteps:
    """The state of one embedding: which heights were verified, and counts for the report."""

    def __init__(self, site: str):
        self.site = site
        self.fast = 0
        self.stock = 0
        self.notes: list[str] = []
        self._heights: dict = {}

    def embed(self, timestep, embed):
        """(embedding, embedded timestep) of flat `timestep` by the host's `embed`; the first may be an IndexedEmbedding."""
        distinct, index = torch.unique(timestep, return_inverse=True)
        if len(distinct) > _FEW:
            self.stock += 1
            return embed(timestep)
        signature = (timestep.shape, timestep.dtype, timestep.device)
        if signature not in self._heights:
            self.stock += 1
            expected = embed(timestep)
            self._heights[signature] = self._judge(timestep, distinct, index, embed, expected)
            return expected
        height = self._heights[signature]
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

    def _judge(self, timestep, distinct, index, embed, expected):
        for height in _HEIGHTS:
            if height < timestep.numel():
                small = self._small(distinct, height, embed)
                if all(_same_rows(full, rows, index) for full, rows in zip(expected, small)):
                    self.notes.append(f"{timestep.numel()} timesteps embedded as {height}, bit-equal to the host's")
                    return height
        self.notes.append(f"{timestep.numel()} timesteps: no smaller matrix product gives the host's bits")
        return None


def _same_rows(full, rows, index, step=1024) -> bool:
    """Whether full[i] equals rows[index[i]] for all i, compared in steps to keep memory low."""
    steps = range(0, len(full), step)
    return all(same_bits(full[i : i + step], rows[index[i : i + step]]) for i in steps)


def make_forward(fast, name):
    """The replacement forward for the adaLN embedding called `name`."""
    stock = transformer_ltx2.LTX2AdaLayerNormSingle.forward
    site = fast.sites[f"{name}.distinct"]

    @functools.wraps(stock)
    def forward(self, timestep, added_cond_kwargs=None, batch_size=None, hidden_dtype=None):
        def embed(at):
            return stock(self, at, added_cond_kwargs, batch_size=batch_size, hidden_dtype=hidden_dtype)

        if timestep.numel() < _MANY or timestep.ndim != 1 or added_cond_kwargs or not fast.blocks_take_rows():
            return embed(timestep)
        reason = fast.why_not(timestep)
        if reason is None:
            reason = why_watched(self.modules())
        if reason is None and timestep.is_cuda and torch.cuda.is_current_stream_capturing():
            reason = "a CUDA graph is being captured"
        if reason is not None:
            fast.count_stock(name, reason)
            return embed(timestep)
        return site.embed(timestep, embed)

    return forward
