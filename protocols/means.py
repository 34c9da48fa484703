"""Means that forget."""


def running_mean(mean: float | None, value: float, gain: float) -> float:
    """The exponential moving average after one more value; `gain` in (0, 1] is what the value counts.

    None is a mean of nothing yet, and becomes the value: there is no start from zero to be corrected for.
    """
    return value if mean is None else mean + gain * (value - mean)
