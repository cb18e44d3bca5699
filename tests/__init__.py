"""Tests mirror the packages; a package itself, so that its helpers are imported by name."""
