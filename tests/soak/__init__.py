"""Hours of mixed load on a real server, watched all along."""
