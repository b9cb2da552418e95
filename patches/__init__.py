"""All that knows diffusers' internals: which forwards are replaced, by what, and how they are put back.

Each model of diffusers that can be made fast has a room of its own here, a package of three parts: `host` (what it knows of the
model's sources), `parts` (what takes the place of its forwards) and the replacement forwards. What rooms share lies beside them.
"""

import importlib
from typing import NamedTuple

import torch

from .handle import Parts


class Room(NamedTuple):
    """A model of diffusers, or what works beside one: its class, the pipelines' component that holds it, and its package here."""

    model: str
    component: str
    package: str
    beside: bool = False  # whether it is made fast only in a pipeline beside a model that can be

    def host(self):
        """What the room knows of the model's sources: a module with `MODULES`, `KNOWN` and `methods()`."""
        return importlib.import_module(f"{__name__}.{self.package}.host")

    def parts(self, handle, model: torch.nn.Module) -> Parts:
        """What takes the place of the model's forwards; nothing is applied yet. Needs Triton."""
        return importlib.import_module(f"{__name__}.{self.package}.parts").Parts(handle, model)


ROOMS = (
    Room("LTX2VideoTransformer3DModel", "transformer", "transformer"),
    Room("LTX2VideoDiffusionDecoderModel", "diffusion_decoder", "decoder"),
    Room("VideoProcessor", "video_processor", "frames", beside=True),
)
