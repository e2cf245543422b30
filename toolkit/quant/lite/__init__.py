"""The methods of ``tool lite``, one function each: options checked, then ``run.run``."""

from toolkit.quant.lite.eight_bits import smooth_quant
from toolkit.quant.lite.floats import blocked_fp8, mxfp4
from toolkit.quant.lite.integers import auto_awq, auto_gptq
from toolkit.quant.lite.searched import search
from toolkit.quant.lite.tuned_rounding import auto_round
from toolkit.quant.options import Common
from toolkit.quant.run import Result

__all__ = ["Common", "Result", "auto_awq", "auto_gptq", "auto_round", "blocked_fp8", "mxfp4", "search", "smooth_quant"]
