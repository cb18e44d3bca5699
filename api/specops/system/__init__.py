"""The machine: memory, processors, priorities, page cache, log lines. No model is known here."""
