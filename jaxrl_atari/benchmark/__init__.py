"""Speed of training and of its parts, measured and compared between values of a config field."""
