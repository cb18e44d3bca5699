"""The making of draft heads: conversations, training, and the finished head."""
