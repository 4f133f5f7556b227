"""Low-precision grouped matrix multiplication for Mixture-of-Experts inference."""

from lowgmm import reference
from lowgmm.api import gmm, moe_ffn, quantize_tokens, route
from lowgmm.formats import QuantTensor
from lowgmm.module import MoEExperts
from lowgmm.quant import dequantize, quantize
from lowgmm.roofline import explain
from lowgmm.routing import Routing

__version__ = "0.1.0"

__all__ = [
    "MoEExperts",
    "QuantTensor",
    "Routing",
    "dequantize",
    "explain",
    "gmm",
    "moe_ffn",
    "quantize",
    "quantize_tokens",
    "reference",
    "route",
]
