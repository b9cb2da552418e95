"""Ada values: every ``table + temb`` add of a transformer block in one launch.

Formula      ada[b, t, j, d] = table[j, d] + temb[b, t, j·D + d], one rounding to the promoted dtype.
Shapes       per pair: table [n, D] (rows contiguous), temb [B, T, n·D] (last dimension contiguous, any other strides);
             T is 1 for a row modulation, or the number of tokens for a per-token one. Widths may differ between pairs. A
             per-token temb with few distinct rows may come as support.IndexedRows: only those rows are added to.
Result       per pair a tuple of n views [B, T, D], or of n IndexedRows; all pairs share one allocation.
Dtypes       bf16, fp16 or fp32 tables and tembs; the result has torch's promoted dtype, the same for every pair.
Order        pointwise: nothing to reproduce but the rounding.
Verified on  NVIDIA H200.
"""

import torch
import triton
import triton.language as tl

from .support import DEVICE_TYPES, DTYPES, IndexedRows, layout, on_device

CANDIDATES = (None,)


def eager(*pairs):
    """The host's arithmetic (``LTX2VideoTransformerBlock.get_mod_params``), pair by pair."""
    values = []
    for table, temb in pairs:
        rows = _rows(temb)
        batch, tokens, _ = rows.shape
        ada = table[None, None].to(rows.device) + rows.reshape(batch, tokens, table.shape[0], -1)
        values.append(_like(temb, ada))
    return values


def _rows(temb) -> torch.Tensor:
    """The rows that are added to: temb itself, or as [1, n, n·D] the distinct ones of an indexed temb."""
    return temb.values.unsqueeze(0) if isinstance(temb, IndexedRows) else temb


def _like(temb, ada: torch.Tensor) -> tuple:
    """The n values of ada [B, T, n, D], indexed if temb is."""
    if isinstance(temb, IndexedRows):
        return tuple(IndexedRows(values, temb.index) for values in ada[0].unbind(1))
    return ada.unbind(2)


@triton.jit
def _add_row(p_table, p_temb, p_out, row, tokens, batch_stride, token_stride, N: tl.constexpr, D: tl.constexpr):
    o_d = tl.arange(0, triton.next_power_of_2(D))
    inside = o_d < D
    o_j = row % N
    p_temb += row // (tokens * N) * batch_stride + (row // N) % tokens * token_stride + o_j * D
    b_table = tl.load(p_table + o_j * D + o_d, mask=inside).to(tl.float32)
    b_temb = tl.load(p_temb + o_d, mask=inside).to(tl.float32)
    tl.store(p_out + row * D + o_d, (b_table + b_temb).to(p_out.dtype.element_ty), mask=inside)


@triton.jit
def _ada_values_kernel(
    p_tables, p_tembs, p_out, batches, tokens, batch_strides, token_strides, ROWS: tl.constexpr, WIDTHS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    for i in tl.static_range(len(ROWS)):
        count = batches[i] * tokens[i] * ROWS[i]
        if (row >= 0) & (row < count):
            _add_row(
                p_tables[i], p_tembs[i], p_out, row, tokens[i], batch_strides[i], token_strides[i], ROWS[i], WIDTHS[i]
            )  # fmt: skip
        row -= count
        p_out += count.to(tl.int64) * WIDTHS[i]


def signature(*pairs):
    return tuple((layout(table), layout(temb)) for table, temb in pairs)


def refusal(*pairs) -> str | None:
    """Why the kernel cannot take these pairs, naming the argument; None if it can. Reads metadata only."""
    if not pairs:
        return "pairs: at least one (table, temb) is needed"
    rows = [(table, _rows(temb)) for table, temb in pairs]
    device = rows[0][1].device
    dtype = torch.promote_types(rows[0][0].dtype, rows[0][1].dtype)
    for i, (table, temb) in enumerate(rows):
        if table.ndim != 2:
            return f"table {i}: expected rank 2 [n, D], got {list(table.shape)}"
        if temb.ndim != 3:
            return f"temb {i}: expected rank 3 [B, T, n·D], got {list(temb.shape)}"
        for name, x in (("table", table), ("temb", temb)):
            if x.device != device or x.device.type not in DEVICE_TYPES:
                return f"{name} {i}: on {x.device}, expected {device} of type {' or '.join(DEVICE_TYPES)}"
            if x.dtype not in DTYPES:
                return f"{name} {i}: unsupported dtype {x.dtype}"
        if torch.promote_types(table.dtype, temb.dtype) != dtype:
            return f"table {i}, temb {i}: dtypes {table.dtype} and {temb.dtype} do not promote to {dtype}"
        if temb.shape[2] != table.numel():
            return f"temb {i}: width {temb.shape[2]}, but table {i} is {list(table.shape)}"
        if not table.is_contiguous():
            return f"table {i}: rows must be contiguous, got strides {table.stride()}"
        if temb.stride(2) != 1:
            return f"temb {i}: the last dimension must be contiguous, got strides {temb.stride()}"
        if temb.numel() == 0:
            return f"temb {i}: empty"
    return None


def rehearsals(*pairs):
    return ()


def launch(candidate, *pairs):
    """Launch without checks; `refusal` must have returned None for this layout."""
    buffer = _launch([table for table, _ in pairs], [_rows(temb) for _, temb in pairs])
    values, start = [], 0
    for table, temb in pairs:
        rows = _rows(temb)
        stop = start + rows.numel()
        values.append(_like(temb, buffer[start:stop].view(rows.shape[0], rows.shape[1], *table.shape)))
        start = stop
    return values


def _launch(tables, tembs):
    rows = tuple(table.shape[0] for table in tables)
    widths = tuple(table.shape[1] for table in tables)
    batches, tokens = tuple(temb.shape[0] for temb in tembs), tuple(temb.shape[1] for temb in tembs)
    programs = sum(b * t * n for b, t, n in zip(batches, tokens, rows))
    dtype = torch.promote_types(tables[0].dtype, tembs[0].dtype)
    buffer = torch.empty(sum(temb.numel() for temb in tembs), dtype=dtype, device=tembs[0].device)
    batch_strides = tuple(temb.stride(0) for temb in tembs)
    token_strides = tuple(temb.stride(1) for temb in tembs)
    with on_device(buffer):
        _ada_values_kernel[(programs,)](
            tuple(tables), tuple(tembs), buffer, batches, tokens, batch_strides, token_strides, rows, widths, num_warps=4
        )  # fmt: skip
    return buffer


def ada_values(*pairs):
    """Ada values of several (table, temb) pairs in one launch.

    Args:
        pairs: tuples of a table [n, D] and a temb [B, T, n·D] (or IndexedRows of such rows), in bf16, fp16 or fp32.

    Returns:
        A list with one tuple per pair: n views [B, T, D] of one shared allocation, in the promoted dtype.

    Raises:
        ValueError: an argument has the wrong rank, dtype, device, width or layout; the message names it.
    """
    if torch.compiler.is_compiling():
        return eager(*pairs)
    if reason := refusal(*pairs):
        raise ValueError(f"ada_values: {reason}")
    return launch(None, *pairs)
