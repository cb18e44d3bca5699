"""The making of tables of n-grams: conversations, counting, measuring."""
