"""Sharing runs on the Hugging Face Hub."""
