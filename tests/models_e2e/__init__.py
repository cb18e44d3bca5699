"""Models in their published shapes, from a hub to answers, in real processes."""
