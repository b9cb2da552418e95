"""The upsamplers' forward: channels to positions in one copy."""

import functools

from .host import ltx2_diffusion_decoder


def make_forward(parts):
    """The replacement forward for the upsamplers of one decoder."""
    stock = ltx2_diffusion_decoder.LTX2VideoVaePixelShuffleUpsampler.forward
    handle, site = parts.handle, parts.ops["decoder.pixel_shuffle"]

    @functools.wraps(stock)
    def forward(self, hidden_states, drop_leading_frame=True):
        if reason := handle.why_not(hidden_states):
            handle.count_stock(site.site, reason)
            return stock(self, hidden_states, drop_leading_frame)
        return site(self.proj(hidden_states), self.stride, self.stride[0] == 2 and drop_leading_frame)

    return forward
