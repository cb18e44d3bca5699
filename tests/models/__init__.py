"""Finding, downloading, converting and laying out models."""
