"""Several replicas behind the real gateway."""
