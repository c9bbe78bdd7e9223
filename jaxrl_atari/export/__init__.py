"""Exported policies: programs that play without this package. The command is `__main__.py`."""
