"""What the two sides of a comparison print of themselves."""

import json
import resource
import statistics


def report(framework: str, mode: str, what: str, rates: list[float]) -> str:
    """A line of JSON: median, min and max over iterations, and the peak memory of the process."""
    numbers = {"median": statistics.median(rates), "min": min(rates), "max": max(rates)}
    unit = "env steps/s" if what == "end_to_end" else "gradient samples/s"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    about = {"framework": framework, "mode": mode, "what": what, "unit": unit, "iterations": len(rates)}
    return json.dumps(about | {k: round(x, 1) for k, x in numbers.items()} | {"peak_rss_gib": round(peak, 3)})
