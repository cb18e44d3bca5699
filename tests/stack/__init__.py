"""Tests of everything around the service: Compose, images, dashboards, scripts, the real stack."""
