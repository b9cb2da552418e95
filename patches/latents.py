"""Latents that lie channel by channel in memory: laid out token by token for requests of quality "high".

The pipelines pack latents [B, C, F, H, W] into a view [B, S, C] that copies nothing. For two prompts they concatenate it, which
lays it out token by token, but the passes beside that one (STG, isolated) get the view. torch multiplies and adds the bias in one
step where the input is contiguous, and in two, with a rounding in between, where it is not. So in stock the STG pass has other
bits than the row of the CFG pass from the first layer on, and no block can be shared. Laid out alike they can: a guided step of
LTX-2.3 then skips 28 blocks. One rounding less moves an output by a bf16 ULP at most, and nearer to fp64.
"""

STREAMS = ("", "audio_")


def lay_out(fast, arguments: dict) -> bool:
    """Make the latents in the `arguments` of the transformer's forward contiguous. -> whether one was not"""
    copied = False
    if fast.tier == "high":
        for stream in STREAMS:
            name = f"{stream}hidden_states"
            if fast.why_not(arguments[name]) is None and not arguments[name].is_contiguous():
                arguments[name] = arguments[name].contiguous()
                fast.sites[f"{stream}latents"].fast += 1
                copied = True
    return copied


class Latents:
    """How often the latents of one stream were laid out.

    Attributes:
        site: its name in reports; fast: forwards whose latents were laid out token by token; stock: 0; notes: that.
    """

    stock = 0
    notes = ["laid out token by token, as in the CFG pass"]

    def __init__(self, site: str):
        self.site = site
        self.fast = 0
