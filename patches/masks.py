"""Text masks that mask nothing: dropped for requests of quality "high".

The connectors put registers where a prompt is padded, so the masks that the pipelines hand in are all ones, and the host adds a
bias of zeros to every logit of the text attention. Without a bias attention takes 376 instead of 605 µs at 14,080 video tokens
and 1,024 text tokens (NVIDIA H200, bf16). It is another kernel: 0.14 % of its outputs differ. It is as near to
fp64: largest and mean error are 1.85e-3 and 8.86e-5 with and without.
"""

import torch
from torch.utils.weak import WeakTensorKeyDictionary

STREAMS = ("", "audio_")


def drop_idle(fast, arguments: dict) -> bool:
    """Set to None what masks nothing in the `arguments` of the transformer's forward. -> whether there was any"""
    dropped = False
    if fast.tier == "high":
        for stream in STREAMS:
            name = f"{stream}encoder_attention_mask"
            mask, hidden, text = (arguments[key] for key in (name, f"{stream}hidden_states", f"{stream}encoder_hidden_states"))
            if mask is None or fast.why_not(hidden) is not None:
                continue
            if fast.sites[f"{stream}text.mask"].is_idle(mask, hidden, text):
                arguments[name] = None
                dropped = True
    return dropped


class TextMask:
    """Which masks of one stream's text mask nothing; their values are looked at once, not in every forward.

    Attributes:
        site: its name in reports; fast: forwards without their mask; stock: forwards that kept it; notes: why.
    """

    def __init__(self, site: str):
        self.site = site
        self.fast = 0
        self.stock = 0
        self._notes: set[str] = set()
        # {mask: (version, dtype, whether it is idle)}. By identity: an address can come to mean other values. A mask takes its
        # verdict along when it goes, and the pipelines keep theirs for all steps.
        self._verdicts = WeakTensorKeyDictionary()

    @property
    def notes(self) -> list[str]:
        return sorted(self._notes)

    def is_idle(self, mask, hidden, text) -> bool:
        """Whether `mask` lets `hidden` attend to all of `text`. Synchronises where it must look at the values."""
        reason = _why_unreadable(mask, hidden, text)
        if reason is None and not self._masks_nothing(mask, hidden.dtype):
            reason = "kept: it masks some of the text"
        self._notes.add(reason or "dropped: it masks nothing")
        if reason is None:
            self.fast += 1
        else:
            self.stock += 1
        return reason is None

    def _masks_nothing(self, mask, dtype) -> bool:
        if mask.is_inference():  # it has no version counter to tell that its values have changed
            return _all_attend(mask, dtype)
        version = mask._version
        known = self._verdicts.get(mask)
        if known is None or known[:2] != (version, dtype):
            known = self._verdicts[mask] = version, dtype, _all_attend(mask, dtype)
        return known[2]


def _why_unreadable(mask, hidden, text) -> str | None:
    if not (type(mask) is type(text) is torch.Tensor and text.ndim == 3 and mask.device == hidden.device):
        return "kept: it or the text is not a plain tensor on the device of the hidden states"
    rows, tokens = len(hidden), text.shape[1]
    is_bias = mask.dtype == hidden.dtype and mask.shape == (rows, 1, tokens)
    if not is_bias and mask.shape != (rows, tokens):
        return "kept: its shape is not that of a mask of the text"  # with most of these the host raises, and must
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        return "kept: a CUDA graph is being captured"  # its replays may find other values in the mask
    return None


def _all_attend(mask, dtype) -> bool:
    """As the host reads it: two dimensions hold, in `dtype`, 1 for what is attended to; three hold a bias."""
    attended = mask.to(dtype) == 1 if mask.ndim == 2 else mask == 0
    return bool(attended.all())
