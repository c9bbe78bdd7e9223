"""Sharing runs on the Hugging Face Hub: the command, the files of a repository, and its model card."""
