"""What speculation gains, on which text and under which load, and that it changes no output."""
