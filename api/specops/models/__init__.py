"""From a model's name to folders that the engine can load: presets applied, downloads, conversions,
and weights laid out for this processor."""
