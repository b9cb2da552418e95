"""SwiGLU MLP in tiles of tokens: torch's matrix products around swiglu.py's kernel, in two buffers that all tiles share.

Formula      w_down(silu(w_gate(x)) · w_up(x)) of each tile of tokens in turn, rounded where swiglu.py says.
Order        that of torch's matrix products, which choose their kernel by the number of rows: the rows are the host's, a tile of
             every batch row at once. The last product writes where the result is to be.
Shapes       x [B, tokens..., D], contiguous; weights [F, D], [F, D] and [D, F], no biases.
Dtypes       bf16, fp16, fp32, the weights' the same.
"""

import math

import torch

from . import swiglu
from .support import DEVICE_TYPES, DTYPES, is_untouched, layout, random

CANDIDATES = swiglu.CANDIDATES


def eager(w_gate, w_up, w_down, x, tile):
    """The host's arithmetic, by its own modules."""
    tokens = math.prod(x.shape[1:-1])
    if tokens <= tile:
        return w_down(swiglu.eager(w_gate(x), w_up(x)))
    flat = x.reshape(x.shape[0], tokens, x.shape[-1])
    out = torch.empty_like(flat)
    for part, place in zip(flat.split(tile, 1), out.split(tile, 1)):
        place.copy_(w_down(swiglu.eager(w_gate(part), w_up(part))))
    return out.reshape(x.shape)


def _weight(linear):
    """The weight of a plain linear layer without bias and hooks; None for any other module, which must be called."""
    if type(linear) is not torch.nn.Linear or linear.bias is not None or not is_untouched(linear):
        return None
    weight = linear._parameters["weight"]
    return weight if type(weight) is torch.nn.Parameter else None


def signature(w_gate, w_up, w_down, x, tile):
    return *(layout(_weight(linear)) for linear in (w_gate, w_up, w_down)), layout(x), tile


def refusal(w_gate, w_up, w_down, x, tile) -> str | None:
    """Why the kernel cannot take these arguments, naming one; None if it can. Reads metadata only."""
    if x.ndim < 3 or x.numel() == 0 or not x.is_contiguous():
        return f"x: shape {list(x.shape)}, strides {x.stride()}; expected contiguous [B, tokens..., D], and some tokens"
    if x.dtype not in DTYPES or x.device.type not in DEVICE_TYPES:
        return f"x: {x.dtype} on {x.device}; expected {', '.join(map(str, DTYPES))} on {' or '.join(DEVICE_TYPES)}"
    for name, linear in (("w_gate", w_gate), ("w_up", w_up), ("w_down", w_down)):
        weight = _weight(linear)
        if weight is None or weight.dtype != x.dtype or weight.device != x.device:
            return f"{name}: not a plain torch.nn.Linear without bias, of x's dtype and device"
    width, hidden = x.shape[-1], w_gate.weight.shape[0]
    if not w_gate.weight.shape == w_up.weight.shape == w_down.weight.shape[::-1] == (hidden, width):
        return f"w_gate: shapes of the weights do not fit each other and x's width {width}"
    return None


def rehearsals(w_gate, w_up, w_down, x, tile):
    """Tokens enough to convict a wrong exponential, which a small live input may not."""
    yield w_gate, w_up, w_down, random(1, 4096, x.shape[-1], dtype=x.dtype, device=x.device), tile


def launch(candidate, w_gate, w_up, w_down, x, tile):
    """Launch without checks; `refusal` must have returned None for this layout."""
    batch, width = x.shape[0], x.shape[-1]
    to_gate, to_up, to_down = (linear._parameters["weight"].t() for linear in (w_gate, w_up, w_down))
    flat = x.view(batch, -1, width)
    out = torch.empty_like(flat)
    buffers = x.new_empty(2, batch * min(tile, flat.shape[1]), to_gate.shape[1])
    for part, place in zip(flat.split(tile, 1), out.split(tile, 1)):
        rows = part.reshape(-1, width)
        gate, up = buffers[:, : len(rows)]
        torch.mm(rows, to_gate, out=gate)
        torch.mm(rows, to_up, out=up)
        swiglu.launch(candidate, gate, up, gate)  # each value is read before it is written
        if batch == 1:
            torch.mm(gate, to_down, out=place[0])
        else:
            place.copy_(torch.mm(gate, to_down).view(place.shape))
    return out.view(x.shape)


def swiglu_mlp(w_gate, w_up, w_down, x, tile, *, candidate=CANDIDATES[0]):
    """``w_down(silu(w_gate(x)) * w_up(x))``, a tile of tokens at a time.

    Args:
        w_gate, w_up, w_down: plain ``torch.nn.Linear`` modules without biases.
        x: [B, tokens..., D], bf16, fp16 or fp32, contiguous.
        tile: how many tokens of each batch row are computed at a time.
        candidate: one of ``CANDIDATES``.

    Returns:
        A new tensor shaped like x.

    Raises:
        ValueError: an argument has the wrong kind, dtype, device, shape or layout; the message names it.
    """
    if reason := refusal(w_gate, w_up, w_down, x, tile):
        raise ValueError(f"swiglu_mlp: {reason}")
    return launch(candidate, w_gate, w_up, w_down, x, tile)
