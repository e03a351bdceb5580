"""How long a step takes: work counted from the same terms as memory, at rates fitted on published throughput."""

from memcalc.timing.forecast import Forecast, forecast, model_flops_per_token
from memcalc.timing.rates import Rates, peak_flops, rates_for
from memcalc.timing.times import Times, step_times

__all__ = [
    "Forecast",
    "Rates",
    "Times",
    "forecast",
    "model_flops_per_token",
    "peak_flops",
    "rates_for",
    "step_times",
]
