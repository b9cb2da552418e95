"""All that knows diffusers' internals: which forwards are replaced, by what, and how they are put back."""

from .attention import ATTENTIONS
from .attention import make_forward as make_attention_forward
from .block import make_forward as make_block_forward
from .host import transformer_ltx2
from .patch import Patch


def build(fast, transformer) -> dict[str, Patch]:
    """The patches of one transformer by the name of the module each belongs to; nothing is applied yet."""
    block_class, attention_class = transformer_ltx2.LTX2VideoTransformerBlock, transformer_ltx2.LTX2Attention
    block_forward = make_block_forward(fast)
    attention_forwards = {name: make_attention_forward(fast, name) for name in ATTENTIONS}
    patches = {}
    for i, block in enumerate(transformer.transformer_blocks):
        if type(block) is block_class:
            patches[f"transformer_blocks.{i}"] = Patch(block, block_class.forward, block_forward)
        for name, forward in attention_forwards.items():
            attention = getattr(block, name, None)
            if type(attention) is attention_class:
                patches[f"transformer_blocks.{i}.{name}"] = Patch(attention, attention_class.forward, forward)
    return patches
