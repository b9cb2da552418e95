"""What quality "high" changes in the arguments of the transformer's forward.

Text masks that mask nothing are dropped. The connectors put registers where a prompt is padded, so the masks that the pipelines
hand in are all ones, and the host adds a bias of zeros to every logit of the text attention. Attention without a bias is another,
faster kernel: 0.14 % of its outputs differ, and it is as near to fp64 (tests/gpu/test_high.py prints both, for several inputs).

Latents that lie channel by channel in memory are laid out token by token. LTX2Pipeline and LTX2ImageToVideoPipeline pack the
latents [B, C, F, H, W] that they draw into a view [B, S, C] that copies nothing. For two prompts they concatenate it, which lays
it out token by token, but the passes beside that one (STG, isolated) get the view. torch multiplies and adds the bias in one step
where the input is contiguous, and in two, with a rounding in between, where it is not. So in stock the STG pass has other bits
than the row of the CFG pass from the first layer on, and no block can be shared. Laid out alike they can: a guided step
of LTX-2.3 then skips 28 blocks. One rounding less moves an output by a bf16 ULP at most, and nearer to fp64.
"""

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ltx2_fastpath.first_sight import is_capturing

from .host import STREAMS


def changes(parts, arguments: dict) -> dict:
    """What to replace among the transformer's `arguments`, by name; nothing unless this thread computes with "high"."""
    changed: dict = {}
    if parts.handle.tier != "high":
        return changed
    for stream in STREAMS:
        hidden, text = arguments[f"{stream}hidden_states"], arguments[f"{stream}encoder_hidden_states"]
        mask = arguments[f"{stream}encoder_attention_mask"]
        if parts.handle.why_not(hidden) is not None:
            continue
        if mask is not None and parts.text_masks[stream].is_idle(mask, hidden, text):
            changed[f"{stream}encoder_attention_mask"] = None
        if not hidden.is_contiguous() and not parts.latents[stream].left_out:
            changed[f"{stream}hidden_states"] = parts.latents[stream].laid_out(hidden)
    return changed


class Latents:
    """How often the latents of one stream were laid out.

    Attributes:
        site: its name in reports; fast: forwards whose latents were laid out token by token; stock, first: 0; left_out: whether
        none are; notes: that.
    """

    def __init__(self, site: str):
        self.site = site
        self.fast = self.stock = self.first = 0
        self.left_out = False
        self.notes = ["laid out token by token, as in the CFG pass"]

    def laid_out(self, latents):
        """`latents` [B, S, C] as a contiguous tensor."""
        self.fast += 1
        return latents.contiguous()


class TextMask:
    """Which masks of one stream's text mask nothing; their values are looked at once, not in every forward.

    Attributes:
        site: its name in reports; fast: forwards without their mask; stock: forwards that kept it; first: 0; left_out: whether
        all do; notes: why.
    """

    def __init__(self, site: str):
        self.site = site
        self.fast = self.stock = self.first = 0
        self.left_out = False
        self._notes: set[str] = set()  # of the few that are written below
        # {mask: ((version, address, dtype), whether it is idle)}. By identity: an address can come to mean other values. A mask
        # takes its verdict along when it goes, and the pipelines keep theirs for all steps.
        self._verdicts = WeakTensorKeyDictionary()

    @property
    def notes(self) -> list[str]:
        return sorted(self._notes)

    def is_idle(self, mask, hidden, text) -> bool:
        """Whether `mask` lets `hidden` attend to all of `text`. Synchronises where it must look at the values."""
        reason = "kept: left out" if self.left_out else _why_unreadable(mask, hidden, text)
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
        # What is written past both (`mask.data[...] = 0`, `mask.numpy()[...] = 0`) nobody can see without looking.
        seen = mask._version, mask.data_ptr(), dtype
        known = self._verdicts.get(mask)
        if known is None or known[0] != seen:
            known = self._verdicts[mask] = seen, _all_attend(mask, dtype)
        return known[1]


def _why_unreadable(mask, hidden, text) -> str | None:
    if not (type(mask) is type(text) is torch.Tensor and text.ndim == 3 and mask.device == hidden.device):
        return "kept: it or the text is not a plain tensor on the device of the hidden states"
    rows, tokens = len(hidden), text.shape[1]
    is_bias = mask.dtype == hidden.dtype and mask.shape == (rows, 1, tokens)
    if not is_bias and mask.shape != (rows, tokens):
        return "kept: its shape is not that of a mask of the text"  # with most of these the host raises, and must
    if mask.is_cuda and is_capturing():
        return "kept: a CUDA graph is being captured"  # its replays may find other values in the mask
    return None


def _all_attend(mask, dtype) -> bool:
    """As the host reads it: two dimensions hold, in `dtype`, 1 for what is attended to; three hold a bias."""
    attended = mask.to(dtype) == 1 if mask.ndim == 2 else mask == 0
    return bool(attended.all())
