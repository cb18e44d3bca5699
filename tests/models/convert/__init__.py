"""Tests of the exporter."""
