"""A bit-exact fast path for LTX-2, LTX-2.3 and LTX-2.5 in Hugging Face diffusers.

>>> import torch
>>> import ltx2_fastpath
>>> from ltx2_fastpath.testing import models

Here a tiny transformer with random weights stands for your pipeline:

>>> transformer = models.tiny_transformer("2.0")
>>> inputs = models.inputs(transformer, height=64, width=96, num_frames=9, text_tokens=16)
>>> with torch.no_grad():
...     video, audio = transformer(**inputs)

`enable` makes it fast where that can be done bit for bit, and changes nothing where it cannot:

>>> handle = ltx2_fastpath.enable(transformer)
>>> with torch.no_grad():
...     fast_video, fast_audio = transformer(**inputs)
>>> torch.equal(video, fast_video), torch.equal(audio, fast_audio)
(True, True)

`disabled` is a context in which this thread computes the stock way:

>>> with ltx2_fastpath.disabled(transformer), torch.no_grad():
...     stock_video, _ = transformer(**inputs)
>>> torch.equal(video, stock_video)
True

`quality` is a context in which this thread's requests may differ from stock by roundings, where that saves time:

>>> with ltx2_fastpath.quality(transformer, "high"), torch.no_grad():
...     close_video, _ = transformer(**inputs)
>>> torch.allclose(video, close_video, atol=1e-3)
True

`disable` puts everything back:

>>> ltx2_fastpath.disable(transformer)
>>> ltx2_fastpath.report(transformer)
ltx2_fastpath: not enabled

What has no LTX-2 transformer is an error that says what was found:

>>> ltx2_fastpath.enable("LTX-2")
Traceback (most recent call last):
    ...
TypeError: expected an LTX2VideoTransformer3DModel or an LTX2VideoDiffusionDecoderModel, or a pipeline with one, but found str
"""

import importlib.util as _util
import sys as _sys
from pathlib import Path as _Path
from typing import Any as _Any

__version__ = "0.1.0"

try:
    _patches = _Path(__file__).parent.parent / "patches"
    if not (_Path(__file__).parent / "patches").is_dir():  # a checkout, in which patches lies beside this folder
        _spec: _Any = _util.spec_from_file_location(
            f"{__name__}.patches", _patches / "__init__.py", submodule_search_locations=[str(_patches)]
        )
        _sys.modules[_spec.name] = patches = _util.module_from_spec(_spec)
        _spec.loader.exec_module(patches)
    from .api import FastPath, disable, disabled, enable, quality, report
except ModuleNotFoundError as _error:
    if _error.name != "torch":
        raise

    def __getattr__(name: str):  # so that `python -m ltx2_fastpath` can say what is missing
        raise ImportError("ltx2_fastpath needs torch: https://pytorch.org says how to install it")


__all__ = ["FastPath", "disable", "disabled", "enable", "quality", "report", "__version__"]
