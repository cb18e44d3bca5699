"""The service's metrics. Only these modules know Prometheus' library."""
