"""What requests cost each other in the engine's batches."""
