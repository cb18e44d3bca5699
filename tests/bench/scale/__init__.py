"""Tests of the benchmark of replicas behind the gateway, and of its simulation."""
