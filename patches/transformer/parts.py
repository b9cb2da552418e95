"""What takes the place of one transformer's forwards: its sites, what they share, and the patches."""

from ltx2_fastpath.first_sight import FirstSight
from ltx2_fastpath.ops import ada_values, gated_residual, head_gate, qk_norm_split_rope, rms_norm_modulate

from .. import handle
from ..patch import Patch
from . import ada_embedding, attention, block, host, model, rope
from .ada_embedding import DistinctTimesteps
from .graphs import Graphs
from .guidance import PrefixReuse
from .high import Latents, TextMask
from .host import transformer_ltx2
from .rope import TableCache
from .stack import Stack


class Parts:
    """Everything that the replacement forwards of one transformer have in common; layers share it.

    Attributes:
        handle: the switch and the settings. stack: the blocks as a whole.
        ops: the `FirstSight` of every place in a block where an op stands, by name.
        tables, distinct: what replaces each rotary and each adaLN embedding, by the module's name.
        latents, text_masks: what quality "high" changes, by the stream's prefix.
        guidance: what the passes of a step share. graphs: whole forwards as CUDA graphs.
    """

    def __init__(self, handle: "handle.FastPath", transformer):
        self.handle = handle
        self.stack = Stack(handle, transformer)
        self.ops = {site: FirstSight(site, op, handle.warned) for site, op in _ops().items()}
        self.tables = {name: TableCache(f"{name}.tables") for name in host.ROPES}
        self.distinct = {name: DistinctTimesteps(f"{name}.distinct") for name in host.ADA_EMBEDDINGS}
        self.latents = {stream: Latents(f"{stream}latents") for stream in host.STREAMS}
        self.text_masks = {stream: TextMask(f"{stream}text.mask") for stream in host.STREAMS}
        self.guidance = PrefixReuse("guidance.prefix")
        self.graphs = Graphs("cuda_graphs")
        self._transformer = transformer

    @property
    def sites(self) -> dict[str, "handle.Site"]:
        """Every site by the name that reports show."""
        listed: list[handle.Site] = [*self.ops.values(), *self.tables.values(), *self.distinct.values()]
        listed += [*self.latents.values(), *self.text_masks.values(), self.guidance, self.graphs]
        return {site.site: site for site in listed}

    def configured(self) -> None:
        """Graphs go, with their memory, where they are not wanted any more."""
        if not self.handle.cuda_graphs:
            self.graphs.clear()

    def patches(self) -> dict[str, Patch]:
        """The patches of the transformer by the name of the module each belongs to; nothing is applied yet."""
        transformer, found = self._transformer, {}
        del self._transformer  # whoever holds the parts must not hold the model with them

        def patch(name, module, host_class, forward):
            if type(module) is host_class:
                found[name] = Patch(module, host_class.forward, forward)

        patch("transformer", transformer, transformer_ltx2.LTX2VideoTransformer3DModel, model.make_forward(self))
        for name in host.ADA_EMBEDDINGS:
            forward = ada_embedding.make_forward(self, name)
            patch(name, getattr(transformer, name, None), transformer_ltx2.LTX2AdaLayerNormSingle, forward)
        for name in host.ROPES:
            forward = rope.make_forward(self, name)
            patch(name, getattr(transformer, name, None), transformer_ltx2.LTX2AudioVideoRotaryPosEmbed, forward)
        block_forward = block.make_forward(self)
        attention_forwards = {name: attention.make_forward(self, name) for name in host.ATTENTIONS}
        for i, module in enumerate(getattr(transformer, host.BLOCKS)):
            path = f"{host.BLOCKS}.{i}"
            patch(path, module, transformer_ltx2.LTX2VideoTransformerBlock, block_forward)
            for name, forward in attention_forwards.items():
                patch(f"{path}.{name}", getattr(module, name, None), transformer_ltx2.LTX2Attention, forward)
        return found


def _ops() -> dict:
    """The op of every place in a block, by name."""
    ops = {"ada_values": ada_values}
    for stream, cross_norm in (("", "audio_to_video_norm"), ("audio_", "video_to_audio_norm")):
        ops |= {
            f"{stream}norm1": rms_norm_modulate,
            f"{stream}text": rms_norm_modulate,
            f"{stream}norm2": gated_residual,
            cross_norm: gated_residual,
            f"{stream}norm3": gated_residual,
            f"{stream}norm3.without_residual": rms_norm_modulate,
            f"{stream}residual": gated_residual,
        }
    for name in host.ATTENTIONS:
        ops |= {
            f"{name}.qk_norm_split_rope": qk_norm_split_rope,
            f"{name}.split_rope": qk_norm_split_rope,
            f"{name}.head_gate": head_gate,
        }
    return ops
