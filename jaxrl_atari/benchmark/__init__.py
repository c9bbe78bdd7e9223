"""Speed of training and of its parts, measured; comparisons with other programs."""
