"""The MLP's forward: the host's tiles, without its copies."""

import functools

from .host import ltx2_diffusion_decoder


def make_forward(parts):
    """The replacement forward for the MLPs of one decoder."""
    stock = ltx2_diffusion_decoder.LTX2VideoVaeSwiGLU.forward
    handle, site = parts.handle, parts.ops["decoder.mlp"]

    @functools.wraps(stock)
    def forward(self, hidden_states):
        if reason := handle.why_not(hidden_states):
            handle.count_stock(site.site, reason)
            return stock(self, hidden_states)
        return site(self.w_gate, self.w_up, self.w_down, hidden_states, ltx2_diffusion_decoder._SWIGLU_TILE_SIZE)

    return forward
