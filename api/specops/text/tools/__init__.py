"""How models call tools: a table of the forms that families were trained on, and their reader."""
