"""The service's figures for Prometheus. These modules alone know its library."""
