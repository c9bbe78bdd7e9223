"""Runs on the Hugging Face Hub: push and pull."""
