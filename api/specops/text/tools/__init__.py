"""Tool calls: learns a model's format, writes calls and grammars in it, and parses answers."""
