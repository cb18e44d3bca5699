"""Makes a draft head for a model, on this machine and only from texts of the model itself.

The engine writes conversations (`conversations`), torch trains a small network on the model's
hidden states and distributions (`training`), and the head is measured against the suffix drafter
(`evaluation`). Only the training needs torch; serving a head does not.
"""
