"""A bit-exact fast path for LTX-2, LTX-2.3 and LTX-2.5 in Hugging Face diffusers.

>>> import ltx2_fastpath
>>> ltx2_fastpath.__version__
'0.1.0'
"""

from .api import FastPath, disable, disabled, enable, report

__version__ = "0.1.0"
__all__ = ["FastPath", "disable", "disabled", "enable", "report", "__version__"]
