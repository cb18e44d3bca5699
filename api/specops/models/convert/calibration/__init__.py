"""Calibrated rounding to 4 bits: it depends on the inputs of the products.

`samples` lets the model write text, `activations` runs this text through the graph while it is
built, and `error_feedback` rounds each matrix by its inputs. Nothing is downloaded.
"""

from specops.models.convert.calibration.activations import Activations
from specops.models.convert.calibration.error_feedback import Feedback

__all__ = ["Activations", "Feedback"]
