"""Which host sources we know: the hash of the source of every method whose arithmetic we take over.

A release is recognised by what it computes, not by its number. To support a new release: read the diff of these methods
against the last known release, and add its hashes here if the arithmetic and the signature are the same.
``python tests/check_hosts.py --run`` checks the hashes of every release from 0.38.0 on, and runs denoising steps on each.
"""

import functools
import hashlib
import inspect

from diffusers.models import activations, normalization
from diffusers.models.transformers import transformer_ltx2

# First 16 digits of sha256 over `inspect.getsource`. diffusers 0.38.0 to 0.42.1.
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
    "GELU.forward": {"a23bf6faca366d65", "538b05d6963a325c"},
    "GELU.gelu": {"d203f2720ee05f35"},
    "RMSNorm.forward": {"fa91ca74b4badaaf", "ab9075d036873ac9"},
}


def _methods():
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
        "GELU.forward": activations.GELU.forward,
        "GELU.gelu": activations.GELU.gelu,
        "RMSNorm.forward": normalization.RMSNorm.forward,
    }


@functools.lru_cache(maxsize=64)
def source_hash(function) -> str | None:
    """First 16 hexadecimal digits of the sha256 of a function's source; None where the source cannot be read."""
    try:
        return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]
    except (OSError, TypeError):
        return None


def unknown_sources() -> list[str]:
    """The names of the host's methods whose source is not one that we know; empty if the host is supported."""
    try:
        methods = _methods()
    except AttributeError as error:
        return [str(error)]
    return [name for name, function in methods.items() if source_hash(function) not in KNOWN[name]]
