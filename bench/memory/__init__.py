"""The service under memory caps, in cgroups made by hand."""
