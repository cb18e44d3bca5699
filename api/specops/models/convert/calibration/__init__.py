"""Rounding to 4 bits that looks at what the weights are multiplied with.

`samples` has the model write text, `activations` runs that text through the graph while it is
drawn, and `error_feedback` rounds each matrix by what came in there. Nothing is downloaded.
"""

from specops.models.convert.calibration.activations import Activations
from specops.models.convert.calibration.error_feedback import Feedback
from specops.models.convert.calibration.samples import draw_samples

__all__ = ["Activations", "Feedback", "draw_samples"]
