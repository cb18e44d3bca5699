"""The stack on a real Docker Engine: what compose.yaml promises, kept by a kernel."""
