"""The rotary embeddings' forward: compact tables, kept while the coordinates stay the same.

The host rebuilds four embeddings in every forward although they depend on coordinates only, which do not change between passes
and steps. Coordinates are recognised by storage and version counter, and where that says nothing by their values.
"""

import functools

import torch

from ltx2_fastpath.ops.rope_tables import Rope, compact_tables

from .host import transformer_ltx2

ROPES = ("rope", "audio_rope", "cross_attn_rope", "cross_attn_audio_rope")
# Two batch sizes (CFG and the passes beside it) of two requests.
_KEPT = 4


def make_forward(fast, name):
    """The replacement forward for the embedding called `name`."""
    stock = transformer_ltx2.LTX2AudioVideoRotaryPosEmbed.forward

    @functools.wraps(stock)
    def forward(self, coords, device=None):
        reason = fast.why_not(coords)
        if reason is None and self.rope_type != "split":
            reason = f"rope_type is {self.rope_type!r}"
        elif reason is None and device is not None and torch.device(device) != coords.device:
            reason = "the coordinates are on another device"
        elif reason is None and fast.is_compiled():
            reason = "the blocks are compiled and take plain tensors"
        if reason is not None:
            fast.count_stock(name, reason)
            return stock(self, coords, device)
        compact = tables_of(fast, name, self, coords)
        return stock(self, coords, device) if compact is None else MovableRope(compact)

    return forward


def tables_of(fast, name, embedding, coords):
    """The compact tables of `embedding`, which is called `name`, for `coords`; None where they do not repeat enough."""
    # What its result depends on beside the coordinates.
    settings = tuple(item for item in vars(embedding).items() if isinstance(item[1], (int, float, str, tuple)))
    embed = functools.partial(transformer_ltx2.LTX2AudioVideoRotaryPosEmbed.forward, embedding)
    return fast.sites[f"{name}.tables"].find(coords, settings, embed)


class MovableRope(Rope):
    """A Rope that hooks can send to a block's device (`device_map`), as they send the tuple of tensors that it stands for."""

    def to(self, device, non_blocking: bool = False):
        parts = self.compact._asdict().items()
        tables = {name: part.to(device, non_blocking=non_blocking) for name, part in parts if torch.is_tensor(part)}
        return self if tables["cos"] is self.compact.cos else MovableRope(self.compact._replace(**tables))


class TableCache:
    """The compact tables of the last few coordinates that one embedding was given.

    Attributes:
        site: its name in reports; fast, stock: calls answered from here, calls that computed tables; notes: what they were.
    """

    def __init__(self, site: str):
        self.site = site
        self.fast = 0
        self.stock = 0
        self.notes: list[str] = []
        self._entries: list = []

    def find(self, coords, settings, embed):
        """The tables for `coords`, made by the host's `embed` if need be; None where coordinates do not repeat enough.

        `settings` is what else `embed` depends on.
        """
        key = None
        if not coords.is_inference():
            layout = coords.shape, coords.stride(), coords.dtype, coords.device
            key = (coords.data_ptr(), coords._version, *layout, settings)
        for entry in self._entries:
            if key is not None and entry[0] == key:
                self.fast += 1
                return entry[-1]
        if coords.is_cuda and torch.cuda.is_current_stream_capturing():
            self.stock += 1
            return None
        for *_, kept, kept_settings, compact in self._entries:
            alike = (kept.shape, kept.dtype, kept.device) == (coords.shape, coords.dtype, coords.device)
            alike = alike and kept_settings == settings
            if alike and torch.equal(kept, coords):
                self.fast += 1
                return compact
        compact = compact_tables(coords, embed)
        self.stock += 1
        tokens = coords.shape[0] * coords.shape[2]
        told = "do not repeat enough"
        if compact is not None:
            columns = 0 if compact.columns is None else len(compact.columns)
            told = f"are {len(compact.cos) + columns} table rows, bit-equal to the host's"
        self.notes = [f"{tokens} tokens {told}"]
        # The entry keeps the coordinates alive, so that their address cannot come to mean others; a copy, which nobody changes in
        # place, is what is compared.
        self._entries = [(key, coords, coords.clone(), settings, compact), *self._entries[: _KEPT - 1]]
        return compact
