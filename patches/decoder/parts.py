"""What takes the place of one diffusion decoder's forwards: its sites, what they share, and the patches."""

from ltx2_fastpath.first_sight import FirstSight
from ltx2_fastpath.ops import pixel_shuffle, qk_norm_rope_3d, residual_rms_norm, swiglu_mlp

from .. import handle
from ..patch import Patch
from . import attention, block, host, mlp, upsampler
from .host import ltx2_diffusion_decoder

# The op of every place in the decoder.
_OPS = {
    "decoder.norm1": residual_rms_norm,
    "decoder.qk_norm_rope_3d": qk_norm_rope_3d,
    "decoder.norm2": residual_rms_norm,
    "decoder.mlp": swiglu_mlp,
    "decoder.pixel_shuffle": pixel_shuffle,
}


class Parts:
    """Everything that the replacement forwards of one decoder have in common.

    Attributes:
        handle: the switch and the settings. ops: the `FirstSight` of every place, by name. grids: the tables of the last grids.
    """

    def __init__(self, handle: "handle.FastPath", model):
        self.handle = handle
        self.ops = {site: FirstSight(site, op, handle.warned) for site, op in _OPS.items()}
        self.grids = attention.Grids()
        self._model = model

    @property
    def sites(self) -> dict[str, "handle.Site"]:
        """Every site by the name that reports show."""
        return dict(self.ops)

    def configured(self) -> None:
        """Nothing hangs on the settings."""

    def patches(self) -> dict[str, Patch]:
        """The patches of the decoder by the name of the module each belongs to; nothing is applied yet."""
        decoder, found = getattr(self._model, host.DECODER), {}
        del self._model  # whoever holds the parts must not hold the model with them
        forwards = {
            ltx2_diffusion_decoder.LTX2VideoVaeNABlock: block.make_forward(self),
            ltx2_diffusion_decoder.LTX2VideoVaeDiffusionNABlock: block.make_modulated_forward(self),
            ltx2_diffusion_decoder.LTX2VideoVaeSwiGLU: mlp.make_forward(self),
            ltx2_diffusion_decoder.LTX2VideoVaePixelShuffleUpsampler: upsampler.make_forward(self),
        }
        attention_class = ltx2_diffusion_decoder.LTX2VideoVaeNeighborhoodAttention
        project_qkv = attention.make_project_qkv(self)
        for name, module in decoder.named_modules(prefix=host.DECODER):
            if type(module) is attention_class:
                found[name] = Patch(module, attention_class.project_qkv, project_qkv)
            elif type(module) in forwards:
                found[name] = Patch(module, type(module).forward, forwards[type(module)])
        return found
