"""Makes a draft head for a model, on the machine at hand and of the model's own words alone.

The engine writes conversations (`conversations`), torch trains a small network on the model's
hidden states and distributions (`training`), and what comes of it is measured against looked-up
draft tokens (`evaluation`). Torch is needed for the training only; serving a head needs none.
"""
