"""The sites of a transformer: every place in the block where an op stands, by name. Layers share them."""

from typing import Any

from .first_sight import FirstSight
from .ops import ada_values, gated_residual, gelu, head_gate, qk_norm_split_rope, rms_norm_modulate
from .patches import ADA_EMBEDDINGS, ATTENTIONS, FEED_FORWARDS, ROPES
from .patches.ada_embedding import DistinctTimesteps
from .patches.graphs import Graphs
from .patches.high import STREAMS, Latents, TextMask
from .patches.model import PrefixReuse
from .patches.rope import TableCache


def build_sites(warned: set) -> dict:
    """A fresh state for each site by name; each counts its `fast` and `stock` calls and has `notes`.

    `warned` is shared between the ops' sites so that one cause is told once.
    """
    ops: dict[str, Any] = {"ada_values": ada_values}
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
    for name in ATTENTIONS:
        ops |= {
            f"{name}.qk_norm_split_rope": qk_norm_split_rope,
            f"{name}.split_rope": qk_norm_split_rope,
            f"{name}.head_gate": head_gate,
        }
    ops |= {f"{name}.gelu": gelu for name in FEED_FORWARDS}
    sites: dict[str, Any] = {site: FirstSight(site, op, warned) for site, op in ops.items()}
    sites |= {f"{name}.tables": TableCache(f"{name}.tables") for name in ROPES}
    sites |= {f"{name}.distinct": DistinctTimesteps(f"{name}.distinct") for name in ADA_EMBEDDINGS}
    sites |= {f"{stream}latents": Latents(f"{stream}latents") for stream in STREAMS}
    sites |= {f"{stream}text.mask": TextMask(f"{stream}text.mask") for stream in STREAMS}
    return sites | {"guidance.prefix": PrefixReuse("guidance.prefix"), "cuda_graphs": Graphs("cuda_graphs")}
