"""JSON schemas that clients write, and what answers by them look like."""
