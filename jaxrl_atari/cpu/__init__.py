"""Convolutions that are fast on a CPU: a layer for any network (`conv.py`), the Nature network (`nature.py`)."""
