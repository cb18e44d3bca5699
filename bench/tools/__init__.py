"""What every benchmark shares: statistics, tables and pictures, the machine, processes, quiet."""
