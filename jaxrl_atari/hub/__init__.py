"""Sharing runs on the Hugging Face Hub: the command, and the files of a repository."""
