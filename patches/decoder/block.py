"""The blocks' forwards: each residual sum goes with the norm and the modulation that follow it.

Submodules are called in the stock order, which offloading prefetches by.
"""

import functools

from .host import ltx2_diffusion_decoder


def make_forward(parts):
    """The replacement forward for the blocks of the deterministic stages."""
    stock = ltx2_diffusion_decoder.LTX2VideoVaeNABlock.forward
    handle, norm2 = parts.handle, parts.ops["decoder.norm2"]

    @functools.wraps(stock)
    def forward(self, hidden_states, block_mask=None):
        if reason := handle.why_not(hidden_states):
            handle.count_stock("decoder.block", reason)
            return stock(self, hidden_states, block_mask)
        update = self.attn(self.norm1(hidden_states), block_mask)
        hidden_states, normed = norm2(self.norm2, hidden_states, (update,))
        return hidden_states + self.mlp(normed)

    return forward


def make_modulated_forward(parts):
    """The replacement forward for the blocks of the diffusion stage."""
    stock = ltx2_diffusion_decoder.LTX2VideoVaeDiffusionNABlock.forward
    handle, norm1, norm2 = parts.handle, parts.ops["decoder.norm1"], parts.ops["decoder.norm2"]

    @functools.wraps(stock)
    def forward(self, hidden_states, latent_context, modulation, block_mask=None):
        if reason := handle.why_not(hidden_states):
            handle.count_stock("decoder.block", reason)
            return stock(self, hidden_states, latent_context, modulation, block_mask)
        table = self.scale_shift_table
        scale_1, shift_1, scale_2, shift_2 = (modulation[i] + table[i].view(1, 1, 1, 1, -1) for i in (0, 1, 3, 4))
        update = self.context_proj(latent_context)
        hidden_states, normed = norm1(self.norm1, hidden_states, (update,), (scale_1, shift_1))
        update = self.attn(normed, block_mask)
        hidden_states, normed = norm2(self.norm2, hidden_states, (update,), (scale_2, shift_2))
        del update  # a gigabyte or more, which the MLP has a use for
        return hidden_states + self.mlp(normed)

    return forward
