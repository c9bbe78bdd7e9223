"""Measuring the speed of training and of its parts, and comparing it between values of a config field."""
