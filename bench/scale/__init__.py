"""Several replicas behind the real gateway: up to three measured, a thousand simulated."""
