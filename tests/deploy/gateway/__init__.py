"""The gateway: Envoy's configuration, held against the real Envoy where it is installed."""
