"""The audio stream of a block on a CUDA stream of its own, beside the video's.

Audio is 126 tokens beside 6,144: its kernels are half of all launches and fill a few multiprocessors for a few microseconds each.
Between the points where the two meet (audio-to-video and video-to-audio cross-attention, and the end of the block) they run side
by side with the video's. No arithmetic changes, only when it happens.

Memory: what one stream made and the other reads stays referenced until both have met again at the end of the block, and the
audio stream starts each block by waiting for the other, so the allocator cannot hand it out too early. Each thread has streams of
its own for the same reason.
"""

import threading

import torch

from . import hooks


class Together:
    """Both streams are one: nothing to wait for."""

    def __enter__(self):
        return self

    def __exit__(self, error_type, error, traceback):
        return None

    def audio(self):
        return self

    def meet(self):
        return None


class Beside:
    """One block's use of the audio stream. Entering forks it off the current stream, leaving joins them."""

    def __init__(self, stream):
        self._stream = stream

    def __enter__(self):
        self._main = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(self._main)
        return self

    def __exit__(self, error_type, error, traceback):
        self._main.wait_stream(self._stream)

    def audio(self):
        """A context for what belongs to the audio stream."""
        return torch.cuda.stream(self._stream)

    def meet(self):
        """Each stream waits for what the other was given so far."""
        self._main.wait_stream(self._stream)
        self._stream.wait_stream(self._main)


class AudioStreams(threading.local):
    """This thread's audio stream on each device."""

    def __init__(self):
        self._streams = {}

    @staticmethod
    def why_not(block) -> str | None:
        """Why the audio of `block` runs in one stream with the video: something may manage its weights' memory by stream."""
        for module in _managed(block):
            if (hook := hooks.managing(module)) is not None:
                return f"a {hook} manages the block's weights"
        return None

    def beside(self, device: torch.device) -> "Beside | Together":
        """A block's audio on `device`, beside its video."""
        if device.type != "cuda":
            return Together()
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device, priority=-1)
        return Beside(stream)


def _managed(block):
    """Offloading hooks a block, or all layers of a kind in it: one of each tells."""
    attention, feed_forward = block.audio_attn1, block.audio_ff
    layers = (attention._modules.get("to_q"), attention._modules.get("norm_q"), *feed_forward.children())
    nested = (layer for child in feed_forward.children() for layer in child.children())
    return (block, attention, feed_forward, *(layer for layer in (*layers, *nested) if layer is not None))
