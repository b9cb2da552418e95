"""What we know of the transformer in diffusers: its sources, and which attribute plays which role.

To support a new release: read the diff of these methods against the last known release, and add its hashes here if the
arithmetic and the signature are the same. ``python tests/check_hosts.py --run`` checks the hashes of every release from 0.38.0
on, and runs denoising steps on each.
"""

from diffusers.models import normalization
from diffusers.models.transformers import transformer_ltx2

# First 16 digits of sha256 over the source. diffusers 0.38.0 to 0.42.1.
KNOWN = {
    "apply_split_rotary_emb": {"101de9c72dfea98a"},
    "LTX2AudioVideoAttnProcessor.__call__": {"0391667b7f0a45ae"},
    "LTX2PerturbedAttnProcessor.__call__": {"ab3b88fd4d262072"},
    "LTX2Attention.forward": {"defe2a9bb6a171cf"},
    "LTX2VideoTransformerBlock.get_mod_params": {"493775244f201a41"},
    "LTX2VideoTransformerBlock.forward": {"423e907eb908ef50", "1dbdd9ab731b53b9"},
    "LTX2VideoTransformer3DModel.forward": {"7d68208f6f551504", "d282e2ca1a4fe54e", "a7afa20cff488178", "2f980786b7f8bc59"},
    "LTX2AdaLayerNormSingle.forward": {"865d9aa1d7f8cd67"},
    "LTX2AudioVideoRotaryPosEmbed.forward": {"6432e1c51dd6807a"},
    "RMSNorm.forward": {"fa91ca74b4badaaf", "ab9075d036873ac9"},
}

# Modules of the transformer.
BLOCKS = "transformer_blocks"
ROPES = ("rope", "audio_rope", "cross_attn_rope", "cross_attn_audio_rope")
ADA_EMBEDDINGS = (
    "time_embed",
    "audio_time_embed",
    "prompt_adaln",
    "audio_prompt_adaln",
    "av_cross_attn_video_scale_shift",
    "av_cross_attn_video_a2v_gate",
    "av_cross_attn_audio_scale_shift",
    "av_cross_attn_audio_v2a_gate",
)
# Modules of a block.
ATTENTIONS = ("attn1", "attn2", "audio_attn1", "audio_attn2", "audio_to_video_attn", "video_to_audio_attn")
# Prefixes of what a block and the forward's arguments have for each stream.
STREAMS = ("", "audio_")
# Arguments of the forward.
COORDINATES = ("video_coords", "audio_coords")


def methods() -> dict:
    """The methods whose arithmetic we take over, by the names in `KNOWN`.

    Raises:
        AttributeError: one of them is not there.
    """
    block, attention = transformer_ltx2.LTX2VideoTransformerBlock, transformer_ltx2.LTX2Attention
    return {
        "LTX2VideoTransformerBlock.forward": block.forward,
        "LTX2VideoTransformerBlock.get_mod_params": block.get_mod_params,
        "LTX2Attention.forward": attention.forward,
        "LTX2AudioVideoAttnProcessor.__call__": transformer_ltx2.LTX2AudioVideoAttnProcessor.__call__,
        "LTX2PerturbedAttnProcessor.__call__": transformer_ltx2.LTX2PerturbedAttnProcessor.__call__,
        "apply_split_rotary_emb": transformer_ltx2.apply_split_rotary_emb,
        "LTX2VideoTransformer3DModel.forward": transformer_ltx2.LTX2VideoTransformer3DModel.forward,
        "LTX2AdaLayerNormSingle.forward": transformer_ltx2.LTX2AdaLayerNormSingle.forward,
        "LTX2AudioVideoRotaryPosEmbed.forward": transformer_ltx2.LTX2AudioVideoRotaryPosEmbed.forward,
        "RMSNorm.forward": normalization.RMSNorm.forward,
    }
