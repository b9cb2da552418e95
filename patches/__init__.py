"""All that knows diffusers' internals: which forwards are replaced, by what, and how they are put back."""

from .ada_embedding import ADA_EMBEDDINGS
from .ada_embedding import make_forward as make_ada_embedding_forward
from .attention import ATTENTIONS
from .attention import make_forward as make_attention_forward
from .block import make_forward as make_block_forward
from .feed_forward import make_forward as make_gelu_forward
from .host import activations, transformer_ltx2
from .model import make_forward as make_model_forward
from .patch import Patch, strip
from .rope import ROPES
from .rope import make_forward as make_rope_forward

FEED_FORWARDS = ("ff", "audio_ff")


def forget_copies(transformer) -> None:
    """Make `transformer` stock where a deep copy made it run the replacements of another; a no-op for its own."""
    for module in transformer.modules():
        strip(module)


def build(fast, transformer) -> dict[str, Patch]:
    """The patches of one transformer by the name of the module each belongs to; nothing is applied yet."""
    host = transformer_ltx2
    patches = {}

    def patch(name, module, host_class, forward):
        if type(module) is host_class:
            patches[name] = Patch(module, host_class.forward, forward)

    patch("transformer", transformer, host.LTX2VideoTransformer3DModel, make_model_forward(fast))
    for name in ADA_EMBEDDINGS:
        patch(name, getattr(transformer, name, None), host.LTX2AdaLayerNormSingle, make_ada_embedding_forward(fast, name))
    for name in ROPES:
        patch(name, getattr(transformer, name, None), host.LTX2AudioVideoRotaryPosEmbed, make_rope_forward(fast, name))
    block_forward = make_block_forward(fast)
    attention_forwards = {name: make_attention_forward(fast, name) for name in ATTENTIONS}
    gelu_forwards = {name: make_gelu_forward(fast, name) for name in FEED_FORWARDS}
    for i, block in enumerate(transformer.transformer_blocks):
        path = f"transformer_blocks.{i}"
        patch(path, block, host.LTX2VideoTransformerBlock, block_forward)
        for name, forward in attention_forwards.items():
            patch(f"{path}.{name}", getattr(block, name, None), host.LTX2Attention, forward)
        for name, forward in gelu_forwards.items():
            layers = getattr(getattr(block, name, None), "net", [None])
            patch(f"{path}.{name}.net.0", layers[0], activations.GELU, forward)
    return patches
