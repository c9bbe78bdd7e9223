"""Commands whose modules at the root of the package are libraries as well."""
