"""Reports of runs, suites and searches: one HTML file each, with everything in it."""
