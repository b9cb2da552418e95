"""What we know of the diffusion decoder in diffusers: its sources, and where it is in its model."""

from diffusers.models.autoencoders import ltx2_diffusion_decoder

# First 16 digits of sha256 over the source. diffusers 0.40.0 to 0.42.1; there is none before.
KNOWN = {
    "LTX2VideoVaeRotaryPosEmbed3D.forward": {"854cdcaad274df87"},
    "LTX2VideoVaeRotaryPosEmbed3D._rotate_axis": {"06792935e1b3a0ab"},
    "LTX2VideoVaeNeighborhoodAttention.project_qkv": {"49d9d468c7133498"},
    "LTX2VideoVaeSwiGLU.forward": {"9ec167d5ad747be2"},
    "LTX2VideoVaeNABlock.forward": {"8be8298aa1d47cfc"},
    "LTX2VideoVaeDiffusionNABlock.forward": {"3c0239e272ef2bb4"},
    "LTX2VideoVaePixelShuffleUpsampler.forward": {"d4ebe94fe4bf45ec"},
}

# The part of the model that decodes.
DECODER = "decoder"


def methods() -> dict:
    """The methods whose arithmetic we take over, by the names in `KNOWN`.

    Raises:
        AttributeError: one of them is not there.
    """
    found = {}
    for name in KNOWN:
        owner, method = name.split(".")
        found[name] = getattr(getattr(ltx2_diffusion_decoder, owner), method)
    return found
