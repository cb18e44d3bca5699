"""The gateway before the replicas: Envoy's configuration, and what runs it."""
