"""PIL frames of decoded pixels: the arithmetic of ``VideoProcessor.postprocess_video``, on the device where the pixels are.

The host moves the pixels to the CPU as they are, and there numpy works on one core: fp32, times 255, rounded to even, cast to
uint8, and channels are only seen as the last dimension, so that every frame is gathered value by value. Here torch does the same,
a frame or a few at a time, and what moves are bytes, channels last. NaN is the one value that reaches the cast without having
a place in it; C leaves its byte open, so such a video is given to the host.
"""

import functools

import numpy as np
import torch
from PIL import Image

from .. import handle
from ..patch import Patch
from .host import video_processor

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# Values at a time: a frame or a few. On a CPU they stay in its caches: 0.17 s where chunks eight times as large took 0.30.
_CHUNK = 2**22


class Frames:
    """The place where pixels become frames.

    Attributes:
        site: its name in reports; fast: calls answered by us; stock: those answered by the host; first: 0, because what is
        compared, once a dtype and device, is no call but a `rehearsal`; left_out: whether the host answers all; notes: what came
        of it.
    """

    def __init__(self, site: str):
        self.site = site
        self.fast = 0
        self.stock = 0
        self.first = 0
        self.left_out = False
        self._verdicts: dict[tuple, bool] = {}
        self._reasons: set[str] = set()

    @property
    def notes(self) -> list[str]:
        """How each dtype and device was verified, and why the host answered."""
        told = {True: "bit-equal in rehearsal", False: "other bytes than the host's"}
        found = [f"{told[equal]} for {str(dtype)[6:]} on {device}" for (dtype, device), equal in list(self._verdicts.items())]
        return sorted({*found, *self._reasons})

    def find(self, processor, video, options: dict) -> list[list[Image.Image]] | None:
        """The frames of every video of a batch; None where they are the host's to make."""
        if not self.left_out and (reason := _why_not(processor, video, options)):
            self._reasons.add(reason)
        elif not self.left_out and self._is_verified(processor, video):
            if (found := frames(video)) is not None:
                self.fast += 1
                return found
            self._reasons.add("pixels are NaN")
        self.stock += 1
        return None

    def _is_verified(self, processor, video) -> bool:
        key = video.dtype, video.device
        if key not in self._verdicts:
            trial = rehearsal(*key)
            ours = frames(trial)
            self._verdicts[key] = ours is not None and _same_bytes(ours, _stock(processor, trial, "pil"))
        return self._verdicts[key]


class Parts:
    """What takes the place of one video processor's method.

    Attributes:
        handle: the switch and the settings. frames: the one site.
    """

    def __init__(self, handle: "handle.FastPath", processor):
        self.handle = handle
        self.frames = Frames("frames")
        self._processor = processor

    @property
    def sites(self) -> dict[str, "handle.Site"]:
        """Every site by the name that reports show."""
        return {self.frames.site: self.frames}

    def configured(self) -> None:
        """Nothing hangs on the settings."""

    def patches(self) -> dict[str, Patch]:
        """The one patch; it is not applied yet."""
        processor = self._processor
        del self._processor  # whoever holds the parts must not hold the processor with them
        if type(processor) is not video_processor.VideoProcessor:
            return {}
        return {"video_processor": Patch(processor, _stock, make_method(self))}


_stock = video_processor.VideoProcessor.postprocess_video


def make_method(parts):
    """The replacement of ``postprocess_video`` for one processor."""

    @functools.wraps(_stock)
    def postprocess_video(self, video, output_type="np", **kwargs):
        found = None
        if output_type == "pil":
            if reason := parts.handle.why_off():
                parts.handle.count_stock(parts.frames.site, reason)
            else:
                found = parts.frames.find(self, video, kwargs)
        return _stock(self, video, output_type, **kwargs) if found is None else found

    return postprocess_video


def _why_not(processor, video, options: dict) -> str | None:
    """Why the frames of `video` are the host's to make; None if they are ours. Reads metadata only."""
    if torch.compiler.is_compiling():
        return "torch.compile is tracing"
    if any(value is not None for value in options.values()) or not options.keys() <= {"do_denormalize"}:
        return f"it was called with {', '.join(options)}"
    if not processor.config.do_normalize:
        return "do_normalize is off"
    if replaced := vars(processor).keys() & _METHODS:
        return f"{', '.join(sorted(replaced))} was replaced"
    if type(video) is not torch.Tensor or video.layout != torch.strided or video.device.type not in ("cpu", "cuda"):
        return "the video is no plain tensor on a CPU or a GPU"
    if video.ndim != 5 or video.shape[1] != 3 or video.numel() == 0 or video.dtype not in _DTYPES:
        return f"the video is {video.dtype} {list(video.shape)}"
    if video.requires_grad:
        return "the video requires gradients"
    return None


# What the replaced method calls on the processor.
_METHODS = {"postprocess", "_denormalize_conditionally", "denormalize", "pt_to_numpy", "numpy_to_pil"}


@torch.no_grad()
def frames(video: torch.Tensor) -> list[list[Image.Image]] | None:
    """The PIL frames of every video of a batch [B, 3, F, H, W] with values around -1 to 1; None where a value is NaN.

    The host's arithmetic, operation by operation: half of the value plus a half, each rounded to the dtype; clamped to 0 … 1;
    times 255 in fp32; rounded to even. A NaN is found by the largest value, which is looked at when all bytes are on their way.
    """
    _, channels, count, height, width = video.shape
    step = max(1, _CHUNK // (channels * height * width))
    buffer = video.new_empty(channels, min(step, count), height, width)
    product, byte = torch.empty_like(buffer, dtype=torch.float32), torch.empty_like(buffer, dtype=torch.uint8)
    made, largest = [], []
    for one in video:
        bytes_of_one = torch.empty(count, height, width, channels, dtype=torch.uint8, device=video.device)
        for pixels, out in zip(one.split(step, 1), bytes_of_one.split(step)):
            here = slice(pixels.shape[1])
            torch.mul(pixels, 0.5, out=buffer[:, here]).add_(0.5).clamp_(0, 1)
            largest.append(product[:, here].copy_(buffer[:, here]).mul_(255).amax())
            byte[:, here].copy_(product[:, here].round_())
            out.copy_(byte[:, here].permute(1, 2, 3, 0))
        made.append(bytes_of_one.cpu().numpy())
    if torch.stack(largest).isnan().any():
        return None
    return [[Image.fromarray(frame) for frame in one] for one in made]


def rehearsal(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A video [1, 3, 2, 128, 256] of every 16-bit value but NaN; for fp32 and fp64 of every bf16 one, of even steps, and of
    those next to where the rounding turns.
    """
    every = torch.arange(-32768, 32768).to(torch.int16).view(torch.float16 if dtype == torch.float16 else torch.bfloat16)
    every = every.to(dtype)
    if dtype in (torch.bfloat16, torch.float16):
        channels = every, every.flip(0), every.roll(1000)
    else:
        turns = ((torch.arange(256) + 0.5) / 255 * 2 - 1).float()[:, None]
        near = (turns.view(torch.int32) + torch.arange(-128, 128, dtype=torch.int32)).view(torch.float32).flatten()
        channels = every, torch.linspace(-1.5, 1.5, 65536, dtype=dtype), near.to(dtype)
    return torch.stack(channels).nan_to_num(0.0, torch.inf, -torch.inf).view(1, 3, 2, 128, 256).to(device)


def _same_bytes(ours, stock) -> bool:
    return all(np.array_equal(mine, theirs) for mine, theirs in zip(ours[0], stock[0], strict=True))
