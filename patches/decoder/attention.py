"""What every attention processor asks its module for: q, k and v, with QK-norm, the query's scale and 3-D RoPE in one launch.

The processor and the attention's forward stay as they are, so that any processor, set before or after, gets the same q, k and v.
"""

import functools

import torch

from ltx2_fastpath.first_sight import is_capturing, remember
from ltx2_fastpath.ops.qk_norm_rope_3d import Tables, tables
from ltx2_fastpath.ops.support import is_untouched

from .host import ltx2_diffusion_decoder

_KEPT = 64  # grids: five of a clip whole, and of each kind of tile. One of 544 x 960 x 121 takes 50 KB


class Grids:
    """The tables of the grids that were asked for last. They depend on nothing else but the embedding's settings.

    Each CUDA stream has its own: what one makes another may not read yet, nor reuse the memory of.
    """

    def __init__(self):
        self._tables: dict[tuple, Tables] = {}

    def find(self, rope, grid: tuple[int, int, int], device: torch.device) -> Tables | None:
        """The tables of a grid by the host's module `rope`; None where a CUDA graph is captured that would have to make them."""
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None
        key = grid, device, stream, rope.rope_dim_split, rope.base
        found = self._tables.get(key)
        if found is None and not is_capturing():
            found = tables(rope, grid, device)
            remember(self._tables, key, found, _KEPT)
        return found


def make_project_qkv(parts):
    """The replacement of ``project_qkv`` for the attentions of one decoder."""
    stock = ltx2_diffusion_decoder.LTX2VideoVaeNeighborhoodAttention.project_qkv
    handle, site, grids = parts.handle, parts.ops["decoder.qk_norm_rope_3d"], parts.grids

    @functools.wraps(stock)
    def project_qkv(self, hidden_states):
        reason = handle.why_not(hidden_states)
        rope = None
        if reason is None and not _is_hosts_own(self.rope):
            reason = "its rotary embedding was replaced or has hooks"
        elif reason is None and hidden_states.ndim == 5:
            rope = grids.find(self.rope, tuple(hidden_states.shape[1:4]), hidden_states.device)
        if rope is None:
            handle.count_stock(site.site, reason or "a CUDA graph is captured with a new grid, or the shape is none")
            return stock(self, hidden_states)
        shape = (*hidden_states.shape[:4], self.heads, self.head_dim)
        query, key, value = (project(hidden_states).view(shape) for project in (self.to_q, self.to_k, self.to_v))
        query, key = site(self.norm_q, self.norm_k, self.scale, query, key, rope)
        return query, key, value

    return project_qkv


def _is_hosts_own(rope) -> bool:
    return type(rope) is ltx2_diffusion_decoder.LTX2VideoVaeRotaryPosEmbed3D and is_untouched(rope)
