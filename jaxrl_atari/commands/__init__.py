"""Commands whose names belong to libraries at the root of the package, such as `devices`."""
