"""A package: fixtures of its scope, such as the browser and its event loop, end with its tests."""
