"""Train with the numbers that are served: quantized weights in the forward pass (``--qat.*``) and in exports."""

from toolkit.extension import Extension

EXTENSION = Extension(
    option_groups={"qat": "toolkit_quantized.qat.QATArgs"},
    quantizer="toolkit_quantized.qat",
)
