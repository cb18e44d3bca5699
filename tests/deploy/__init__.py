"""Tests of what `deploy/` starts: the gateway, and the manifests for Kubernetes."""
