"""User code that registers environments, networks or algorithms: `--import MODULE_OR_FILE`.

Only the user chooses what is imported: on the command line, or in a config file named there. A stored run names
environments, networks and algorithms, never modules, and they must have been registered.

| module | content |
|---|---|
| named | the option `--import`, and the import of what it names |
| children | processes on this machine (sessions, workers of vector environments), which import the same |
| user_code | the context in which a file of the user runs: modules beside it, and errors that name its line |
"""
