"""The rotary embeddings' forward: compact tables, kept while the coordinates stay the same.

The host rebuilds four embeddings in every forward although they depend on coordinates only, which do not change between passes
and steps. Coordinates are recognised by storage and version counter; those of a new request, once, by their values.
"""

import functools
import itertools

import torch

from ltx2_fastpath.first_sight import bits, is_capturing
from ltx2_fastpath.ops.rope_tables import CompactTables, Rope, compact_tables

from .host import transformer_ltx2

# Coordinates: two batch sizes (CFG and the passes beside it) of eight clip sizes. An entry takes about 2 MB.
_KEPT = 16
_NAMES = 4  # tensors that are known to hold the same coordinates: a step's passes may have one each
_numbers = itertools.count()


def make_forward(parts, name):
    """The replacement forward for the embedding called `name`."""
    stock = transformer_ltx2.LTX2AudioVideoRotaryPosEmbed.forward
    handle = parts.handle

    @functools.wraps(stock)
    def forward(self, coords, device=None):
        reason = handle.why_not(coords)
        if reason is None and self.rope_type != "split":
            reason = f"rope_type is {self.rope_type!r}"
        elif reason is None and device is not None and torch.device(device) != coords.device:
            reason = "the coordinates are on another device"
        elif reason is None and parts.stack.is_compiled():
            reason = "the blocks are compiled and take plain tensors"
        if reason is not None:
            handle.count_stock(name, reason)
            return stock(self, coords, device)
        tables = tables_of(parts, name, self, coords)
        return stock(self, coords, device) if tables is None or tables.compact is None else MovableRope(tables.compact)

    return forward


def tables_of(parts, name, embedding, coords) -> "Tables | None":
    """The tables of `embedding`, which is called `name`, for `coords`; None where nothing may be looked at, or it is left out."""
    # What its result depends on beside the coordinates.
    settings = tuple(item for item in vars(embedding).items() if isinstance(item[1], (int, float, str, tuple)))
    embed = functools.partial(transformer_ltx2.LTX2AudioVideoRotaryPosEmbed.forward, embedding)
    return parts.tables[name].find(coords, settings, embed)


class MovableRope(Rope):
    """A Rope that hooks can send to a block's device (`device_map`), as they send the tuple of tensors that it stands for."""

    def to(self, device, non_blocking: bool = False):
        parts = self.compact._asdict().items()
        tables = {name: part.to(device, non_blocking=non_blocking) for name, part in parts if torch.is_tensor(part)}
        return self if tables["cos"] is self.compact.cos else MovableRope(self.compact._replace(**tables))


class Tables:
    """What is known of some coordinates.

    Attributes:
        compact: their tables; None where the coordinates do not repeat enough. number: nothing else's, so that it can stand for
        coordinates, settings and tables in a key.
    """

    def __init__(self, coords: torch.Tensor, settings: tuple, compact: CompactTables | None):
        self.compact = compact
        self.number = next(_numbers)
        self.coords = coords.clone()  # nobody changes it in place
        self.settings = settings
        self._names: list[tuple] = []

    def is_named(self, name: tuple) -> bool:
        """Whether these are the coordinates that lie where `name` says."""
        return any(name == known for known, _ in self._names)

    def add_name(self, name: tuple | None, coords: torch.Tensor) -> None:
        """Remember that `coords` holds these coordinates. It is kept alive, so that its address cannot come to mean others."""
        if name is not None:
            self._names = [(name, coords), *self._names[: _NAMES - 1]]

    def are(self, coords: torch.Tensor, settings: tuple) -> bool:
        """Whether these are the coordinates in `coords`, by their bits. Synchronises."""
        kept = self.coords
        alike = (kept.shape, kept.dtype, kept.device, self.settings) == (coords.shape, coords.dtype, coords.device, settings)
        return alike and torch.equal(bits(kept), bits(coords))


class TableCache:
    """The tables of the coordinates that one embedding was given last.

    Each CUDA stream has entries of its own: what one makes another may not read yet, nor reuse the memory of.

    Attributes:
        site: its name in reports; fast: calls answered from here; stock: calls that computed tables, all of them `first` sights;
        left_out: whether the host computes them; notes: what they were.
    """

    def __init__(self, site: str):
        self.site = site
        self.fast = 0
        self.stock = 0
        self.first = 0
        self.left_out = False
        self.notes: list[str] = []
        self._entries: list[tuple[int, Tables]] = []  # (stream, tables), those asked for last first

    def find(self, coords, settings, embed) -> Tables | None:
        """The tables for `coords`, made by the host's `embed` if need be; `settings` is what else `embed` depends on."""
        if self.left_out:
            self.stock += 1
            return None
        name = None
        if not coords.is_inference():
            name = coords.data_ptr(), coords._version, coords.shape, coords.stride(), coords.dtype, coords.device, settings
        entries, capturing = self._entries, coords.is_cuda and is_capturing()
        stream = torch.cuda.current_stream(coords.device).cuda_stream if coords.is_cuda else 0
        for entry in entries:
            if name is not None and (capturing or entry[0] == stream) and entry[1].is_named(name):
                return self._found(entry)
        if capturing:
            self.stock += 1
            return None
        for entry in entries:
            if entry[0] == stream and entry[1].are(coords, settings):
                entry[1].add_name(name, coords)
                return self._found(entry)
        tables = Tables(coords, settings, compact_tables(coords, embed))
        tables.add_name(name, coords)
        self.stock += 1
        self.first += 1
        self.notes = [_told(coords, tables.compact)]
        self._entries = [(stream, tables), *self._entries[: _KEPT - 1]]
        return tables

    def _found(self, entry) -> Tables:
        self.fast += 1
        if self._entries[0] is not entry:
            self._entries = [entry, *(other for other in self._entries if other is not entry)]
        return entry[1]


def _told(coords, compact) -> str:
    told = "do not repeat enough"
    if compact is not None:
        columns = 0 if compact.columns is None else len(compact.columns)
        told = f"are {len(compact.cos) + columns} table rows, bit-equal to the host's"
    return f"{coords.shape[0] * coords.shape[2]} tokens {told}"
